"""The ranks of one attempt, as the agents of their nodes run them in slots and tell of them.

Any launcher of the run can be this: it asks each node's agent for what is to be, again and again, and to ask for
what is there already does nothing. Neither srun nor slurmctld has a part in it, but where there are no slots yet.
"""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from typing_extensions import override

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.channel import attempt_to_wire
from deeplink.scheduler.launch.backend import HeldRole, RankStep
from deeplink.scheduler.recovery.rank_failure import NOT_EXECUTABLE, NOT_FOUND, Clue, Failed
from deeplink.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import Reach
    from deeplink.scheduler.launch.environment import Launch

log = logging.getLogger(__name__)

ANSWER_S = 3.0  # how long an answer may take beyond what it was asked to wait
WAIT_S, ENDING_WAIT_S = 1.0, 0.2  # how long an agent waits for news
AGAIN_S = 0.2  # between two questions to an agent that does not answer
LOOK_S = 0.05
SOONER_S = 0.05  # the failure that is told first may not be the first: its agent says how long ago it was
FAILED_GRACE_S = (
    3.0  # when one rank has failed the others get so long between TERM and KILL, to save what they can
)
KILL_GRACE_S = 0.5  # and when they are to be started again
UNSTARTED_S = 1.0  # for so long it is waited how others fare with a command that one node could not start
SILENT_S = 1.0  # an agent that says nothing for so long is not waited for when ranks are ended
STILL_SILENT_S = 0.3  # nor one that has said nothing before, for longer than any waits for news
OVER_S = 2.0  # nor is one whose ranks have not ended so long after KILL
# For slots that srun is to start, where others could be used. srun and Python are slow from shared file systems;
# but srun itself says only after MessageTimeout, 10 s by default, that slurmctld does not answer.
PATIENCE_S = 3.0
FITS_S = 2.0  # slots that were there before must say so within this: else there are none any more
LATE_S = 120.0  # between the first slot of a step and the last one: Python on a cold shared file system is slow
LOST_S = 5.0  # a rank of which its agent, which answers, knows nothing any more
NO_MORE_S = 10.0  # after the end of its step nothing more is heard of a rank
_BY_SIGNAL = 128
_KILLED, _TERMINATED = _BY_SIGNAL + signal.SIGKILL, _BY_SIGNAL + signal.SIGTERM


class Slots(Protocol):
    """What runs ranks on their nodes, once it is there."""

    number: int  # another one for each

    def begun(self, step_id: int | None) -> None:  # noqa: ARG002
        """Take note that there are slots, and of Slurm's number of the step, where it is told."""
        return

    def ended(self) -> int | None:
        """Return the exit code once there are no slots, and none are to come; None before."""
        ...

    def failed(self) -> Failed:
        """Return why there are none; before, what the ranks' standard error hints at."""
        ...

    def abandon(self) -> None:
        """Let go of them without a word to Slurm."""
        ...

    def stop(self) -> None:
        """End them; returns in bounded time."""
        ...


@dataclass(slots=True)
class _Rank:
    """A rank, as its agent told of it last."""

    node: NodeName
    code: int | None = None
    exited_at: float = 0.0
    ended: bool = False
    out_of_memory: bool = False
    unstarted: str = ""  # why its command could not even be started
    missed_at: float | None = None  # since when its agent, which answers, knows nothing of it


@dataclass(eq=False, slots=True)
class _Node:
    """A node with ranks, and what its agent was asked."""

    name: NodeName
    ranks: tuple[int, ...]
    channel: grpc.Channel
    heard: float
    known: int = 0
    carried: int = 0  # the newest signal that the question carries
    signalled: int = 0  # the newest one that it has answered: an agent that is started again has not to pass it on
    slots: int = 0
    call: Any = None
    ask_at: float = 0.0

    def give_up(self) -> None:
        if self.call is not None:
            self.call.cancel()
            self.call = None


@dataclass(slots=True)
class _Order:
    """What is wanted of all nodes."""

    signals: list[node_pb2.RankSignal] = field(default_factory=list)
    end: bool = False
    grace_s: float = 0.0
    ended_at: float = 0.0  # when that was ordered


