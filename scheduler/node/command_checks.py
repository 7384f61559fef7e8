"""Shared file systems: each is asked by a child that may hang, and is then left alone until it returns."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.store_place import is_shared, parse_mounts
from deeplink.scheduler.node.check_result import GOOD, Look, NodeCheck, comment, drain, one_line
from deeplink.scheduler.node.child import KILLED_WAIT_S, NOT_FOUND, CheckProcess, CommandResult
from deeplink.scheduler.node.reading import text_of
from deeplink.scheduler.node.settings import BUILT_IN, SiteSettings, is_check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.settings import MountSettings

MOST_MOUNTS = 64
_SETTLE_S = 0.5  # of the look's deadline kept for what comes after the waiting
# What stat(1) says, in English, of storage that is broken; a mount we may not look at is another matter.
_BROKEN = (
    "Stale file handle",
    "Input/output error",
    "Transport endpoint is not connected",
    "Host is down",
    "No such device",
    "Connection timed out",
    "Remote I/O error",
    "Cannot send after transport endpoint shutdown",
    "No such file or directory",
)
MOST_CHECKS = 64
_OK, _WARNING, _CRITICAL = 0, 1, 2
_NHC = re.compile(r"^\s*ERROR:\s+nhc:", re.MULTILINE)
_SUBJECT = "site"


def ask_statfs(path: str) -> list[str]:
    """Return a command that asks a file system for its room: a small program, and nothing of ours in memory."""
    return ["stat", "--file-system", "--format=%S", "--", path]


def watched_mounts(mountinfo: str, settings: MountSettings) -> list[str]:
    """Return the mount points to ask: those the site names, and each that lies on a shared file system."""
    # The later of two on one point hides the earlier one, which cannot be asked then.
    found = [point for point, kind in dict(parse_mounts(mountinfo)).items() if is_shared(kind)]
    return [point for point in dict.fromkeys([*settings.paths, *found]) if point not in settings.skip][
        :MOST_MOUNTS
    ]


@dataclass(slots=True)
class MountCheck(NodeCheck):
    """Asks every mount at once, each by a child of its own."""

    settings: MountSettings
    clock: Clock
    mountinfo: Path = Path("/proc/self/mountinfo")  # where the mounts are read
    command: Callable[[str], Sequence[str]] = ask_statfs  # returns the command that asks a mount point
    _children: dict[str, CheckProcess] = field(default_factory=dict)

    @override
    def look(self) -> Look:
        mountinfo = text_of(self.mountinfo)
        if mountinfo is None:
            return Look((), f"{self.mountinfo} cannot be read")
        mounted = {point for point, _ in parse_mounts(mountinfo)}
        asked = watched_mounts(mountinfo, self.settings)
        complaints = [
            drain(path, f"{path} is not mounted")
            for path in self.settings.paths
            if path not in mounted and path in asked
        ]
        missing = {complaint.subject for complaint in complaints}
        # One that hangs is asked about also after it was unmounted by force: its child says when it is over.
        hanging = [path for path, child in self._children.items() if child.age_s]
        asked = [path for path in dict.fromkeys([*asked, *hanging]) if path not in missing]
        end = self.clock.monotonic() + max(0.1, self.settings.deadline_s - _SETTLE_S)
        for path in asked:
            self._children.setdefault(path, CheckProcess(self.clock)).begin(self.command(path))
        unknown = []
        for path in asked:
            said, broken = self._answer(path, end)
            if broken:
                complaints.append(drain(path, said))
            elif said:
                unknown.append(said)
        self._children = {path: child for path, child in self._children.items() if path in asked}
        return Look(tuple(complaints), "; ".join(unknown))

    @override
    def close(self) -> None:
        children = list(self._children.values())  # a look may still be adding to them
        for child in children:
            child.kill(0.0)
        end = self.clock.monotonic() + KILLED_WAIT_S
        for child in children:
            child.answer(max(0.0, end - self.clock.monotonic()))

    def _answer(self, path: str, end: float) -> tuple[str, bool]:
        child = self._children[path]
        answer = child.answer(max(0.0, end - self.clock.monotonic()))
        if answer is None:
            return f"{path} has not answered for {child.age_s:.0f} s", True
        return judge_mount(path, answer.code, answer.stderr)


def judge_mount(path: str, code: int, stderr: str) -> tuple[str, bool]:
    """Return what is to be said of a mount that answered, empty where all is well, and whether it is broken."""
    if not code:
        return "", False
    said = one_line(stderr) or f"stat of {path} exited {code}"
    # Without the program itself nothing was asked.
    return f"{path}: {said}", code != NOT_FOUND and any(word in stderr for word in _BROKEN)


@dataclass(slots=True)
class SiteCheck(NodeCheck):
    """Runs one program; one that does not end in time is killed, and never started twice."""

    settings: SiteSettings
    clock: Clock
    _child: CheckProcess = field(init=False)

    def __post_init__(self) -> None:
        self._child = CheckProcess(self.clock)

    @override
    def look(self) -> Look:
        child = self._child
        child.kill()
        if child.age_s:
            return Look((), f"it has not ended for {child.age_s:.0f} s, not even when killed")
        problem = _not_ours(Path(self.settings.command[0]))
        if problem:
            return Look((), problem)
        longest_s = self.settings.deadline_s * 0.9
        answer = child.run(self.settings.command, longest_s, cwd=Path("/"))
        if answer is None:
            return Look((), f"it did not end within {longest_s:.0f} s and was killed")
        return judge_answer(answer)

    @override
    def close(self) -> None:
        self._child.kill()


def judge_answer(answer: CommandResult) -> Look:
    """Return what a program's end says: 0 well, 1 a comment, 2 drain, everything else unknown.

    LBNL NHC exits 1 for all that is wrong and says `ERROR: nhc: ...`: that asks for a drain.
    """
    if answer.code == _OK:
        return GOOD
    said = _said(answer)
    nhc = answer.code == _WARNING and _NHC.search(f"{answer.stdout}\n{answer.stderr}")
    if answer.code == _CRITICAL or nhc:
        return Look((drain(_SUBJECT, said),))
    return Look((comment(_SUBJECT, said),)) if answer.code == _WARNING else Look((), said)


def _said(answer: CommandResult) -> str:
    """Return the program's own first line, without the performance data that Nagios plugins put behind a bar."""
    lines = [line for line in f"{answer.stdout}\n{answer.stderr}".splitlines() if line.strip()]
    nhc = [line for line in lines if _NHC.match(line)]
    said = one_line((nhc or lines or [""])[0].partition("|")[0])
    return said or f"it exited {answer.code} and said nothing"


