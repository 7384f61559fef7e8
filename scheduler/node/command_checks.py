"""Checks of the site's own: a program each, run by a child that may hang, and never started twice."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.node.check_result import GOOD, Look, NodeCheck, comment, drain, one_line
from deeplink.scheduler.node.child import CheckProcess, CommandResult
from deeplink.scheduler.node.settings import BUILT_IN, SiteSettings, is_check_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.clock import Clock

MOST_CHECKS = 64
_OK, _WARNING, _CRITICAL = 0, 1, 2
_NHC = re.compile(r"^\s*ERROR:\s+nhc:", re.MULTILINE)
_SUBJECT = "site"


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
