"""One agent as its launcher sees it: its last answer, and whether its host still responds.

An agent may be too starved to answer while its node is well (few cores, many ranks starting): then its kernel
still accepts connections for it. That of a dead or cut-off node does not. Nor does one behind a filter that drops
what agents send: so where nothing at all comes from the agent's port, slurmd's is tried by turns, at which any
answer tells that the machine lives, a refusal too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING

from deeplink.core.tcp import Connecting
from deeplink.core.timeouts import LastAnswer
from deeplink.rpc.channel import NEVER_OURS, agent_channel
from deeplink.rpc.resolving import split_address
from deeplink.scheduler.liveness.heartbeats import finding_from_wire
from deeplink.scheduler.recovery.records import RecordError
from deeplink.scheduler.recovery.relaunch import Silence
from deeplink.scheduler.slurm.client import SLURMD_PORT
from deeplink.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any

    import grpc

    from deeplink.core.clock import Clock
    from deeplink.core.finding import Finding
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

POLL_S = 0.5  # each agent is asked this often, whether or not it has answered the question before
ANSWER_S = 3.0  # how long an answer may take: longer than the poll, for a starved node that answers late is alive
MOST_IN_FLIGHT = 6
GAP_S = 1.5
CONNECT_S = 1.0  # then a new connection is tried: the kernel itself would pause for ever longer
ASK_S = 5.0  # between two questions to Slurm about nodes without an agent; most are up before the first one
UNHEARD_ANSWER_S = 30.0  # how long Slurm's answer may take, once it decides
_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # say nothing of the other side


class AgentMonitor:
    """An agent. Not thread-safe; nothing here waits. Moments are monotonic."""

    def __init__(self, facts: NodeFacts, now: float) -> None:
        self.facts = facts  # what it said when it came up
        self.token = ""  # what every call carries, of the attempt that runs
        self.heard = self.well_since = (
            now  # when something last came back; it has answered ever since without a gap
        )
        self.asked_and_answered = now  # when the newest question that was answered had been asked
        self.asked = 0.0
        # When its kernel last accepted a connection, or refused one for want of an agent; since when without gaps.
        self.reached = self.reached_since = now
        self.refused_since: float | None = None  # for so long its kernel has refused connections
        # When its machine last answered at slurmd's port, nothing at all having come from the agent's.
        self.lives = float("-inf")
        self.slurmd = slurmd_of(facts.address)
        self.after_report = 0
        self.store = node_pb2.StoreStatus()
        self.health: tuple[Finding, ...] = ()
        self.unix = (0.0, 0.0)  # what its clock showed, and when it told; 0 while it has not
        self.boot_id = self.boot_before = ""  # boot_before: of the agent before this one
        # What listens at its port is not it: that is asked no more, for each question shows the token.
        self.is_stranger = False
        self._newest = float("-inf")  # when what was answered last was asked; no stall moves it
        self._connecting: Connecting | None = None
        self._connecting_since = 0.0
        self._at_slurmd = False  # the connection attempt under way, or else the next one
        self._open(now)

    def _open(self, now: float) -> None:
        self.opened = now  # when we began to speak over this channel
        self._pending: list[tuple[float, str, Any]] = []
        self._channel: grpc.Channel | None = None
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        """What calls go through; of many agents, most are never called from here."""
        if self._channel is None:
            self._channel = agent_channel(self.facts.address, lambda: self.token)
            self._stub = node_pb2_grpc.NodeStub(self._channel)
        return self._stub

    def close(self) -> None:
        """Close every connection."""
        self._end_attempt()
        if self._channel is not None:
            self._channel.close()

    def reopen(self, now: float) -> None:
        """Use a fresh connection."""
        if self._channel is not None:
            self._channel.close()
        self._open(now)

    def forgive(self, stall: float, now: float) -> None:
        """Do not count so much time, in which we did nothing ourselves, against it."""
        # Nothing was heard in the future: a node that came up during the stall is forgiven no more than its age.
        for name in ("heard", "reached", "reached_since", "lives", "asked_and_answered"):
            setattr(self, name, min(now, getattr(self, name) + stall))

    def is_due(self, now: float, ask_at: float) -> bool:
        """Whether to ask it: it is time, or was at the moment `ask_at`, and not too much is under way."""
        is_time = now - self.asked >= POLL_S or self.asked < ask_at <= now
        return is_time and len(self._pending) < MOST_IN_FLIGHT and not self.is_stranger

    def ask(self, request: node_pb2.StatusRequest, now: float) -> None:
        """Ask for its status."""
        self.asked = now
        self._pending.append((now, self.token, self.stub.Status.future(request, timeout=ANSWER_S)))

    def harvest(self, now: float, reports: list[common_pb2.Progress]) -> bool:
        """Take in what has come back; returns whether a question failed at once, as where nobody listens."""
        waiting, failed = [], False
        for asked, token, call in self._pending:
            if not call.done():
                waiting.append((asked, token, call))
            elif call.cancelled() or call.exception() is not None:
                failed = True
                # Of a token that has ended since, a refusal says nothing: its agent has heard of the next attempt.
                is_of_now = token == self.token and not call.cancelled()
                self.is_stranger |= is_of_now and call.code() in NEVER_OURS
            elif call.result().node != self.facts.node:
                self.is_stranger = failed = True
            else:
                self.hear(call.result(), asked, now, reports)
        self._pending = waiting
        return failed

    def hear(
        self, reply: node_pb2.StatusReply, asked: float, now: float, reports: list[common_pb2.Progress]
    ) -> None:
        """Take in its answer to a question that was asked at `asked`."""
        if now - self.heard > GAP_S:
            self.well_since = now
        self.heard, self.refused_since = now, None
        if asked < self._newest:
            return  # a later question's answer was quicker, and says all that this one does
        self._newest = asked
        self.boot_id = reply.boot_id or self.boot_id
        self.health, self.store, self.unix = _findings(reply.health), reply.store, (reply.unix, now)
        self.asked_and_answered = max(self.asked_and_answered, asked)
        if reply.last_report < self.after_report:
            self.after_report = 0  # the agent was started again
        # Two questions in flight may bring the same records: take those beyond what is known.
        fresh = reply.last_report - self.after_report
        if fresh > 0:
            reports.extend(reply.progress[-fresh:])
            self.after_report = reply.last_report

    def is_settled(self, now: float) -> bool:
        """Whether nothing is under way to it from here, and nothing is to be tried: it was heard of just now."""
        is_idle = not self._pending and self._connecting is None and self.refused_since is None
        return is_idle and now - self.heard <= 2 * POLL_S

    def probe(self, now: float, *, failed: bool, may_be_gone: bool) -> bool:
        """Try for a connection where answers fail to come; returns whether the agent's port accepted one."""
        if self._connecting is None:
            pause = POLL_S if failed or self.refused_since is not None else 2 * POLL_S
            if now - max(self.heard, self.reached) <= pause and not (failed and self.refused_since is None):
                return False
            address = self.slurmd if self._at_slurmd and self.slurmd else split_address(self.facts.address)
            self._connecting, self._connecting_since = Connecting(address), now
        outcome = self._connecting.result()
        if outcome is None:
            if now - self._connecting_since >= CONNECT_S:
                self._end_attempt()
                self._at_slurmd = not self._at_slurmd and self.slurmd is not None
            return False
        self._end_attempt()
        return outcome not in _OUR_OWN and self._connected(now, outcome, may_be_gone=may_be_gone)

    def _end_attempt(self) -> None:
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _connected(self, now: float, outcome: int, *, may_be_gone: bool) -> bool:
        """Take in the outcome of a connection attempt; returns whether the agent's port accepted it."""
        if self._at_slurmd:
            self._at_slurmd = False
            if outcome in {0, errno.ECONNREFUSED}:
                self.lives = now
            return False
        before = max(self.heard, self.reached)
        if outcome == errno.ECONNREFUSED and may_be_gone and now - before <= GAP_S:
            # Its kernel was there all the while: it has lost its agent, and nothing else. One that was out of
            # reach and refuses now has been rebooted: of what ran there nothing is left.
            self.refused_since = now if self.refused_since is None else self.refused_since
        elif outcome != 0:
            self.lives = float("-inf")  # the machine lives, and has lost what ran there
            if self.refused_since is not None:  # that it refused till now was no contact either
                self.reached = min(self.reached, self.refused_since)
            return False
        else:
            self.refused_since = None
        if now - before > GAP_S:
            self.reached_since = now
        self.reached = now
        return outcome == 0

    def silence(self, now: float) -> Silence:
        """Return how long nothing was heard."""
        return Silence(
            now - self.heard,
            now - max(self.heard, self.reached, self.lives),
            now - self.asked_and_answered,
            self.heard - self.well_since,
            now - max(self.heard, self.reached_since),
        )


