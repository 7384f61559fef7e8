"""Finds ranks that are late or slow, and whether they hang.

`hang_detection.py`, `hang_attribution.py` and `ring_test.py` decide. This module joins what agents answer, reports
the result and keeps what was learned.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.publish import write_unsynced
from deeplink.core.text import counted
from deeplink.rpc.channel import attempt_from_wire
from deeplink.scheduler.launch.hang_attribution import ActivityAnswer, ActivityHistory, Blame, deadlock
from deeplink.scheduler.launch.hang_detection import (
    IDLE_S,
    STOPPED_SHARE,
    ProgressClock,
    Silences,
    Stragglers,
    hung,
    longest_late,
    named,
    stopped,
)
from deeplink.scheduler.launch.ring_test import BrokenNetwork, NeighbourTest
from deeplink.scheduler.launch.stack_collector import StackCollector, StackReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import RunContext
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.hang_detection import LateRank, Straggler
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

LEARNED_FILE = "silences.json"  # in the job's state folder: what was learned, for its next run
SAVE_EVERY_S = 30.0
NEARLY = 0.7  # ranks are looked at once they have used up so much of their time: it takes two looks
EXAMINED = 0.9  # and asked why they are late once all have used up so much: that takes some seconds
LOOK_AGAIN_S, LOOK_EARLY_S = 1.5, 3.0  # how often, when ranks are late, and when they are merely without news
SELDOM_S = 10.0  # how often when that has been so for longer than a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Ranks that hang, or are to be replaced."""

    hung: str = ""  # why ranks count as hung; empty while they do not
    slow: str = ""  # why a rank is to be replaced; empty while none is
    suspects: tuple[NodeName, ...] = ()  # nodes to blame, where it can be told


