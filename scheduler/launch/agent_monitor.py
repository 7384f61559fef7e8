"""One agent as its launcher sees it: its last answer, and whether its host still responds.

An agent may be too starved to answer while its node is well (few cores, many ranks starting): then its kernel
still accepts connections for it. That of a dead or cut-off node does not. Nor does one behind a filter that drops
what agents send: so where nothing at all comes from the agent's port, slurmd's is tried by turns, at which any
answer tells that the machine lives, a refusal too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from collections import defaultdict
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from deeplink.core.tcp import Connecting
from deeplink.core.timeouts import LastAnswer
from deeplink.core.types import NodeName
from deeplink.rpc.channel import NEVER_OURS, agent_channel
from deeplink.rpc.resolving import split_address
from deeplink.scheduler.liveness.heartbeats import finding_from_wire
from deeplink.scheduler.recovery.records import RecordError
from deeplink.scheduler.recovery.relaunch import Silence
from deeplink.scheduler.slurm.client import SLURMD_PORT
from deeplink.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    import grpc

    from deeplink.core.clock import Clock
    from deeplink.core.finding import Finding
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
        self.heard = now  # when something last came back
        self.asked_and_answered = now  # when the newest question that was answered had been asked
        self.asked = 0.0
        # When its kernel last accepted a connection, or refused one for want of an agent; since when without gaps.
        self.reached = self.reached_since = now
        self.refused_since: float | None = None  # for so long its kernel has refused connections
        # When its machine last answered at slurmd's port, nothing at all having come from the agent's.
        self.lives = float("-inf")
        self.slurmd = slurmd_of(facts.address)
        self.after_report = 0
        self.term = 0  # the newest of a launcher that it knows of
        self.store = node_pb2.StoreStatus()
        self.health: tuple[Finding, ...] = ()
        self.unix = (0.0, 0.0)  # what its clock showed, and when it told; 0 while it has not
        self.boot_id = ""
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
        self.heard, self.refused_since = now, None
        if asked < self._newest:
            return  # a later question's answer was quicker, and says all that this one does
        self._newest, self.term = asked, reply.term
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


# Polls of many agents: of each leaf one is asked for all that are there. A node that is missing in its leaf's
# replies is asked by the launcher itself from then on, for a while; where no reply comes, another agent of the
# leaf is asked. So what becomes of a node is told as soon as if all were asked.

ALONE_S = 2 * POLL_S  # a node that others of its leaf are heard of, and it is not
ALONE_KEPT_S = 30.0
_MOST_MOMENTS = 64  # questions whose answers may still come: beyond `ANSWER_S` none does
_numbers = itertools.count(1)
"""Of questions of all leaves: an answer to a leaf that is not there any more is none to another."""


class _Leaf:
    """Agents that are asked together."""

    def __init__(self, agents: Iterable[AgentMonitor], first_at: float) -> None:
        self._asked, self._replied = first_at - POLL_S, float("-inf")
        self._rounds = 0
        self._moments: dict[int, float] = {}  # when each of the newest questions was asked
        self._gatherer: AgentMonitor | None = None
        self._gathers_since = first_at
        self._pending: list[tuple[AgentMonitor, Any]] = []
        self._alone_until: dict[NodeName, float] = {}
        self.use(agents)

    def use(self, agents: Iterable[AgentMonitor]) -> None:
        """Go on with these: the same nodes, some with agents that came up again."""
        self._agents = {one.facts.name: one for one in agents}
        self._pending = [(one, call) for one, call in self._pending if self._agents[one.facts.name] is one]
        if self._gatherer is not None and self._agents[self._gatherer.facts.name] is not self._gatherer:
            self._gatherer = None

    def harvest(self, now: float, reports: list[common_pb2.Progress]) -> set[NodeName]:
        """Take in what has come back; return the nodes whose question failed at once."""
        waiting: list[tuple[AgentMonitor, Any]] = []
        failed: set[NodeName] = set()
        for gatherer, call in self._pending:
            if not call.done():
                waiting.append((gatherer, call))
            elif call.cancelled() or call.exception() is not None:
                failed.add(gatherer.facts.name)
                self._asked = float("-inf")  # another one is asked at once
            else:
                self._replied = now
                failed.update(
                    NodeName(answer.node)
                    for answer in call.result().answers
                    if not self._hear(answer, now, reports)
                )
        self._pending = waiting
        self._alone_until.update(dict.fromkeys(failed, now + ALONE_KEPT_S))
        return failed

    def _hear(self, answer: node_pb2.GatheredStatus, now: float, reports: list[common_pb2.Progress]) -> bool:
        """Take in one agent's answer; returns whether it is one."""
        one, asked = self._agents.get(NodeName(answer.node)), self._moments.get(answer.number)
        if one is None or asked is None:
            return True
        if not answer.HasField("status") or answer.status.node != one.facts.node:
            return False
        if now - asked > ALONE_S:  # it may have waited at who gathers: it does not say that the node is there now
            return True
        one.hear(answer.status, asked, now, reports)
        return True

    def ask(self, request: node_pb2.StatusRequest, now: float, ask_at: float, stall: float) -> set[NodeName]:
        """Ask where it is time; return the nodes that are asked so, now or soon."""
        if stall < POLL_S:  # else it is us who did not look
            for one in self._agents.values():
                self._part_with(one, now)
        together = [
            one
            for name, one in self._agents.items()
            if not one.is_stranger and now >= self._alone_until.get(name, now)
        ]
        if len(together) < 2:  # noqa: PLR2004 - nobody would be asked for another
            return set()
        if together[0] is not self._gatherer:
            self._asked = self._asked if self._gatherer is None else float("-inf")
            self._gatherer, self._gathers_since = together[0], now
        is_time = now - self._asked >= POLL_S or self._asked < ask_at <= now
        if is_time and len(self._pending) < MOST_IN_FLIGHT:
            self._ask(together, request, now)
        return {one.facts.name for one in together}

    def _part_with(self, one: AgentMonitor, now: float) -> None:
        """Have an agent asked alone that is silent, or does not gather."""
        silent_s = now - one.heard
        does_not_gather = one is self._gatherer and now - self._gathers_since >= ALONE_S
        is_missing = now - self._replied < ALONE_S or does_not_gather
        if silent_s >= (ALONE_S if is_missing else ALONE_S + POLL_S):
            self._alone_until[one.facts.name] = now + ALONE_KEPT_S

    def _ask(self, together: Sequence[AgentMonitor], request: node_pb2.StatusRequest, now: float) -> None:
        self._asked, self._rounds, number = now, self._rounds + 1, next(_numbers)
        self._moments[number] = now
        if len(self._moments) > _MOST_MOMENTS:
            del self._moments[next(iter(self._moments))]
        agents = [
            node_pb2.GatheredAgent(node=one.facts.node, address=one.facts.address, after_report=one.after_report)
            for one in together
        ]
        question = node_pb2.GatherRequest(status=request, agents=agents, number=number)
        self._pending.append((together[0], together[0].stub.Gather.future(question, timeout=ANSWER_S)))


