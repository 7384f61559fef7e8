"""Which ranks are late or slow, and whether they hang.

`hang_detection.py`, `hang_attribution.py` and `stragglers.py` decide; `stack_collection.py` asks the agents. This
module joins them, reports the result and keeps what was learned.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.publish import write_unsynced
from deeplink.scheduler.launch.hang_detection import (
    LatenessEvidence,
    ProgressClock,
    RankReport,
    hung,
    longest_late,
    named,
    stopped,
)
from deeplink.scheduler.launch.process_activity import ActivityAnswer, Watch
from deeplink.scheduler.launch.stack_collection import StackReport, Whereabouts
from deeplink.scheduler.launch.stragglers import Straggler, Stragglers
from deeplink.scheduler.launch.timeout_learning import Silences
from deeplink.text import counted
from deeplink.wire import attempt_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.hang_detection import LateRank
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.types import NodeName
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

LEARNED_FILE = "silences.json"
"""In the job's state folder: what was learned, for its next run."""
SAVE_EVERY_S = 30.0
NEARLY = 0.7
"""Ranks are looked at once they have used up so much of their time: two looks are needed to know what they do."""
LOOK_AGAIN_S, LOOK_EARLY_S = 1.5, 3.0
"""How often agents are asked what their ranks do, when those are late, and when they are merely without news."""
SELDOM_S = 10.0
"""How often when that has been so for longer than a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What is to be said of ranks that are late or slow.

    Attributes:
        hung: why ranks count as hung; empty while they do not.
        slow: why a rank is to be replaced; empty while none is.
        suspects: nodes to blame, where it can be told.
    """

    hung: str = ""
    slow: str = ""
    suspects: tuple[NodeName, ...] = ()


@dataclass(slots=True)
class _Told:
    """What was said already, so that it is said once."""

    late: bool = False
    slow: dict[int, Straggler] = field(default_factory=dict)


