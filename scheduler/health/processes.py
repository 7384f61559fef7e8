"""Processes that are dead and nobody waits for, and those that sleep uninterruptibly for long."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Complaint, Look, comment, observe
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deeplink.clock import Clock
    from deeplink.scheduler.health.settings import ProcessSettings

ZOMBIES_MANY = 100
_NAMED = 3  # processes named in a sentence
_AFTER_NAME = 19  # starttime is so many fields behind the state, proc(5)


@dataclass(frozen=True, slots=True)
class Still:
    """A process that does nothing.

    Attributes:
        pid: its number.
        start: when it began, in ticks: with the number it names one process for ever.
        state: Z, or D.
        switches: times it was given up the processor for another; it is the same sleep while this stays.
    """

    pid: int
    start: int
    name: str
    state: str
    switches: int = 0


def read_still(proc: Path) -> Iterator[Still]:
    """Yield the processes in state Z or D."""
    for path in proc.iterdir():
        if not path.name.isdigit():
            continue
        try:
            found = parse_stat((path / "stat").read_text(encoding="utf-8", errors="replace"))
            if found is None or found.state not in {"Z", "D"}:
                continue
            switches = _switches((path / "status").read_text(encoding="utf-8", errors="replace"))
        except OSError:  # it ended meanwhile
            continue
        yield Still(found.pid, found.start, found.name, found.state, switches)


def parse_stat(line: str) -> Still | None:
    """Return what a line of /proc/PID/stat says; None where it is none. A name may hold blanks and brackets.

    >>> parse_stat("7 (a) b) D 1 " + " ".join(map(str, range(17))) + " 4242")
    Still(pid=7, start=4242, name='a) b', state='D', switches=0)
    """
    head, bracket, tail = line.rpartition(")")
    pid, opened, name = head.partition(" (")
    words = tail.split()
    if not (bracket and opened and pid.isdigit()) or len(words) <= _AFTER_NAME or not words[_AFTER_NAME].isdigit():
        return None
    return Still(int(pid), int(words[_AFTER_NAME]), name, words[0])


def _switches(status: str) -> int:
    lines = [line.split() for line in status.splitlines() if "ctxt_switches:" in line]
    return sum(int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit())


@dataclass(slots=True)
class ProcessCheck:
    """Looks at all processes, and remembers since when each has been still."""

    settings: ProcessSettings
    clock: Clock
    proc: Path = Path("/proc")
    _since: dict[Still, float] = field(default_factory=dict)

    def look(self) -> Look:
        """Look once."""
        now = self.clock.monotonic()
        self._since = {still: self._since.get(still, now) for still in read_still(self.proc)}
        return Look(
            tuple(judge_processes(((still, now - since) for still, since in self._since.items()), self.settings))
        )


def judge_processes(still: Iterable[tuple[Still, float]], settings: ProcessSettings) -> Iterator[Complaint]:
    """Return what is wrong, given each still process and for how many seconds it has been so."""
    found = list(still)
    stuck = [(one, age) for one, age in found if one.state == "D" and age >= settings.stuck_s]
    zombies = [(one, age) for one, age in found if one.state == "Z" and age >= settings.zombie_s]
    if stuck:
        oldest = max(age for _, age in stuck)
        said = f"{counted(len(stuck), 'process')} uninterruptible, for up to {oldest:.0f} s: {_named(stuck)}"
        yield comment("stuck", said)
    if zombies:
        said = f"{counted(len(zombies), 'process')} dead and not waited for: {_named(zombies)}"
        yield comment("zombies", said) if len(zombies) >= ZOMBIES_MANY else observe("zombies", said)


def _named(found: list[tuple[Still, float]]) -> str:
    longest = sorted(found, key=lambda one: (-one[1], one[0].pid))
    said = ", ".join(f"{one.name} ({one.pid})" for one, _ in longest[:_NAMED])
    return f"{said} and {len(found) - _NAMED} more" if len(found) > _NAMED else said