def slurmd_of(address: str) -> tuple[str, int] | None:
    """Return where slurmd of an agent's machine listens; None on loopback, where nodes are no machines.

    >>> slurmd_of("10.0.0.7:7411"), slurmd_of("127.0.0.1:7411")
    (('10.0.0.7', 6818), None)
    """
    host, _ = split_address(address)
    try:
        return None if ip_address(host).is_loopback else (host, SLURMD_PORT)
    except ValueError:  # a name
        return None


def _findings(wire: Iterable[common_pb2.Finding]) -> tuple[Finding, ...]:
    """Return a node's findings; one that cannot be read, of a newer agent, counts as none."""
    found = []
    for message in wire:
        with contextlib.suppress(RecordError):
            found.append(finding_from_wire(message))
    return tuple(found)


class Unheard:
    """Asks Slurm about nodes while their agents are waited for. Only the thread that waits uses it."""

    def __init__(
        self,
        ask: Callable[[Collection[NodeName]], Mapping[NodeName, bool] | None],
        clock: Clock,
        patience_s: float,
    ) -> None:
        self._clock, self._patience_s = clock, patience_s
        self._nodes: tuple[NodeName, ...] = ()
        self._last = LastAnswer(lambda: ask(self._nodes), clock, "deeplink-unheard")
        self._asked = clock.monotonic()
        self._late: float | None = None

    def lost(self, nodes: Collection[NodeName], spare: int, *, late: bool) -> frozenset[NodeName] | None:
        """Return which of these nodes are lost, if that is why too few agents are up; None while it is open."""
        now = self._clock.monotonic()
        if late and self._late is None:
            self._late, self._asked = now, float("-inf")
        if now - self._asked >= ASK_S:
            self._asked, self._nodes = now, tuple(nodes)
            self._last.ask()
        late_s = float("-inf") if self._late is None else now - self._late
        if self._late is not None and self._last.answered < self._late:
            return None if late_s < UNHEARD_ANSWER_S else frozenset()
        answer = self._last.value or {}
        away = {node: answer[node] for node in nodes if node in answer}
        if len(away) <= (0 if late else spare):
            return frozenset() if late else None
        return frozenset(away) if all(away.values()) or late_s >= self._patience_s else None