def _not_ours(program: Path) -> str:
    """Return why a program must not be run, empty where nothing speaks against it: root may be running us."""
    if os.geteuid() or not program.is_absolute():
        return ""
    try:
        for path in (program, program.parent):
            mode = path.stat().st_mode
            keeps_others_out = path == program.parent and mode & stat.S_ISVTX  # of a file the bit says nothing
            if mode & stat.S_IWOTH and not keeps_others_out:
                return f"not run as root: anyone may write to {path}"
    except OSError:
        return ""  # running it will tell
    return ""


@dataclass(frozen=True, slots=True)
class SiteChecks:
    """The site's checks by name, and what cannot be one."""

    checks: Mapping[str, SiteSettings] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


def site_checks(folder: Path | None, settings: Mapping[str, SiteSettings]) -> SiteChecks:
    """Return the site's checks: settings with a command, and executables of a folder by their stem; may hang."""
    found = {name: one for name, one in settings.items() if one.command}
    refused = []
    try:
        paths = _executables(folder) if folder is not None else []
    except OSError as problem:
        paths = []
        refused.append(f"{folder}: its checks cannot be listed: {problem.strerror or problem}")
    for path in paths:
        name = path.stem
        if not is_check_name(name) or name in BUILT_IN or name in found:
            refused.append(f"{path}: {name!r} cannot be its check's name, or is another's")
        elif len(found) >= MOST_CHECKS:
            refused.append(f"{path}: there are more than {MOST_CHECKS} checks")
        else:
            found[name] = dataclasses.replace(settings.get(name, SiteSettings()), command=(str(path),))
    return SiteChecks(found, tuple(refused))


def _executables(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    return [
        path
        for path in paths
        if not path.name.startswith(".")
        and not path.name.endswith("~")
        and path.is_file()
        and os.access(path, os.X_OK)
    ]
