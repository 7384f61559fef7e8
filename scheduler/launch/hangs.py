"""Which ranks are late or slow, and whether they hang: asks their agents where they are, and keeps what is said.

What follows from it is decided in `lateness.py`, `blame.py` and `stragglers.py`; here is who asks and writes.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.publish import write_unsynced
from deeplink.scheduler.launch.blame import Where, blame, main_frames, summary
from deeplink.scheduler.launch.lateness import (
    Answer,
    Evidence,
    News,
    Pulse,
    Sight,
    Watch,
    hung,
    longest_late,
    named,
)
from deeplink.scheduler.launch.questions import Question, by_rank, stack_text
from deeplink.scheduler.launch.silences import Silences
from deeplink.scheduler.launch.stragglers import Straggler, Stragglers
from deeplink.scheduler.watch.messages import stack_from_wire
from deeplink.v1 import node_pb2
from deeplink.wire import attempt_from_wire, attempt_to_wire
from deeplink.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.chronicle import Chronicle
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.fleet import Fleet
    from deeplink.scheduler.launch.lateness import LateRank
    from deeplink.scheduler.launch.order import Order
    from deeplink.scheduler.watch.records import RankStack
    from deeplink.types import NodeName
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

LEARNED_FILE = "silences.json"
"""In the job's state folder: what was learned, for its next run."""
SAVE_EVERY_S = 30.0
NEARLY = 0.7
"""Ranks are looked at once they have used up so much of their time: two looks are needed to know what they do."""
LOOK_S, LOOK_AGAIN_S = 3.0, 1.5
"""How long an agent may take to say what its ranks do, and how often it is asked."""
SELDOM_S = 10.0
"""How often it is asked when ranks are late for longer than a minute."""
STACKS_S, STACKS_ANSWER_S = 8.0, 10.0
"""How long an agent may look for stacks, and how long its answer is waited for."""
WRITE_S = 3.0
"""How long the file may take: its storage may be what the ranks hang on."""
POLL_S = 0.05


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where the ranks were, when they were asked.

    Attributes:
        gist: in one line, for people; empty when nobody could say.
        suspects: nodes of the ranks that the others seem to wait for.
        stacks: of all ranks that were found.
    """

    gist: str = ""
    suspects: tuple[NodeName, ...] = ()
    stacks: tuple[RankStack, ...] = ()


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

    def __init__(self, fleet: Fleet, chronicle: Chronicle, folder: Path, order: Order, clock: Clock) -> None:
        self._fleet, self._chronicle, self._folder, self._clock = fleet, chronicle, folder, clock
        self._timeout_s = order.step_timeout_s
        self._replaces = order.replace_stragglers
        self._silences = _read(folder / LEARNED_FILE)
        self._pulse = Pulse(self._silences, self._timeout_s)
        self._watch = Watch()
        self._stragglers = Stragglers()
        self._told = _Told()
        self._launch: Launch | None = None
        self._nodes: dict[int, NodeName] = {}  # by rank, as agents answer
        self._question: Question | None = None
        self._looked = 0.0
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
        self._launch, self._nodes, self._question, self._told = launch, {}, None, _Told()
        self._pulse.begin(self._clock.monotonic(), launch.world_size)
        self._watch.forget()
        self._stragglers.begin()
        first = 0
        for facts in launch.nodes:
            self._nodes.update(dict.fromkeys(range(first, first + launch.per_node), facts.name))
            first += launch.per_node

    def take(self, reports: Iterable[common_pb2.Progress]) -> None:
        """Take in what agents heard of ranks; what is of other attempts does not count."""
        now = self._clock.monotonic()
        self._pulse.tick(now)
        for report in reports:
            if self._launch is None or attempt_from_wire(report.attempt) != self._launch.attempt:
                continue
            step = report.step if report.step or not report.section else None
            self._pulse.take(News(rank=report.rank, step=step, section=report.section), now)
            if step is not None and not report.section:
                self._stragglers.take(report.rank, step, report.work_s)
        if now - self._saved > SAVE_EVERY_S:
            self._saved = now
            self._save()

    def look(self) -> Late:
        """Return what is to be said of ranks now; waits for nobody."""
        slow = self._look_at_stragglers()
        if self._timeout_s == 0:
            return slow
        now = self._clock.monotonic()
        nearly = self._pulse.late(now, NEARLY)
        if not nearly:
            self._question, self._told.late = None, False
            self._watch.forget()
            return slow
        self._look_at(nearly, now)
        late = self._pulse.late(now)
        return self._judged(late) if late else slow

    def _judged(self, late: tuple[LateRank, ...]) -> Late:
        seen = self._watch.newest
        evidence = Evidence(
            late=late,
            all_late=self._pulse.are_all(late),
            seen=seen,
            idle_s=self._watch.idle_s(),
            patience_s=self._pulse.patience_s(late),
            is_set=self._timeout_s is not None,
        )
        because = hung(evidence)
        if because:
            return Late(hung=because, suspects=self._nodes_of(seen.ranks if seen.answer is Answer.STOPPED else ()))
        if seen.answer is not Answer.UNKNOWN:
            self._say_late(late, seen.answer, evidence.patience_s)
        return Late()

    def _say_late(self, late: tuple[LateRank, ...], answer: Answer, patience_s: float) -> None:
        if self._told.late:
            return
        self._told.late = True
        longest, ranks = longest_late(late), [one.rank for one in late]
        what = {
            Answer.HELD: "they are held by a debugger or suspended: left alone",
            Answer.IDLE: f"no rank works: that counts as a hang after {patience_s:.0f} s",
            Answer.WORKING: "ranks work: left alone (deeplink.section tells what they are about)",
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

    def _look_at(self, late: Collection[LateRank], now: float) -> None:
        if self._launch is None:
            return
        if self._question is not None:
            if not self._question.is_answered and now - self._question.asked < LOOK_S:
                return
            answers = self._question.answers()
            self._question, self._looked = None, now
            sights = {}
            for node, ranks in answers.items():
                for one in ranks:
                    if one.rank not in sights or one.state:
                        sights[one.rank] = Sight(state=one.state, cpu_s=one.cpu_s)
                        self._nodes[one.rank] = node
            self._watch.look(sights, now, self._launch.processes)
        longest = max(one.silent_s - one.limit_s for one in late)
        if now - self._looked >= (SELDOM_S if longest > 6 * SELDOM_S else LOOK_AGAIN_S):
            self._question = self._asked(LOOK_S, LOOK_S, states_only=True)

    def _asked(self, deadline_s: float, timeout_s: float, *, states_only: bool) -> Question | None:
        if self._launch is None:
            return None
        request = node_pb2.StacksRequest(
            attempt=attempt_to_wire(self._launch.attempt), deadline_s=deadline_s, states_only=states_only
        )
        nodes = [facts.name for facts in self._launch.nodes]
        return Question(self._clock.monotonic(), self._fleet.ask_stacks(nodes, request, timeout_s))

    def _look_at_stragglers(self) -> Late:
        found = self._stragglers.found
        for rank, one in found.items():
            if rank not in self._told.slow:
                because = self._because(one)
                self._chronicle.event(
                    "straggler",
                    because,
                    rank=rank,
                    node=self._nodes.get(rank, ""),
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
            f"rank {one.rank} on {self._nodes.get(one.rank, '?')} takes {one.factor:.2f} times as long as others "
            f"for its own work: {one.work_s * 1e3:.4g} ms against {one.median_s * 1e3:.4g} ms, "
            f"for {counted(one.steps, 'step')}"
        )

    @property
    def stragglers(self) -> dict[NodeName, str]:
        """The nodes of the stragglers there are now, and why they count as that."""
        found = self._stragglers.found.items()
        return {self._nodes[rank]: self._because(one) for rank, one in found if rank in self._nodes}

    def locate(self, listen: Callable[[], None]) -> Found:
        """Ask every agent for the stacks of its ranks, keep them, and return what they say.

        Takes `STACKS_ANSWER_S` at most, and the file `WRITE_S`; `listen` is called all the while.
        """
        question = self._asked(STACKS_S, STACKS_ANSWER_S, states_only=False)
        if question is None or self._launch is None:
            return Found()
        self._save()
        while not question.is_answered and self._clock.monotonic() - question.asked < STACKS_ANSWER_S:
            listen()
            self._clock.sleep(POLL_S)
        by_node = question.answers()
        answers = sorted(((one, node) for node, ranks in by_node.items() for one in ranks), key=by_rank)
        if not answers:
            return Found()
        steps = self._pulse.steps
        places = [
            Where(
                rank=one.rank, node=node, state=one.state, frames=main_frames(one.text), step=steps.get(one.rank)
            )
            for one, node in answers
        ]
        blamed = blame(places)
        file = self._folder / f"stacks.{self._launch.attempt}"
        is_kept = self._in_time(
            lambda: write_unsynced(file, stack_text(answers, steps).encode("utf-8", "replace"))
        )
        kept = f"stacks of {counted(len(answers), 'rank')} in {file}" if is_kept else "stacks could not be written"
        gist = "; ".join(filter(None, [summary(places, blamed), kept]))
        silent = sorted({facts.name for facts in self._launch.nodes} - by_node.keys())
        self._chronicle.event(
            "stacks", gist, file=str(file), blamed=[one.rank for one in blamed.ranks], silent=silent
        )
        return Found(gist=gist, suspects=blamed.nodes, stacks=tuple(stack_from_wire(one) for one, _ in answers))

    def _nodes_of(self, ranks: Iterable[int]) -> tuple[NodeName, ...]:
        return tuple(dict.fromkeys(self._nodes[rank] for rank in ranks if rank in self._nodes))

    def _save(self) -> None:
        # In a thread of its own, and never two at once: the storage may hang.
        if self._saving is None or not self._saving.is_alive():
            text = self._silences.as_text().encode()
            path = self._folder / LEARNED_FILE
            self._saving = threading.Thread(
                target=_written, args=(path, text), name="deeplink-learned", daemon=True
            )
            self._saving.start()

    def _in_time(self, write: Callable[[], None]) -> bool:
        done: list[bool] = []

        def run() -> None:
            try:
                write()
                done.append(True)
            except OSError as problem:
                log.warning("stacks: %s", problem)

        thread = threading.Thread(target=run, name="deeplink-stacks", daemon=True)
        thread.start()
        thread.join(WRITE_S)
        return bool(done)


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
