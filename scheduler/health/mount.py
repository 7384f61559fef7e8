"""Shared file systems: each is asked by a child that may hang, and is then left alone until it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.mounts import is_shared, parse_mounts
from deeplink.scheduler.health.child import KILLED_WAIT_S, NOT_FOUND, CheckProcess
from deeplink.scheduler.health.look import Look, drain, one_line
from deeplink.scheduler.health.reading import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.health.settings import MountSettings

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


def ask_statfs(path: str) -> list[str]:
    """Return a command that asks a file system for its room: a small program, and nothing of ours in memory."""
    return ["stat", "--file-system", "--format=%S", "--", path]


def watched_mounts(mountinfo: str, settings: MountSettings) -> list[str]:
    """Return the mount points to ask: those the site names, and each that lies on a shared file system."""
    # The later of two on one point hides the earlier one, which nobody can ask then.
    found = [point for point, kind in dict(parse_mounts(mountinfo)).items() if is_shared(kind)]
    return [point for point in dict.fromkeys([*settings.paths, *found]) if point not in settings.skip][
        :MOST_MOUNTS
    ]


@dataclass(slots=True)
class MountCheck:
    """Asks every mount at once, each by a child of its own.

    Attributes:
        mountinfo: where the mounts are read.
        command: returns the command that asks a mount point.
    """

    settings: MountSettings
    clock: Clock
    mountinfo: Path = Path("/proc/self/mountinfo")
    command: Callable[[str], Sequence[str]] = ask_statfs
    _children: dict[str, CheckProcess] = field(default_factory=dict)

    def look(self) -> Look:
        """Look once; ends within the deadline, whatever hangs."""
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
        asked = [path for path in dict.fromkeys([*asked, *self._hanging()]) if path not in missing]
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

    def close(self) -> None:
        """End the children that can be ended: all at once, for each that cannot would be waited for."""
        children = list(self._children.values())  # a look may still be adding to them
        for child in children:
            child.kill(0.0)
        end = self.clock.monotonic() + KILLED_WAIT_S
        for child in children:
            child.answer(max(0.0, end - self.clock.monotonic()))

    def _hanging(self) -> list[str]:
        return [path for path, child in self._children.items() if child.age_s]

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
    # Without the program itself nobody was asked.
    return f"{path}: {said}", code != NOT_FOUND and any(word in stderr for word in _BROKEN)