class Hangs:
    """Watches the progress of each rank of a run; the supervising thread alone uses it.

    Args:
        fleet: the agents.
        chronicle: who is told.
        folder: the job's state folder.
        order: what is run, and how long a step may take.
        clock: for every duration.
    """

    def __init__(
        self, fleet: AgentPool, chronicle: EventLog, folder: Path, order: LaunchSpec, clock: Clock
    ) -> None:
        self._fleet, self._chronicle, self._folder, self._clock = fleet, chronicle, folder, clock
        self._timeout_s = order.step_timeout_s
        self._replaces = order.replace_stragglers
        self._silences = _read(folder / LEARNED_FILE)
        self._pulse = ProgressClock(self._silences, self._timeout_s)
        self._watch = Watch()
        self._stragglers = Stragglers()
        self._told = _Told()
        self._launch: Launch | None = None
        self._where: Whereabouts | None = None
        self._saved = clock.monotonic()
        self._saving: threading.Thread | None = None

    @property
    def told_s(self) -> float:
        """The limit by which the watchdog, too, may tell that the ranks hang, seconds; 0: it is not to.

        It knows neither sections nor what processes do: only a limit that somebody set, without sections, will do.
        """
        return 0.0 if self._timeout_s is None or self._pulse.has_sections else self._timeout_s

    def begin(self, launch: Launch) -> None:
        """A new attempt begins."""
        self._launch, self._told = launch, _Told()
        self._where = Whereabouts(self._fleet, launch, self._clock)
        self._pulse.begin(self._clock.monotonic(), launch.world_size)
        self._watch.forget()
        self._stragglers = Stragglers()

    def take(self, reports: Iterable[common_pb2.Progress]) -> None:
        """Take in what agents heard of ranks; what is of other attempts does not count."""
        now = self._clock.monotonic()
        self._pulse.tick(now)
        for report in reports:
            if self._launch is None or attempt_from_wire(report.attempt) != self._launch.attempt:
                continue
            step = report.step if report.step or not report.section else None
            self._pulse.take(RankReport(rank=report.rank, step=step, section=report.section), now)
            if step is not None and not report.section:
                self._stragglers.take(report.rank, step, report.work_s, now)
        if now - self._saved > SAVE_EVERY_S:
            self._saved = now
            self._save()

    def look(self) -> Late:
        """Return what is to be said of ranks now; waits for nobody."""
        slow = self._look_at_stragglers()
        if self._timeout_s == 0:
            return slow
        now = self._clock.monotonic()
        quiet = self._pulse.quiet(now, NEARLY)
        if not quiet or self._where is None or self._launch is None:
            self._told.late = False
            self._watch.forget()
            if self._where is not None:
                self._where.forget()
            return slow
        nearly = self._pulse.late(now, NEARLY)
        longest_s = max(one.silent_s - one.limit_s for one in nearly or quiet)
        soon_s = LOOK_AGAIN_S if nearly else LOOK_EARLY_S
        sights = self._where.look(SELDOM_S if longest_s > 6 * SELDOM_S else soon_s)
        if sights is not None:
            self._watch.look(sights, now, self._launch.world_size)
        late = self._pulse.late(now)
        if late:
            return self._judged(late)
        self._told.late = self._told.late and bool(nearly)
        because = stopped(self._watch.newest, self._watch.stopped_s(), is_heard=self._pulse.is_heard)
        return Late(hung=because, suspects=self._nodes_of(self._watch.newest.ranks)) if because else slow

    def _judged(self, late: tuple[LateRank, ...]) -> Late:
        seen = self._watch.newest
        evidence = LatenessEvidence(
            late=late,
            all_late=self._pulse.are_all(late),
            seen=seen,
            idle_s=self._watch.idle_s(),
            patience_s=self._pulse.patience_s(late),
            is_set=self._timeout_s is not None,
        )
        because = hung(evidence)
        if because:
            return Late(
                hung=because, suspects=self._nodes_of(seen.ranks if seen.answer is ActivityAnswer.STOPPED else ())
            )
        if seen.answer is not ActivityAnswer.UNKNOWN:
            self._say_late(late, seen.answer, evidence.patience_s)
        return Late()

    def _say_late(self, late: tuple[LateRank, ...], answer: ActivityAnswer, patience_s: float) -> None:
        if self._told.late:
            return
        self._told.late = True
        longest, ranks = longest_late(late), [one.rank for one in late]
        what = {
            ActivityAnswer.HELD: "they are held by a debugger or suspended: left alone",
            ActivityAnswer.IDLE: f"no rank works: that counts as a hang after {patience_s:.0f} s",
            ActivityAnswer.WORKING: "ranks work: left alone (deeplink.section tells what they are about)",
        }.get(answer, "")
        self._chronicle.event(
            "late",
            f"nothing new of {named(ranks)} for {longest.silent_s:.0f} s ({longest.limit}); {what}",
            ranks=ranks,
            section=longest.section,
            silent_s=longest.silent_s,
            limit_s=longest.limit_s,
            answer=answer.value,
        )

    def _look_at_stragglers(self) -> Late:
        found = self._stragglers.found
        for rank, one in found.items():
            if rank not in self._told.slow:
                because = self._because(one)
                self._chronicle.event(
                    "straggler",
                    because,
                    rank=rank,
                    node=self._node_of(rank) or "",
                    factor=one.factor,
                    work_s=one.work_s,
                    median_s=one.median_s,
                )
        for rank in self._told.slow.keys() - found.keys():
            self._chronicle.event("straggler-over", f"rank {rank} is as fast as the others again", rank=rank)
        self._told.slow = dict(found)
        if not found or not self._replaces:
            return Late()
        worst = max(found.values(), key=lambda one: one.factor)
        return Late(slow=self._because(worst), suspects=self._nodes_of([worst.rank]))

    def _because(self, one: Straggler) -> str:
        return (
            f"rank {one.rank} on {self._node_of(one.rank) or '?'} takes {one.factor:.2f} times as long as others "
            f"for its own work: {one.work_s * 1e3:.4g} ms against {one.median_s * 1e3:.4g} ms, "
            f"for {counted(one.steps, 'step')}"
        )

    @property
    def stragglers(self) -> dict[NodeName, str]:
        """The nodes of the stragglers there are now, and why they count as that."""
        found = self._stragglers.found.items()
        return {node: self._because(one) for rank, one in found if (node := self._node_of(rank))}

    def locate(self, listen: Callable[[], None]) -> StackReport:
        """Ask every agent for the stacks of its ranks, keep them, and return what they say.

        Takes as long as `Whereabouts.locate`; `listen` is called all the while.
        """
        if self._where is None:
            return StackReport()
        self._save()
        return self._where.locate(self._pulse.steps, self._folder, self._chronicle, listen)

    def _node_of(self, rank: int) -> NodeName | None:
        return self._where.node_of(rank) if self._where is not None else None

    def _nodes_of(self, ranks: Iterable[int]) -> tuple[NodeName, ...]:
        return self._where.nodes_of(ranks) if self._where is not None else ()

    def _save(self) -> None:
        # In a thread of its own, and never two at once: the storage may hang.
        if self._saving is None or not self._saving.is_alive():
            text = self._silences.as_text().encode()
            path = self._folder / LEARNED_FILE
            self._saving = threading.Thread(
                target=_written, args=(path, text), name="deeplink-learned", daemon=True
            )
            self._saving.start()


def _written(path: Path, text: bytes) -> None:
    try:
        write_unsynced(path, text)
    except OSError as problem:
        log.warning("what was learned of the ranks' steps is not kept: %s", problem)


def _read(path: Path) -> Silences:
    try:
        return Silences.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Silences()
