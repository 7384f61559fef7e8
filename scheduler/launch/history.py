"""What was tried to bring a run back, in this run of the job and in those before it."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.publish import write_text
from deeplink.scheduler.launch.failure import Cause, Setback, Tried
from deeplink.scheduler.watch.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.scheduler.launch.progress import Progress
    from deeplink.scheduler.launch.verdict import AttemptVerdict

log = logging.getLogger(__name__)

CARRIED = frozenset({Cause.UNKNOWN, Cause.OUT_OF_MEMORY})
"""What says something about the application. That nodes were lost says nothing about the next run's nodes."""
ITS_OWN_FAULT = frozenset({IncidentKind.APPLICATION_FAILED, IncidentKind.OUT_OF_MEMORY})
MOST_SETBACKS = 16
ALIKE = 0.05
"""Two runs without steps that fail by themselves, and differ by no more than this part in length, got as far."""


@dataclass(slots=True)
class History:
    """The setbacks of a run.

    Attributes:
        setbacks: the newest ones, the oldest first.
        relaunches: in this run.
        before: how the run of the job before this one ended, where that was the application's own fault.
    """

    setbacks: list[Setback] = field(default_factory=list)
    relaunches: int = 0
    before: IncidentKind | None = None

    def note(self, cause: Cause, code: int, ran_s: float = 0.0) -> None:
        """An attempt has ended so, after so many seconds."""
        self.setbacks = [*self.setbacks, Setback(cause, code, ran_s)][-MOST_SETBACKS:]

    def tried(self, progress: Progress, now: float) -> Tried:
        """Return what was tried, as verdicts want to know it."""
        fruitless = progress.fruitless_now(now)
        recent = self.setbacks[-fruitless:] if fruitless else self._no_further(progress, now)
        return Tried(since_progress=tuple(recent), relaunches=self.relaunches, best=progress.best)

    def _no_further(self, progress: Progress, now: float) -> list[Setback]:
        """Return the setback before this run, if that one ran as long: a run without steps then got no further."""
        if progress.best is not None:
            return []
        ran_s = progress.ran_s(now)
        last = [one for one in self.setbacks[-1:] if one.cause in CARRIED]
        return [one for one in last if abs(one.ran_s - ran_s) <= ALIKE * ran_s]


@dataclass(slots=True)
class Log:
    """The history of one run, with the file it is kept in and the progress it counts against.

    Args:
        path: of the file.
        restart: of this run.
        progress: of all its attempts.
    """

    path: Path
    restart: int
    progress: Progress
    history: History = field(init=False)
    _best_before: int | None = field(init=False)
    _stepped: bool = field(init=False)
    _is_stale: bool = field(init=False)
    _taking_back: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Take over what an earlier run of the job left."""
        self.history = carried_over(self.path, self.restart, self.progress)
        self._best_before = self.progress.best
        self._is_stale = bool(self.history.setbacks or self.history.before)
        # On a job's first run it can only be of another job that had the number.
        self._stepped = self.restart > 0 and self._mark.exists()

    @property
    def gained(self) -> bool:
        """Whether a newer step than before this run was reported."""
        return self.progress.best is not None and self.progress.best != self._best_before

    @property
    def goes_on(self) -> bool:
        """Whether any run of the job came to a step: then there is something to go on from."""
        return self._stepped or self.progress.best is not None

    def note_step(self) -> None:
        """Leave word for later runs, once, that a step was reported; does not wait for the storage."""
        if not self._stepped:
            self._stepped = True
            threading.Thread(target=self._leave_mark, name="deeplink-stepped", daemon=True).start()

    def note_progress(self) -> None:
        """Take back what earlier runs left, once this one has got further; does not wait for the storage.

        It may end without a word to the next run: preempted, say, or with its batch host.
        """
        if self._is_stale and self.gained:
            self._is_stale = False
            self._taking_back = threading.Thread(target=self._take_back, name="deeplink-history", daemon=True)
            self._taking_back.start()

    def _take_back(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as problem:
            log.warning("%s: %s", self.path, problem)

    @property
    def _mark(self) -> Path:
        return self.path.with_name(f"stepped.{self.path.name}")

    def _leave_mark(self) -> None:
        try:
            self._mark.touch()
        except OSError as problem:
            log.warning("%s: %s", self._mark, problem)

    def note(self, cause: Cause, code: int, now: float) -> None:
        """The newest attempt has ended so."""
        self.history.note(cause, code, self.progress.ran_s(now))

    def tried(self, now: float) -> Tried:
        """Return what was tried, as verdicts want to know it."""
        return self.history.tried(self.progress, now)

    def leave(self, verdict: AttemptVerdict, now: float) -> None:
        """Write down that the run ended so; takes as long as the storage."""
        if self._taking_back is not None:
            self._taking_back.join()
        last = None if verdict.cause is None else Setback(verdict.cause, verdict.code, self.progress.ran_s(now))
        leave(self.path, self.restart, self.tried(now), last, verdict.kind)


def file_of(folder: Path, command: Sequence[str]) -> Path:
    """Return where a command's history is kept: a script may call several."""
    digest = hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()
    return folder / f"history.{digest[:12]}"


def carried_over(path: Path, restart: int, progress: Progress) -> History:
    """Return what an earlier run of the job left; it also tells `progress` how far that was.

    What a run with the same restart count left is another call of the same script, and none of ours.
    """
    try:
        kept = json.loads(path.read_text(encoding="ascii"))
        if int(kept["restart"]) >= restart:
            return History()
        setbacks = [Setback(Cause(cause), int(code), float(ran_s)) for cause, code, ran_s in kept["setbacks"]]
        best = None if kept["best"] is None else int(kept["best"])
        before = IncidentKind(kept["ended"]) if kept["ended"] else None
    except FileNotFoundError:
        return History()
    except (OSError, ValueError, TypeError, KeyError) as problem:
        log.warning("%s: %s", path, problem)
        return History()
    progress.best, progress.fruitless = best, len(setbacks)
    return History(setbacks=setbacks, before=before)


def leave(path: Path, restart: int, tried: Tried, last: Setback | None, ended: IncidentKind | None) -> None:
    """Write down what the next run of the job is to know.

    Args:
        path: where.
        restart: of this run.
        tried: before the last setback.
        last: that one; None where there was none.
        ended: the incident it ended with; None where it ended well.
    """
    recent = [*tried.since_progress, *([last] if last is not None else [])] if ended else []
    kept = {
        "restart": restart,
        "best": tried.best,
        "setbacks": [[one.cause.value, one.code, one.ran_s] for one in recent if one.cause in CARRIED],
        "ended": ended.value if ended in ITS_OWN_FAULT else "",
    }
    try:
        write_text(path, json.dumps(kept))
    except OSError as problem:
        log.warning("%s: %s", path, problem)