class Hangs:
    """Watches the progress of each rank of a run; the supervising thread alone uses it, from `begin` on."""

    _collector: StackCollector  # of the newest attempt
    _neighbours: NeighbourTest

    def __init__(self, run: RunContext) -> None:
        self._agents, self._events, self._clock = run.agents, run.events, run.clock
        self._folder = run.backend.folder
        self._timeout_s = run.spec.step_timeout_s
        self._replaces = run.spec.replace_stragglers
        self._silences = _read(self._folder / LEARNED_FILE)
        self._progress = ProgressClock(self._silences, self._timeout_s)
        self._activity = ActivityHistory()
        self._are_ports_open = False  # those of ranks, as far as was tried while they made progress
        self._examine_at_s = 0.0  # once they are silent for so long it is asked why; each time twice as late
        self._seen: BrokenNetwork | Blame | None = None  # the newest answer to that
        self._stragglers = Stragglers()
        self._told_late = False  # what was said already, so that it is said once
        self._told_slow: set[int] = set()
        self._saved = run.clock.monotonic()
        self._saving: threading.Thread | None = None

    @property
    def told_s(self) -> float:
        """The limit by which the watchdog, too, may tell that the ranks hang, seconds; 0: it is not to."""
        # It knows neither sections nor what processes do: only a limit that was set, without sections, will do.
        return 0.0 if self._timeout_s is None or self._progress.has_sections else self._timeout_s

    def begin(self, launch: Launch) -> None:
        """A new attempt begins."""
        self._told_slow = set()
        self._collector = StackCollector(self._agents, launch, self._clock)
        self._progress.begin(self._clock.monotonic(), launch.world_size)
        self._forget()
        hosts = {node: facts.host for node, facts in self._agents.facts.items()}
        nodes = [facts.name for facts in launch.nodes]
        is_open = self._are_ports_open
        self._neighbours = NeighbourTest(nodes, hosts, self._agents.stubs, self._clock, are_ports_open=is_open)
        self._stragglers = Stragglers()

    def take(self, reports: Iterable[common_pb2.Progress]) -> None:
        """Take in what agents heard of ranks; what is of other attempts does not count."""
        now = self._clock.monotonic()
        self._progress.tick(now)
        for report in reports:
            if attempt_from_wire(report.attempt) != self._collector.launch.attempt:
                continue
            step = report.step if report.step or not report.section else None
            self._progress.take(report.rank, step, report.section, now)
            if step is not None and not report.section:
                self._stragglers.take(report.rank, step, report.work_s, now)
        if now - self._saved > SAVE_EVERY_S:
            self._saved = now
            self._save()

    def look(self) -> Late:
        """Return what is to be said of ranks now; does not wait."""
        slow = self._look_at_stragglers()
        if self._timeout_s == 0:
            return slow
        now = self._clock.monotonic()
        share = STOPPED_SHARE if self._timeout_s is None else 1.0
        if not self._progress.quiet(now, NEARLY * share):
            self._forget()
            if not self._progress.is_setting_up:
                self._neighbours.learn()
                self._are_ports_open = self._neighbours.are_ports_open
            return slow
        nearly = self._progress.late(now, NEARLY * share)
        is_long = any(one.silent_s - one.limit_s > 6 * SELDOM_S for one in nearly)
        snapshots = self._collector.look(SELDOM_S if is_long else LOOK_AGAIN_S if nearly else LOOK_EARLY_S)
        if snapshots is not None:
            self._activity.look(snapshots, now, self._collector.launch.world_size)
        seen, is_heard = self._activity.newest, self._progress.is_heard
        late = self._progress.late(now, share)
        if because := stopped(seen, self._activity.stopped_s(), late, is_heard=is_heard):
            return Late(hung=because, suspects=self._collector.nodes_of(seen.ranks))
        if self._progress.are_all(late := self._progress.late(now, EXAMINED)):
            self._examine(min(one.silent_s for one in late))
        late = self._progress.late(now)
        self._told_late = self._told_late and bool(nearly)
        return self._judged(late) if late else slow

    def _forget(self) -> None:
        self._told_late, self._examine_at_s, self._seen = False, 0.0, None
        self._activity.forget()
        self._collector.forget()

    def _judged(self, late: tuple[LateRank, ...]) -> Late:
        all_late, is_set = self._progress.are_all(late), self._timeout_s is not None
        seen = self._seen if all_late else BrokenNetwork()
        if seen is None:  # it is asked
            return Late()
        because = hung(late, all_late=all_late, why=seen.why, idle_s=self._activity.idle_s(), is_set=is_set)
        if because:
            return Late(hung=because, suspects=seen.nodes)
        if self._activity.newest.answer is not ActivityAnswer.UNKNOWN and not self._told_late:
            self._told_late = True
            self._say_late(late, self._activity.newest.answer)
        return Late()

    def _examine(self, silent_s: float) -> None:
        """Ask why nothing will come of waiting, and whose fault it is, where it is time. Does not wait."""
        if self._activity.newest.answer is ActivityAnswer.HELD:
            self._seen = BrokenNetwork()
            return
        if silent_s >= self._examine_at_s and not self._neighbours.is_under_way:
            self._seen = None
            self._examine_at_s = 2 * silent_s
            self._collector.ask_for_stacks()
            self._neighbours.start()
        network = self._neighbours.answer
        if self._seen is None and network is not None and self._collector.are_stacks_here:
            # Once: what ranks do later does not go with where they were.
            places, world = self._collector.places(self._progress.steps), self._collector.launch.world_size
            idle = self._activity.idle() - self._progress.moving_data
            self._seen = network if network.why else deadlock(places, idle, world)

    def _say_late(self, late: tuple[LateRank, ...], answer: ActivityAnswer) -> None:
        longest, ranks = longest_late(late), [one.rank for one in late]
        what = {
            ActivityAnswer.HELD: "they are held by a debugger or suspended: left alone",
            ActivityAnswer.IDLE: f"no rank works: that counts as a hang after {IDLE_S:.0f} s",
            ActivityAnswer.WORKING: "ranks work: left alone (deeplink.section tells what they are about)",
        }.get(answer, "")
        self._events.event(
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
            if rank not in self._told_slow:
                node = self._collector.node_of(rank) or ""
                facts = {"factor": one.factor, "work_s": one.work_s, "median_s": one.median_s}
                self._events.event("straggler", self._because(one), rank=rank, node=node, **facts)
        for rank in self._told_slow - found.keys():
            self._events.event("straggler-over", f"rank {rank} is as fast as the others again", rank=rank)
        self._told_slow = set(found)
        if not found or not self._replaces:
            return Late()
        worst = max(found.values(), key=lambda one: one.factor)
        return Late(slow=self._because(worst), suspects=self._collector.nodes_of([worst.rank]))

    def _because(self, one: Straggler) -> str:
        node = self._collector.node_of(one.rank) or "?"
        return (
            f"rank {one.rank} on {node}: {one.factor:.2f} x the median of the ranks' own work, "
            f"{one.work_s * 1e3:.4g} ms against {one.median_s * 1e3:.4g} ms, for {counted(one.steps, 'step')}"
        )

    @property
    def stragglers(self) -> dict[NodeName, str]:
        """The nodes of the stragglers there are now, and why they count as that."""
        found = self._stragglers.found.items()
        return {node: self._because(one) for rank, one in found if (node := self._collector.node_of(rank))}

    def locate(self, listen: Callable[[], None]) -> StackReport:
        """Collect the stacks of all ranks, as `StackCollector.locate` does."""
        self._save()
        if self._seen is None or not self._seen.why:
            self._collector.forget()  # the stacks that are here tell of another moment
        return self._collector.locate(self._progress.steps, self._folder, self._events, listen)

    def _save(self) -> None:
        # In a thread of its own, and never two at once: the storage may hang.
        if self._saving is None or not self._saving.is_alive():
            what = self._folder / LEARNED_FILE, self._silences.as_text().encode()
            self._saving = threading.Thread(target=_save, args=what, name="deeplink-learned", daemon=True)
            self._saving.start()


def _save(path: Path, text: bytes) -> None:
    try:
        write_unsynced(path, text)
    except OSError as problem:
        log.warning("what was learned of the ranks' steps is not kept: %s", problem)


def _read(path: Path) -> Silences:
    try:
        return Silences.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Silences()