class AgentRanks(RankStep):
    """Asks and listens in a thread of its own, from the beginning until all ranks have ended or nobody waits."""

    def __init__(
        self,
        launch: Launch,
        file: str,
        reach: Reach,
        slots: Slots,
        *,
        make: Callable[[], Slots],
        use: Callable[[Any], None],
        before: Slots | None = None,
        are_new: bool,
        clock: Clock | None = None,
        role: HeldRole | None = None,
    ) -> None:
        """`file` carries the launch; `before` runs the ranks where `slots` do not come to be for long.

        `make` starts new ones, or fails; `use` ends all others and does not wait.
        """
        self._launch, self._file, self._reach = launch, file, reach
        self._slots, self._before, self._make, self._use = slots, before, make, use
        self._role = role or HeldRole()
        self._clock = clock or SystemClock()
        self._began = self._clock.monotonic()
        self._are_new, self._first_slot_at = are_new, None if are_new else self._began
        self._over_at: float | None = None  # when the step of slots was found to have ended
        self._lock = threading.RLock()
        self._wake, self._done, self._is_let_go = threading.Event(), threading.Event(), False
        self._order, self._failed, self._code = _Order(), Failed(), 0
        self._first_failed_at: float | None = None
        self._ranks: dict[int, _Rank] = {}
        self._nodes = list(_nodes(launch, reach, self._began))
        threading.Thread(target=self._run, name="deeplink-ranks", daemon=True).start()

    # What supervision sees.

    @override
    def exit_code(self) -> int | None:
        return self._code if self._done.is_set() else None

    @override
    def failed(self) -> Failed:
        return self._failed

    @override
    def send(self, number: signal.Signals) -> None:
        with self._lock:
            if number in {signal.SIGTERM, signal.SIGINT} and not self._ranks:  # those to come would not have it
                self._fail(_BY_SIGNAL + number, Failed(), KILL_GRACE_S)
                return
            one = node_pb2.RankSignal(id=int(self._clock.unix() * 1e6), number=number)
            self._order.signals.append(one)
            self._ask_anew()

    @override
    def abandon(self) -> None:
        self._is_let_go = True
        for slots in filter(None, (self._slots, self._before)):
            slots.abandon()
        self._wake.set()

    @override
    def kill(self) -> None:
        with self._lock:
            self._end(KILL_GRACE_S)
        self._done.wait(KILL_GRACE_S + OVER_S + 2 * SILENT_S)

    # The thread.

    def _run(self) -> None:
        while not (self._done.is_set() or self._is_let_go):
            try:
                self._go_on()
            except Exception as problem:  # else nobody would watch the ranks: no descriptor, no memory for an srun
                log.exception("watching the ranks")
                with self._lock:
                    self._fail(1, Failed(said=f"watching the ranks: {problem}", is_of_rank=False))
                self._done.set()
            self._wake.wait(LOOK_S)
            self._wake.clear()
        for one in self._nodes:
            one.give_up()
            one.channel.close()

    def _go_on(self) -> None:
        with self._lock:
            now = self._clock.monotonic()
            self._take(now)
            is_to_change = self._lacks_slots(now)
            self._judge(now)
            self._ask(now)
            is_to_change = is_to_change and not self._order.end
        if is_to_change:
            self._change()

    def _ask(self, now: float) -> None:
        order = self._order
        for one in self._nodes:
            if one.call is not None or now < one.ask_at:
                continue
            signals = [passed for passed in order.signals if passed.id > one.signalled]
            one.carried = signals[-1].id if signals else one.signalled
            question = node_pb2.RanksRequest(
                attempt=attempt_to_wire(self._launch.attempt),
                step=self._slots.number,
                launch=self._file,
                ranks=one.ranks,
                signals=signals,
                end=order.end,
                grace_s=order.grace_s,
                known=one.known,
                wait_s=ENDING_WAIT_S if order.end else WAIT_S,
                term=self._role.term,
            )
            stub: Any = node_pb2_grpc.NodeStub(one.channel)
            try:
                one.call = stub.Ranks.future(question, timeout=question.wait_s + ANSWER_S)
            except grpc.RpcError:  # a stranger listens there
                self._reach_again(one, now)
                continue
            one.call.add_done_callback(lambda _: self._wake.set())

    def _reach_again(self, node: _Node, now: float) -> None:
        node.ask_at = now + AGAIN_S
        node.channel.close()
        node.channel = self._reach(node.name)  # its agent may have come up elsewhere

    def _ask_anew(self) -> None:
        for one in self._nodes:
            one.give_up()
            one.known = one.ask_at = 0
        self._wake.set()

    def _take(self, now: float) -> None:
        for one in self._nodes:
            if one.call is None or not one.call.done():
                continue
            call, one.call = one.call, None
            if call.cancelled() or call.exception() is not None:
                self._reach_again(one, now)
                continue
            one.signalled = one.carried
            self._hear(one, call.result(), now)

    def _hear(self, node: _Node, reply: node_pb2.RanksReply, now: float) -> None:
        node.heard, node.known, node.slots = now, reply.version, reply.slots
        if reply.slots:
            self._first_slot_at = self._first_slot_at or now
            self._slots.begun(reply.step_id - 1 if reply.step_id else None)
            if self._before is not None:
                self._before = None
                self._use(self._slots)
        for state in reply.ranks:
            rank = self._ranks.setdefault(state.rank, _Rank(node.name))
            rank.missed_at, rank.ended, rank.out_of_memory = None, state.ended, state.out_of_memory
            rank.unstarted = state.unstarted
            if state.exited and rank.code is None:
                rank.code, rank.exited_at = state.code, now - state.exited_ago_s
        told = {state.rank for state in reply.ranks}
        for number in {*node.ranks} & {*self._ranks} - told:
            rank = self._ranks[number]
            rank.missed_at = rank.missed_at or now
            if not rank.ended and now - rank.missed_at > LOST_S:
                rank.code = _KILLED if rank.code is None else rank.code
                rank.exited_at, rank.ended = now, True

    def _lacks_slots(self, now: float) -> bool:
        """Return whether other slots are needed; give up where these were new."""
        without = [one for one in self._nodes if not all(number in self._ranks for number in one.ranks)]
        if self._order.end or (not without and self._slots.ended() is None):
            return False
        code = self._slots.ended()
        lacking = [one for one in without if one.heard > self._began and one.slots < len(one.ranks)]
        if code is not None and not without:
            self._over_at = self._over_at or now
            if now - self._over_at > NO_MORE_S:
                self._fail(_TERMINATED, Failed(said="the step of the ranks has ended"))
        elif self._before is not None and self._first_slot_at is None:
            return code is not None or now - self._began > PATIENCE_S
        elif code is not None and self._are_new:
            self._fail(code or 1, self._slots.failed())
        elif code is not None or (lacking and not self._are_new and now - self._began > FITS_S):
            return True
        elif lacking and self._first_slot_at is not None and now - self._first_slot_at > LATE_S:
            node = lacking[0].name
            said = f"{node} has {lacking[0].slots} of {len(lacking[0].ranks)} slots for ranks after {LATE_S:.0f} s"
            self._fail(1, Failed(said=said, node=node, is_of_rank=False))
        return False

    def _change(self) -> None:
        """Have the ranks run in the slots that were there before, or in new ones."""
        before = self._before
        try:
            # Not under the lock: shared storage may hang, and nobody may wait for it.
            slots = before or self._make()
        except (DeepLinkError, OSError) as problem:
            with self._lock:
                self._fail(1, Failed(said=str(problem), is_of_rank=False))
            return
        with self._lock:
            if not (self._order.end or self._is_let_go):
                now = self._clock.monotonic()
                self._are_new, self._before, self._began = before is None, None, now
                self._first_slot_at = None if before is None else now
                self._ranks.clear()  # what ran in the others is ended, and no failure
                self._first_failed_at = self._over_at = None
                self._slots = slots
                self._use(slots)
                self._ask_anew()
                return
        if before is None:  # the end was ordered meanwhile
            (slots.abandon if self._is_let_go else slots.stop)()

    def _judge(self, now: float) -> None:
        """Find the first rank that failed, and whether all is over."""
        failed = [(rank.exited_at, number) for number, rank in self._ranks.items() if rank.code]
        if failed and self._first_failed_at is None:
            self._first_failed_at = now
        left = [one for one in self._nodes if not self._has_ended(one)]
        if failed and not self._order.end and (not left or now - (self._first_failed_at or now) >= SOONER_S):
            number = min(failed)[1]
            rank = self._ranks[number]
            said = f"rank {number} on {rank.node}: {_how(rank.code or 0)}"
            hints = self._slots.failed().hints | ({Clue.OUT_OF_MEMORY} if rank.out_of_memory else set())
            if not rank.unstarted:
                self._fail(rank.code or 0, Failed(said=said, node=rank.node, hints=hints))
            elif not left or self._is_told_by_all(now):
                self._fail(rank.code or 0, self._unstarted(number, rank))
        if not left or (self._order.end and self._is_hopeless(left, now)):
            first = self._ranks[min(failed)[1]].code if failed else 0
            self._code = self._code or first or (_KILLED if left else 0)
            self._done.set()

    def _is_told_by_all(self, now: float) -> bool:
        """Whether it is known by now if a command that one node could not start can be started elsewhere."""
        is_late = now - (self._first_failed_at or now) >= UNSTARTED_S
        return is_late or (
            all(one.unstarted for one in self._ranks.values()) and len(self._ranks) == self._launch.processes
        )

    def _unstarted(self, number: int, rank: _Rank) -> Failed:
        """Return as what a rank that could not be started counts: as the command's fault, or its node's."""
        said = f"rank {number} could not be started: {rank.unstarted}"
        elsewhere = any(not one.unstarted for one in self._ranks.values())
        is_command = rank.code in {NOT_FOUND, NOT_EXECUTABLE} and not elsewhere
        alone = rank.node if elsewhere else None  # what befalls all is of none
        return Failed(said=said, node=alone, is_of_rank=is_command)

    def _has_ended(self, node: _Node) -> bool:
        ranks = [self._ranks.get(number) for number in node.ranks]
        if self._order.end and node.heard > self._order.ended_at:  # those that were not started are not any more
            return all(rank is None or rank.ended for rank in ranks)
        return all(rank is not None and rank.ended for rank in ranks)

    def _is_hopeless(self, left: Iterable[_Node], now: float) -> bool:
        since = self._order.ended_at
        if now - since > self._order.grace_s + OVER_S:
            return True
        return all(
            now - max(one.heard, since) > (STILL_SILENT_S if since - one.heard > 2 * WAIT_S else SILENT_S)
            for one in left
        )

    def _fail(self, code: int, failed: Failed, grace_s: float = FAILED_GRACE_S) -> None:
        self._code, self._failed = code, failed
        self._end(grace_s)

    def _end(self, grace_s: float) -> None:
        if not self._order.end or grace_s < self._order.grace_s:
            self._order.end, self._order.grace_s = True, grace_s
            self._order.ended_at = self._clock.monotonic()
            self._ask_anew()


def _nodes(launch: Launch, reach: Reach, now: float) -> Iterator[_Node]:
    first = 0
    for facts, count in zip(launch.nodes, launch.started, strict=True):
        yield _Node(facts.name, tuple(range(first, first + count)), reach(facts.name), now)
        first += count


def _how(code: int) -> str:
    """Return how a process ended, by its exit code.

    >>> _how(5), _how(137)
    ('exit code 5', 'exit code 137 (Killed)')
    """
    said = signal.strsignal(code - _BY_SIGNAL) if code - _BY_SIGNAL in signal.valid_signals() else None
    return f"exit code {code} ({said})" if said else f"exit code {code}"
