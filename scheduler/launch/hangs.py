"""Finds ranks that are late or slow, whether they hang, and where they are.

`hang_detection.py` and `hang_attribution.py` decide. This module asks the agents, joins the answers, reports the
result and keeps what was learned.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.publish import write_unsynced
from deeplink.core.text import counted
from deeplink.core.timeouts import call_with_timeout
from deeplink.rpc.channel import attempt_from_wire, attempt_to_wire
from deeplink.scheduler.launch.hang_attribution import (
    ActivityAnswer,
    ActivityHistory,
    ProcessSnapshot,
    RankPlace,
    blame,
    main_frames,
    summary,
)
from deeplink.scheduler.launch.hang_detection import (
    ProgressClock,
    Silences,
    Stragglers,
    hung,
    longest_late,
    named,
    stopped,
)
from deeplink.scheduler.liveness.heartbeats import stack_from_wire
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import RunContext
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.hang_detection import LateRank, Straggler
    from deeplink.scheduler.recovery.records import RankStack
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

LOOK_S = 3.0  # how long an agent may take to say what its ranks do
STACKS_S, STACKS_ANSWER_S = 8.0, 10.0  # how long an agent may look for stacks, and how long it is waited for
WRITE_S = 3.0  # how long the file of stacks may take: its storage may be what the ranks hang on
POLL_S = 0.05
LEARNED_FILE = "silences.json"  # in the job's state folder: what was learned, for its next run
SAVE_EVERY_S = 30.0
NEARLY = 0.7  # ranks are looked at once they have used up so much of their time: it takes two looks
LOOK_AGAIN_S, LOOK_EARLY_S = 1.5, 3.0  # how often, when ranks are late, and when they are merely without news
SELDOM_S = 10.0  # how often when that has been so for longer than a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport:
    """Places of the ranks, when they were asked."""

    gist: str = ""  # in one line, for people; empty when no agent could say
    suspects: tuple[NodeName, ...] = ()  # nodes of the ranks that the others seem to wait for
    stacks: tuple[RankStack, ...] = ()  # of all ranks that were found


@dataclass(slots=True)
class _Question:
    """One that all agents were asked at once."""

    asked: float
    calls: Mapping[NodeName, Any]  # futures of StacksReply

    @property
    def is_answered(self) -> bool:
        return all(call.done() for call in self.calls.values())

    def answers(self) -> dict[NodeName, Sequence[node_pb2.RankStack]]:
        """Return what came back; nodes that did not answer, or whose agent is too old to, are missing."""
        done = {node: call for node, call in self.calls.items() if call.done() and not call.cancelled()}
        return {node: call.result().ranks for node, call in done.items() if call.exception() is None}


class StackCollector:
    """Asks the agents of one launch what its ranks do. The supervising thread alone uses it."""

    def __init__(self, agents: AgentPool, launch: Launch, clock: Clock) -> None:
        self.launch = launch
        self._agents, self._clock = agents, clock
        self._question: _Question | None = None
        self._looked = clock.monotonic()
        self._nodes: dict[int, NodeName] = {}  # by rank, as agents answer
        first = 0
        for facts, ranks in zip(launch.nodes, launch.ranks, strict=True):
            self._nodes.update(dict.fromkeys(range(first, first + ranks), facts.name))
            first += ranks

    def node_of(self, rank: int) -> NodeName | None:
        """Return the node that runs the rank; None where there is no such rank."""
        return self._nodes.get(rank)

    def nodes_of(self, ranks: Iterable[int]) -> tuple[NodeName, ...]:
        """Return the nodes that run these ranks, each once."""
        return tuple(dict.fromkeys(self._nodes[rank] for rank in ranks if rank in self._nodes))

    def forget(self) -> None:
        """Drop the question under way."""
        self._question = None

    def look(self, pause_s: float) -> dict[int, ProcessSnapshot] | None:
        """Return what ranks do, by rank, where that has just come in; ask again after a pause. Does not wait."""
        now = self._clock.monotonic()
        snapshots: dict[int, ProcessSnapshot] | None = None
        if self._question is not None:
            if not self._question.is_answered and now - self._question.asked < LOOK_S:
                return None
            snapshots = {}
            for node, ranks in self._question.answers().items():
                for one in ranks:
                    if one.rank not in snapshots or one.state:
                        snapshots[one.rank] = ProcessSnapshot(state=one.state, cpu_s=one.cpu_s)
                        self._nodes[one.rank] = node
            self._question, self._looked = None, now
        if now - self._looked >= pause_s:
            self._question = self._ask(LOOK_S, LOOK_S, states_only=True)
        return snapshots

    def _ask(self, deadline_s: float, timeout_s: float, *, states_only: bool) -> _Question:
        request = node_pb2.StacksRequest(
            attempt=attempt_to_wire(self.launch.attempt), deadline_s=deadline_s, states_only=states_only
        )
        nodes = [facts.name for facts in self.launch.nodes]
        return _Question(self._clock.monotonic(), self._agents.ask_stacks(nodes, request, timeout_s))

    def locate(
        self, steps: Mapping[int, int], folder: Path, events: EventLog, listen: Callable[[], None]
    ) -> StackReport:
        """Ask every agent for the stacks of its ranks, keep them, and return what they say."""
        # Takes `STACKS_ANSWER_S` at most, and the file `WRITE_S`.
        question = self._ask(STACKS_S, STACKS_ANSWER_S, states_only=False)
        while not question.is_answered and self._clock.monotonic() - question.asked < STACKS_ANSWER_S:
            listen()
            self._clock.sleep(POLL_S)
        by_node = question.answers()
        answers = [(one, node) for node, ranks in by_node.items() for one in ranks]
        answers.sort(key=lambda answer: (answer[0].rank, answer[1]))
        if not answers:
            return StackReport()
        places = [
            RankPlace(
                rank=one.rank, node=node, state=one.state, frames=main_frames(one.text), step=steps.get(one.rank)
            )
            for one, node in answers
        ]
        blamed = blame(places)
        file = folder / f"stacks.{self.launch.attempt}"
        is_kept = _is_written(file, stack_text(answers, steps))
        kept = f"stacks of {counted(len(answers), 'rank')} in {file}" if is_kept else "stacks could not be written"
        gist = "; ".join(filter(None, [summary(places, blamed), kept]))
        silent = sorted({facts.name for facts in self.launch.nodes} - by_node.keys())
        events.event("stacks", gist, file=str(file), blamed=[one.rank for one in blamed.ranks], silent=silent)
        stacks = tuple(stack_from_wire(one) for one, _ in answers)
        return StackReport(gist=gist, suspects=blamed.nodes, stacks=stacks)


def stack_text(answers: Iterable[tuple[node_pb2.RankStack, NodeName]], steps: Mapping[int, int]) -> str:
    """Return the file of an attempt's stacks."""
    parts = []
    for one, node in answers:
        source = f", by {one.source}" if one.source else ""
        step = f", step {steps[one.rank]}" if one.rank in steps else ""
        parts.append(f"=== rank {one.rank} on {node}, pid {one.pid}, state {one.state or 'gone'}{step}{source}")
        parts.append(one.text.rstrip())
        if one.flight:
            parts.append(f"--- newest collectives: {one.flight}")
    return "\n".join(parts) + "\n"


