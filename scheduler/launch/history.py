"""Progress and setbacks of a run, and of the job's runs before it."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.publish import write_text
from deeplink.scheduler.recovery.rank_failure import Cause, Setback, Tried
from deeplink.scheduler.recovery.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from deeplink.core.types import Attempt
    from deeplink.scheduler.recovery.records import ProgressPoint
    from deeplink.scheduler.recovery.relaunch import AttemptVerdict

log = logging.getLogger(__name__)

# What says something about the application. That nodes were lost says nothing about the next run's nodes.
CARRIED = frozenset({Cause.UNKNOWN, Cause.OUT_OF_MEMORY})
ITS_OWN_FAULT = frozenset({IncidentKind.APPLICATION_FAILED, IncidentKind.OUT_OF_MEMORY})
MOST_SETBACKS = 16
ALIKE = 0.05  # runs without steps that failed, and differ by no more than this part in length, got equally far
LONG_RUN_S = 600.0  # an attempt of a job that reports no steps counts as progress when it ran for so long


@dataclass(slots=True)
class Progress:
    """The newest step of a run and of its newest attempt; pure."""

    best: int | None = None  # newest step of any attempt; None before the first report
    first: int | None = None  # first step the newest attempt reported
    fruitless: int = 0  # relaunches since a newer step than ever before was reported
    _began: float = 0.0
    _newest: int | None = None
    _newest_at: float = 0.0
    _best_before: int | None = None

    def begin(self, now: float, *, relaunch: bool) -> None:
        """A new attempt begins."""
        if relaunch:
            self.fruitless = self.fruitless_now(now) + 1
        self._best_before = self.best
        self._began, self.first, self._newest = now, None, None

    def fruitless_now(self, now: float) -> int:
        """Return the relaunches since the newest step, or since a long run of a job that reports none."""
        return 0 if self.best is None and self.ran_s(now) >= LONG_RUN_S else self.fruitless

    def moved(self, by_s: float, now: float) -> Progress:
        """Return the same with the moments of another clock, of which none is to come."""
        began, newest_at = min(now, self._began + by_s), min(now, self._newest_at + by_s)
        return replace(self, _began=began, _newest_at=newest_at)

    def ran_s(self, now: float) -> float:
        """Return the seconds since the newest attempt began."""
        return now - self._began

    def take(self, points: Iterable[ProgressPoint], attempt: Attempt, now: float) -> bool:
        """Take in reports; those of other attempts do not count. True when they hold the attempt's first step."""
        steps = [point.step for point in points if point.attempt == attempt]
        if not steps:
            return False
        began, newest = self.first is None, max(steps)
        if began:
            self.first = min(steps)
        if self._newest is None or newest > self._newest:
            self._newest, self._newest_at = newest, now
        if self.best is None or newest > self.best:
            self.best, self.fruitless = newest, 0
        return began

    def stuck_s(self, now: float) -> float | None:
        """Return the seconds since the newest attempt's newest step; None before its first report."""
        return None if self._newest is None else now - self._newest_at

    @property
    def repeated(self) -> int:
        """Steps the newest attempt does again, because they came after the last checkpoint."""
        if self.first is None or self._best_before is None:
            return 0
        return max(0, self._best_before - self.first + 1)


