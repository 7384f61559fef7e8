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
import select
import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING

from deeplink.resolving import split_address
from deeplink.scheduler.slurm.client import SLURMD_PORT
from deeplink.scheduler.watch.messages import finding_from_wire
from deeplink.scheduler.watch.records import RecordError
from deeplink.v1 import node_pb2, node_pb2_grpc
from deeplink.wary import NEVER_OURS, agent_channel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Self

    import grpc

    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Each agent is asked this often, whether or not it has answered the question before."""
ANSWER_S = 3.0
"""How long an answer may take. Longer than the poll: a starved node that answers late is alive."""
MOST_IN_FLIGHT = 6
GAP_S = 1.5
KNOCK_S = 1.0
"""A connection that is not there by then is tried for anew: the kernel itself would pause for ever longer."""


@dataclass(frozen=True, slots=True)
class Silence:
    """How long nothing was heard of a node, in seconds.

    Attributes:
        answer_s: since its agent last answered.
        contact_s: since its agent answered, or its machine did by accepting a connection, or at slurmd's port.
        question_s: since we asked the newest question that was answered: what it knew before does not count.
        answering_s: for how long it has answered by now without a gap of GAP_S.
        deaf_s: for how long its machine has been in contact without an answer of its agent.
    """

    answer_s: float
    contact_s: float
    question_s: float
    answering_s: float = 0.0
    deaf_s: float = 0.0


@dataclass(slots=True)
class AgentMonitor:
    """An agent. Not thread-safe; nothing here waits. Moments are monotonic.

    Attributes:
        facts: what it said when it came up.
        token: what every call carries, of the attempt that runs.
        heard: when something last came back.
        asked_and_answered: when the newest question that was answered had been asked.
        asked: when it was last asked.
        reached: when its kernel last accepted a connection, or refused one for want of an agent.
        reached_since: it has been in contact ever since without a gap.
        lives: when its machine last answered at slurmd's port, nothing at all having come from the agent's.
        slurmd: host and port of its slurmd; None where an answer there would say nothing of the machine.
        refused_since: for so long its kernel has refused connections; None while it does not.
        opened: when we began to speak over this channel.
        unix: what its clock showed, and when it told; 0 while it has not.
        boot_before: of the agent before this one.
        well_since: it has answered ever since without a gap.
        is_stranger: what listens at its port is not it: that is asked no more, for each question shows the token.
    """

    facts: NodeFacts
    heard: float
    asked_and_answered: float
    reached: float
    reached_since: float
    opened: float
    well_since: float
    token: str = ""
    channel: grpc.Channel = field(init=False)
    stub: Any = field(init=False)
    slurmd: tuple[str, int] | None = None
    asked: float = 0.0
    refused_since: float | None = None
    lives: float = float("-inf")
    after_report: int = 0
    store: node_pb2.StoreStatus = field(default_factory=node_pb2.StoreStatus)
    health: tuple[HealthFinding, ...] = ()
    unix: tuple[float, float] = (0.0, 0.0)
    boot_id: str = ""
    boot_before: str = ""
    is_stranger: bool = False
    _newest: float = float("-inf")  # when what was answered last was asked; no stall moves it
    _pending: list[tuple[float, str, Any]] = field(default_factory=list)
    _knock: socket.socket | None = None
    _knocked: float = 0.0
    _at_slurmd: bool = False  # the knock under way, or else the next one

    @classmethod
    def begun(cls, facts: NodeFacts, now: float) -> Self:
        """Return one that has just come up."""
        return cls(
            facts,
            heard=now,
            asked_and_answered=now,
            reached=now,
            reached_since=now,
            opened=now,
            well_since=now,
            slurmd=slurmd_of(facts.address),
        )

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.channel = agent_channel(self.facts.address, lambda: self.token)
        self.stub = node_pb2_grpc.NodeStub(self.channel)

    def close(self) -> None:
        """Let go of every connection."""
        self._end_knock()
        self.channel.close()

    def reopen(self, now: float) -> None:
        """Speak over a fresh connection."""
        self.channel.close()
        self._open()
        self.opened, self._pending = now, []

    def forgive(self, stall: float, now: float) -> None:
        """So much time, in which we did nothing ourselves, does not count against it."""
        # Nothing was heard in the future: a node that came up during the stall is forgiven no more than its age.
        self.heard = min(now, self.heard + stall)
        self.reached = min(now, self.reached + stall)
        self.reached_since = min(now, self.reached_since + stall)
        self.lives = min(now, self.lives + stall)
        self.asked_and_answered = min(now, self.asked_and_answered + stall)

    def is_due(self, now: float, pressed: float) -> bool:
        """Whether it is to be asked: it is time, or was at the moment `pressed`, and not too much is under way."""
        is_time = now - self.asked >= POLL_S or self.asked < pressed <= now
        return is_time and len(self._pending) < MOST_IN_FLIGHT and not self.is_stranger

    def ask(self, request: node_pb2.StatusRequest, now: float) -> None:
        """Ask it how it is."""
        self.asked = now
        self._pending.append((now, self.token, self.stub.Status.future(request, timeout=ANSWER_S)))

    def harvest(self, now: float, reports: list[common_pb2.Progress]) -> bool:
        """Take in what has come back; returns whether a question failed at once, as where nobody listens."""
        waiting = []
        failed = False
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
                self._hear(call.result(), asked, now, reports)
        self._pending = waiting
        return failed

    def _hear(
        self, reply: node_pb2.StatusReply, asked: float, now: float, reports: list[common_pb2.Progress]
    ) -> None:
        if now - self.heard > GAP_S:
            self.well_since = now
        self.heard, self.refused_since = now, None
        if asked < self._newest:
            return  # a later question's answer was quicker, and says all that this one does
        self._newest = asked
        self.boot_id = reply.boot_id or self.boot_id
        self.health = _findings(reply.health)
        self.unix = (reply.unix, now)
        self.asked_and_answered = max(self.asked_and_answered, asked)
        self.store = reply.store
        if reply.last_report < self.after_report:
            self.after_report = 0  # the agent began anew
        # Two questions in flight may bring the same records: take those beyond what is known.
        fresh = reply.last_report - self.after_report
        if fresh > 0:
            reports.extend(reply.progress[-fresh:])
            self.after_report = reply.last_report

    def knock(self, now: float, *, failed: bool, may_be_gone: bool) -> bool:
        """Try for a connection where answers fail to come; returns whether one was accepted just now.

        Args:
            now: this moment.
            failed: a question failed just now.
            may_be_gone: its machine may live on without it.
        """
        if self._knock is not None:
            # Not select(), which fails beyond 1,024 open files: those of a thousand agents.
            poll = select.poll()
            poll.register(self._knock, select.POLLOUT)
            if poll.poll(0):
                outcome = self._knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self._end_knock()
                return self._answered(now, outcome, may_be_gone=may_be_gone)
            if now - self._knocked >= KNOCK_S:
                self._end_knock()
                self._at_slurmd = not self._at_slurmd and self.slurmd is not None
            return False
        pause = POLL_S if failed or self.refused_since is not None else 2 * POLL_S
        if now - max(self.heard, self.reached) <= pause and not (failed and self.refused_since is None):
            return False
        host, port = self.slurmd if self._at_slurmd and self.slurmd else split_address(self.facts.address)
        try:
            knock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as problem:  # no more files may be opened
            log.debug("%s is not knocked at: %s", self.facts.node, problem)
            return False
        knock.settimeout(0.0)
        outcome = knock.connect_ex((host, port))
        if outcome == errno.EINPROGRESS:
            self._knock, self._knocked = knock, now
            return False
        knock.close()
        return self._answered(now, outcome, may_be_gone=may_be_gone)

    def _end_knock(self) -> None:
        if self._knock is not None:
            self._knock.close()
            self._knock = None

    def _answered(self, now: float, outcome: int, *, may_be_gone: bool) -> bool:
        """Take in what became of a knock; returns whether it was accepted at the agent's port."""
        if self._at_slurmd:
            self._at_slurmd = False
            if outcome in {0, errno.ECONNREFUSED}:
                self.lives = now
            return False
        before = max(self.heard, self.reached)
        if outcome == errno.ECONNREFUSED and may_be_gone and now - before <= GAP_S:
            # Its kernel was there all the while: it has lost its agent, and nothing else. One that was out of
            # reach and refuses now has been booted anew: of what ran there nothing is left.
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


def _findings(wire: Iterable[common_pb2.Finding]) -> tuple[HealthFinding, ...]:
    """Return a node's findings; one that cannot be read, of a newer agent, is as good as none."""
    found = []
    for message in wire:
        with contextlib.suppress(RecordError):
            found.append(finding_from_wire(message))
    return tuple(found)