def _is_written(file: Path, text: str) -> bool:
    try:
        call_with_timeout(lambda: write_unsynced(file, text.encode("utf-8", "replace")), WRITE_S)
    except OSError as problem:  # a TimeoutError, too
        log.warning("stacks: %s", str(problem) or f"not written within {WRITE_S:g} s")
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Ranks that hang, or are to be replaced."""

    hung: str = ""  # why ranks count as hung; empty while they do not
    slow: str = ""  # why a rank is to be replaced; empty while none is
    suspects: tuple[NodeName, ...] = ()  # nodes to blame, where it can be told


class Hangs:
    """Watches the progress of each rank of a run; the supervising thread alone uses it, from `begin` on."""

    _collector: StackCollector  # of the newest attempt

    def __init__(self, run: RunContext) -> None:
        self._agents, self._events, self._clock = run.agents, run.events, run.clock
        self._folder = run.backend.folder
        self._timeout_s = run.spec.step_timeout_s
        self._replaces = run.spec.replace_stragglers
        self._silences = _read(self._folder / LEARNED_FILE)
        self._progress = ProgressClock(self._silences, self._timeout_s)
        self._activity = ActivityHistory()
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
        self._told_late, self._told_slow = False, set()
        self._collector = StackCollector(self._agents, launch, self._clock)
        self._progress.begin(self._clock.monotonic(), launch.world_size)
        self._activity.forget()
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
        quiet = self._progress.quiet(now, NEARLY)
        if not quiet:
            self._told_late = False
            self._activity.forget()
            self._collector.forget()
            return slow
        nearly = self._progress.late(now, NEARLY)
        longest_s = max(one.silent_s - one.limit_s for one in nearly or quiet)
        soon_s = LOOK_AGAIN_S if nearly else LOOK_EARLY_S
        snapshots = self._collector.look(SELDOM_S if longest_s > 6 * SELDOM_S else soon_s)
        if snapshots is not None:
            self._activity.look(snapshots, now, self._collector.launch.world_size)
        if late := self._progress.late(now):
            return self._judged(late)
        self._told_late = self._told_late and bool(nearly)
        because = stopped(self._activity.newest, self._activity.stopped_s(), is_heard=self._progress.is_heard)
        if not because:
            return slow
        return Late(hung=because, suspects=self._collector.nodes_of(self._activity.newest.ranks))

    def _judged(self, late: tuple[LateRank, ...]) -> Late:
        seen, patience_s = self._activity.newest, self._progress.patience_s(late)
        because = hung(
            late,
            all_late=self._progress.are_all(late),
            seen=seen,
            idle_s=self._activity.idle_s(),
            patience_s=patience_s,
            is_set=self._timeout_s is not None,
        )
        if because:
            ranks = seen.ranks if seen.answer is ActivityAnswer.STOPPED else ()
            return Late(hung=because, suspects=self._collector.nodes_of(ranks))
        if seen.answer is not ActivityAnswer.UNKNOWN and not self._told_late:
            self._told_late = True
            self._say_late(late, seen.answer, patience_s)
        return Late()

    def _say_late(self, late: tuple[LateRank, ...], answer: ActivityAnswer, patience_s: float) -> None:
        longest, ranks = longest_late(late), [one.rank for one in late]
        what = {
            ActivityAnswer.HELD: "they are held by a debugger or suspended: left alone",
            ActivityAnswer.IDLE: f"no rank works: that counts as a hang after {patience_s:.0f} s",
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
            f"rank {one.rank} on {node} takes {one.factor:.2f} times as long as others for its own work: "
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