@dataclass(slots=True)
class History:
    """The setbacks of a run, with the file that keeps them for the job's next run."""

    path: Path
    restart: int
    progress: Progress
    setbacks: list[Setback] = field(default_factory=list)  # the newest ones, the oldest first
    relaunches: int = 0  # in this run
    # How the run of the job before this one ended, where that was the application's own fault.
    before: IncidentKind | None = None
    _best_before: int | None = field(init=False)
    _stepped: bool = field(init=False)
    _is_stale: bool = field(init=False)
    _taking_back: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Take over what an earlier run of the job left."""
        try:
            self._carry_over()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as problem:
            log.warning("%s: %s", self.path, problem)
        self._best_before = self.progress.best
        self._is_stale = bool(self.setbacks or self.before)
        # On a job's first run it can only be of another job that had the number.
        self._stepped = self.restart > 0 and self._mark.exists()

    def _carry_over(self) -> None:
        kept = json.loads(self.path.read_text(encoding="ascii"))
        if int(kept["restart"]) >= self.restart:
            return  # of another call of the same script
        setbacks = [Setback(Cause(cause), int(code), float(ran_s)) for cause, code, ran_s in kept["setbacks"]]
        best = None if kept["best"] is None else int(kept["best"])
        self.before = IncidentKind(kept["ended"]) if kept["ended"] else None
        self.setbacks, self.progress.best, self.progress.fruitless = setbacks, best, len(setbacks)

    def go_on(self, progress: Progress, setbacks: Iterable[Setback], relaunches: int) -> None:
        """Take over what another launcher of this run knew when it died."""
        self.progress, self.setbacks, self.relaunches = progress, [*setbacks], relaunches

    @property
    def gained(self) -> bool:
        """Whether a newer step than before this run was reported."""
        return self.progress.best is not None and self.progress.best != self._best_before

    @property
    def goes_on(self) -> bool:
        """Whether any run of the job came to a step: then there is something to go on from."""
        return self._stepped or self.progress.best is not None

    @property
    def _mark(self) -> Path:
        return self.path.with_name(f"stepped.{self.path.name}")

    def note_step(self) -> None:
        """Note for later runs, once, that a step was reported; does not wait for the storage."""
        if not self._stepped:
            self._stepped = True
            _in_background(self._mark, self._mark.touch)

    def note_progress(self) -> None:
        """Remove what earlier runs left, once this one has got further; does not wait for the storage."""
        # It may end without a word to the next run: preempted, say, or with its batch host.
        if self._is_stale and self.gained:
            self._is_stale = False
            self._taking_back = _in_background(self.path, lambda: self.path.unlink(missing_ok=True))

    def note(self, cause: Cause, code: int, now: float) -> None:
        """The newest attempt has ended so."""
        self.setbacks = [*self.setbacks, Setback(cause, code, self.progress.ran_s(now))][-MOST_SETBACKS:]

    def tried(self, now: float) -> Tried:
        """Return what was tried, as verdicts want to know it."""
        fruitless = self.progress.fruitless_now(now)
        recent = self.setbacks[-fruitless:] if fruitless else self._no_further(now)
        return Tried(since_progress=tuple(recent), relaunches=self.relaunches, best=self.progress.best)

    def _no_further(self, now: float) -> list[Setback]:
        """Return the setback before this run, if that one ran as long: a run without steps then got no further."""
        if self.progress.best is not None:
            return []
        ran_s = self.progress.ran_s(now)
        last = [one for one in self.setbacks[-1:] if one.cause in CARRIED]
        return [one for one in last if abs(one.ran_s - ran_s) <= ALIKE * ran_s]

    def leave(self, verdict: AttemptVerdict, now: float) -> None:
        """Write down, for the next run of the job, that this one ended so; takes as long as the storage."""
        if self._taking_back is not None:
            self._taking_back.join()
        recent = list(self.tried(now).since_progress) if verdict.kind else []
        if verdict.kind and verdict.cause is not None:
            recent.append(Setback(verdict.cause, verdict.code, self.progress.ran_s(now)))
        kept = {
            "restart": self.restart,
            "best": self.progress.best,
            "setbacks": [[one.cause.value, one.code, one.ran_s] for one in recent if one.cause in CARRIED],
            "ended": verdict.kind.value if verdict.kind in ITS_OWN_FAULT else "",
        }
        _logged(self.path, lambda: write_text(self.path, json.dumps(kept)))


def file_of(folder: Path, command: Sequence[str]) -> Path:
    """Return where a command's history is kept: a script may call several."""
    digest = hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()
    return folder / f"history.{digest[:12]}"


def _logged(path: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as problem:
        log.warning("%s: %s", path, problem)


def _in_background(path: Path, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=_logged, args=(path, work), name="deeplink-history", daemon=True)
    thread.start()
    return thread
