"""The site's own checks: programs with Nagios exit codes, or that answer as LBNL's Node Health Check does."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.child import CheckProcess, CommandResult
from deeplink.scheduler.health.look import GOOD, Look, comment, drain, one_line
from deeplink.scheduler.health.settings import BUILT_IN, SiteSettings, is_check_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.clock import Clock

MOST_CHECKS = 64
_OK, _WARNING, _CRITICAL = 0, 1, 2
_NHC = re.compile(r"^\s*ERROR:\s+nhc:", re.MULTILINE)
_SUBJECT = "site"


@dataclass(slots=True)
class SiteCheck:
    """Runs one program; one that does not end in time is killed, and never started twice."""

    settings: SiteSettings
    clock: Clock
    _child: CheckProcess | None = None

    def look(self) -> Look:
        """Run it once."""
        child = self._child = self._child or CheckProcess(self.clock)
        if child.age_s:
            child.kill()
            if child.age_s:
                return Look((), f"it has not ended for {child.age_s:.0f} s, not even when killed")
        problem = _not_ours(Path(self.settings.command[0]))
        if problem:
            return Look((), problem)
        child.begin(self.settings.command, cwd=Path("/"))
        answer = child.answer(self.settings.deadline_s * 0.9)
        if answer is None:
            child.kill()
            return Look((), f"it did not end within {self.settings.deadline_s * 0.9:.0f} s and was killed")
        return judge_answer(answer)

    def close(self) -> None:
        """End it if it runs."""
        if self._child is not None:
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
            if path.stat().st_mode & stat.S_IWOTH and not path.stat().st_mode & stat.S_ISVTX:
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
    """Return the site's checks: those with a command of their own, and the executables of a folder.

    An executable's name, without its ending, is the check's; `[site.NAME]` says how it is looked at. May hang as
    the folder may.
    """
    found = {name: one for name, one in settings.items() if one.command}
    refused = []
    for path in _executables(folder):
        name = path.stem
        if not is_check_name(name) or name in BUILT_IN or name in found:
            refused.append(f"{path}: {name!r} cannot be its check's name, or is another's")
        elif len(found) >= MOST_CHECKS:
            refused.append(f"{path}: there are more than {MOST_CHECKS} checks")
        else:
            found[name] = _with_command(settings.get(name, SiteSettings()), path)
    return SiteChecks(found, tuple(refused))


def _with_command(settings: SiteSettings, path: Path) -> SiteSettings:
    return dataclasses.replace(settings, command=(str(path),))


def _executables(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [
        path
        for path in paths
        if not path.name.startswith(".")
        and not path.name.endswith("~")
        and path.is_file()
        and os.access(path, os.X_OK)
    ]