class GatherPoll:
    """The agents of a job by their leaves, as their addresses and failure domains are now."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[NodeName, ...], _Leaf] = {}

    def use(self, agents: Iterable[AgentMonitor], now: float) -> None:
        """Poll these from now on. A leaf of the same nodes goes on, also with agents that came up again."""
        from deeplink.scheduler.node.servicer import MOST_GATHERED  # noqa: PLC0415 - takes 50 ms, for large jobs alone

        domains: defaultdict[str, list[AgentMonitor]] = defaultdict(list)
        for one in agents:
            domains[one.facts.domain].append(one)
        leaves = [
            those[first : first + MOST_GATHERED]
            for those in domains.values()
            for first in range(0, len(those), MOST_GATHERED)
        ]
        before, self._leaves = self._leaves, {}
        for at, those in enumerate(leaves):
            names = tuple(one.facts.name for one in those)
            leaf = before.get(names)
            if leaf is None:
                # By turns: all at once would hold up whoever looks at the nodes.
                leaf = _Leaf(those, now + POLL_S * at / len(leaves))
            else:
                leaf.use(those)
            self._leaves[names] = leaf

    def harvest(self, now: float, reports: list[common_pb2.Progress]) -> set[NodeName]:
        """Take in what has come back; return the nodes whose question failed at once."""
        return {name for leaf in self._leaves.values() for name in leaf.harvest(now, reports)}

    def ask(self, request: node_pb2.StatusRequest, now: float, ask_at: float, stall: float) -> set[NodeName]:
        """Ask where it is time; return the nodes that the launcher need not ask itself.

        `stall`: seconds since the launcher last looked.
        """
        return {name for leaf in self._leaves.values() for name in leaf.ask(request, now, ask_at, stall)}
