"""The agents of a job, and what we hear of them: an answer to Status is a node's heartbeat."""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.backend import AgentsFailedError
from deeplink.scheduler.watch.messages import finding_from_wire
from deeplink.scheduler.watch.records import RecordError, Severity
from deeplink.types import NodeName, format_members
from deeplink.v1 import node_pb2, node_pb2_grpc
from deeplink.wire import allow_descriptors, attempt_to_wire, open_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any

    import grpc

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import AgentStep
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.launch.revival import Revival
    from deeplink.scheduler.watch.records import Finding
    from deeplink.types import Attempt
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

START_S = 120.0
"""How long the agents that are needed may take to come up (Python on a cold shared file system is slow)."""
QUIET_S = 10.0
"""After so long without any agent we say what we wait for."""
GRACE_S = 10.0
"""How long the others may take then."""
POLL_S = 0.5
"""Each agent is asked this often, whether or not it has answered the question before."""
ANSWER_S = 3.0
"""How long an answer may take. Longer than the poll: a starved node that answers late is alive."""
MOST_IN_FLIGHT = 6
GAP_S = 1.5
KNOCK_S = 1.0
"""A connection that is not there by then is tried for anew: the kernel itself would pause for ever longer."""
GONE_S = 1.0
"""A machine that has refused connections for so long has lost its agent; while a job ends all of them do."""
FEW = 128
"""Each agent is a connection, and two where it is silent: for more, 1,024 open files may be too few."""
STALL_S = 1.0
"""If we ourselves did nothing for longer than this, the time does not count against anybody."""


@dataclass(slots=True)
class _Watched:
    facts: NodeFacts
    channel: grpc.Channel
    stub: Any
    heard: float  # when something last came back
    asked_and_answered: float  # when the newest question that was answered had been asked
    asked: float = 0.0
    reached: float = 0.0  # when its kernel last accepted a connection, or refused one for want of an agent
    reached_since: float = 0.0  # it has been in contact ever since without a gap
    refused_since: float | None = None
    opened: float = 0.0  # when we began to speak over this channel
    knock: socket.socket | None = None
    knocked: float = 0.0
    after_report: int = 0
    store: node_pb2.StoreStatus = field(default_factory=node_pb2.StoreStatus)
    health: tuple[Finding, ...] = ()
    unix: tuple[float, float] = (0.0, 0.0)  # what its clock showed, and when it told; 0 while it has not
    boot_id: str = ""
    boot_before: str = ""  # of the agent before this one
    well_since: float = 0.0  # it has answered ever since without a gap
    pending: list[tuple[float, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Silence:
    """How long nothing was heard of a node, in seconds.

    Attributes:
        answer_s: since its agent last answered.
        contact_s: since its agent answered or at least its machine accepted a connection for it.
        question_s: since we asked the newest question that was answered: what it knew before does not count.
        answering_s: for how long it has answered by now without a gap of GAP_S.
        deaf_s: for how long its machine has been in contact without an answer of its agent.
    """

    answer_s: float
    contact_s: float
    question_s: float
    answering_s: float = 0.0
    deaf_s: float = 0.0


class Fleet:
    """The agents of one run. Not thread-safe: the supervising thread alone uses it.

    Attributes:
        save_at: the step the ranks are to be told to save at; 0: none.

    Args:
        step: the running agents.
        token: what every call carries.
        clock: for all durations.
        revival: starts agents once more; None where that cannot be.
    """

    def __init__(self, step: AgentStep, token: str, clock: Clock, revival: Revival | None = None) -> None:
        self._step, self._token, self._clock, self._revival = step, token, clock, revival
        self._nodes: dict[NodeName, _Watched] = {}
        self._ticked = clock.monotonic()
        self._pressed = float("-inf")
        self.save_at = 0

    @property
    def facts(self) -> dict[NodeName, NodeFacts]:
        """Every node whose agent came up."""
        return {name: watched.facts for name, watched in self._nodes.items()}

    def store_of(self, node: NodeName) -> node_pb2.StoreStatus:
        """Return what the node last said of its store."""
        return self._nodes[node].store

    def gather(
        self, nodes: Collection[NodeName], need: int, *, logs: str, told_to_end: Callable[[], bool]
    ) -> bool:
        """Wait until an agent of every node is up; go on without the late ones once `need` are.

        Args:
            nodes: all nodes of the allocation.
            need: how many are needed at least.
            logs: where the agents log, for the error.
            told_to_end: asked all the while; once true, the waiting ends and False is returned.

        Raises:
            AgentsFailedError: fewer than `need` came up.
        """
        if len(nodes) > FEW:
            allow_descriptors()
        began = self._clock.monotonic()
        enough: float | None = None
        said = False
        while not told_to_end():
            for facts in self._step.announced():
                if facts.node in nodes:
                    self._admit(facts)
            now = self._clock.monotonic()
            if len(self._nodes) == len(nodes):
                return True
            if enough is None and len(self._nodes) >= need:
                enough = now
            if enough is not None and now - enough > GRACE_S:
                log.warning("going on without agents on %s", ", ".join(set(nodes) - set(self._nodes)))
                return True
            if enough is None and (now - began > START_S or self._step.ended() is not None):
                missing = set(nodes) - set(self._nodes)
                raise AgentsFailedError(missing, now - began, logs, step=self._step, none=not self._nodes)
            if not said and not self._nodes and now - began > QUIET_S:
                said = True
                starter, doubt = self._step.starter, self._step.doubt
                log.warning("%s has not started the agents yet, after %.0f s. %s", starter, now - began, doubt)
            self._clock.sleep(0.02)
        return False

    def _admit(self, facts: NodeFacts) -> None:
        channel = open_channel(facts.address, self._token)
        now = self._clock.monotonic()
        stub = node_pb2_grpc.NodeStub(channel)
        self._nodes[NodeName(facts.node)] = _Watched(
            facts,
            channel,
            stub,
            heard=now,
            asked_and_answered=now,
            reached=now,
            reached_since=now,
            opened=now,
            well_since=now,
        )

    def readdress(self, facts: Mapping[NodeName, NodeFacts]) -> None:
        """Reach these nodes, which came up, by other addresses from here on."""
        for name, one in facts.items():
            self._nodes[name].channel.close()
            self._admit(one)

    def revive(self, nodes: Collection[NodeName]) -> tuple[NodeName, ...]:
        """Start agents once more on nodes that lost theirs, in their places; returns those it is tried on now.

        Who comes up answers as before. Does not wait.
        """
        if self._revival is None or not nodes:
            return ()
        return self._revival.begin({node: self._nodes[node].facts for node in nodes})

    def bereft(self, among: Collection[NodeName]) -> tuple[NodeName, ...]:
        """Return those of these nodes whose machine answers, and tells that no agent is there any more.

        Nobody while all of them are silent and their starter has not ended: then it is ending them itself.
        """
        now = self._clock.monotonic()
        if self._step.ended() is None and all(now - one.heard >= GAP_S for one in self._nodes.values()):
            return ()
        return tuple(
            node
            for node in among
            if (since := self._nodes[node].refused_since) is not None and now - since >= GONE_S
        )

    def _readmit(self) -> None:
        for new in self._revival.announced() if self._revival is not None else ():
            old = self._nodes.get(new.name)
            if old is None or self._clock.monotonic() - old.heard < POLL_S:
                continue  # one that answers is enough
            log.info("the agent of %s is there again", new.name)
            # All else was settled for the whole run: which network, which cards, what fails together.
            address = f"{old.facts.address.rpartition(':')[0]}:{new.address.rpartition(':')[2]}"
            old.channel.close()
            self._admit(
                replace(
                    old.facts, address=address, token_file=new.token_file, pid=new.pid, data_port=new.data_port
                )
            )
            again = self._nodes[new.name]
            # That it is there answers nothing: it may be on another boot, with nothing left of what ran before.
            again.boot_before, again.asked_and_answered = old.boot_id, old.asked_and_answered

    def rebooted(self) -> set[NodeName]:
        """Return the nodes whose agents came up once more on another boot of their kernel."""
        return {
            name
            for name, one in self._nodes.items()
            if one.boot_before and one.boot_id not in {"", one.boot_before}
        }

    def press(self, moment: float) -> None:
        """See to it that every agent is asked at this moment or soon after, whenever it was asked before."""
        self._pressed = moment

    def tick(self, attempt: Attempt) -> list[common_pb2.Progress]:
        """Take in what has come back, ask again where it is time; does not wait. Returns new progress reports."""
        now = self._clock.monotonic()
        stall = now - self._ticked
        self._ticked = now
        reports: list[common_pb2.Progress] = []
        self._readmit()
        members = format_members(tuple(watched.facts.member for watched in self._nodes.values()))
        for watched in self._nodes.values():
            if stall > STALL_S:
                self._forgive(watched, stall, now)
            failed = self._harvest(watched, now, reports)
            if self._knock(watched, now, failed=failed):
                is_back = watched.reached_since == now
                if is_back or now - max(watched.heard, watched.opened) > 2 * ANSWER_S:
                    # In contact, but not by the connection we have: that one may wait long before it is tried.
                    self._reopen(watched, now)
            due = now - watched.asked >= POLL_S or watched.asked < self._pressed <= now
            if due and len(watched.pending) < MOST_IN_FLIGHT:
                watched.asked = now
                request = node_pb2.StatusRequest(
                    attempt=attempt_to_wire(attempt),
                    after_report=watched.after_report,
                    members=members,
                    save_at=self.save_at,
                )
                watched.pending.append((now, watched.stub.Status.future(request, timeout=ANSWER_S)))
        return reports

    def _reopen(self, watched: _Watched, now: float) -> None:
        watched.channel.close()
        watched.channel = open_channel(watched.facts.address, self._token)
        watched.stub = node_pb2_grpc.NodeStub(watched.channel)
        watched.opened, watched.pending = now, []

    @staticmethod
    def _forgive(watched: _Watched, stall: float, now: float) -> None:
        # Nothing was heard in the future: a node that came up during the stall is forgiven no more than its age.
        watched.heard = min(now, watched.heard + stall)
        watched.reached = min(now, watched.reached + stall)
        watched.reached_since = min(now, watched.reached_since + stall)
        watched.asked_and_answered = min(now, watched.asked_and_answered + stall)

    @staticmethod
    def _harvest(watched: _Watched, now: float, reports: list[common_pb2.Progress]) -> bool:
        """Take in what has come back; returns whether a question failed at once, as where nobody listens."""
        waiting = []
        failed = False
        for asked, call in watched.pending:
            if not call.done():
                waiting.append((asked, call))
                continue
            if call.cancelled() or call.exception() is not None:
                failed = True
                continue
            reply = call.result()
            if now - watched.heard > GAP_S:
                watched.well_since = now
            watched.heard, watched.refused_since = now, None
            if asked < watched.asked_and_answered:
                continue  # a later question's answer was quicker, and says all that this one does
            watched.boot_id = reply.boot_id or watched.boot_id
            watched.health = _findings(reply.health)
            watched.unix = (reply.unix, now)
            watched.asked_and_answered = asked
            watched.store = reply.store
            if reply.last_report < watched.after_report:
                watched.after_report = 0  # the agent began anew
            # Two questions in flight may bring the same records: take those beyond what is known.
            fresh = reply.last_report - watched.after_report
            if fresh > 0:
                reports.extend(reply.progress[-fresh:])
                watched.after_report = reply.last_report
        watched.pending = waiting
        return failed

    def _knock(self, watched: _Watched, now: float, *, failed: bool) -> bool:
        """Try for a connection where answers fail to come; returns whether one was accepted just now."""
        # An agent may be too starved to answer while its node is well (few cores, many ranks starting): then its
        # kernel still accepts connections for it. That of a dead or cut-off node does not.
        if watched.knock is not None:
            # Not select(), which fails beyond 1,024 open files: those of a thousand agents.
            poll = select.poll()
            poll.register(watched.knock, select.POLLOUT)
            if not poll.poll(0):
                if now - watched.knocked >= KNOCK_S:
                    watched.knock.close()
                    watched.knock = None
                return False
            outcome = watched.knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            watched.knock.close()
            watched.knock = None
            return self._answered(watched, now, outcome)
        pause = POLL_S if failed or watched.refused_since is not None else 2 * POLL_S
        if now - max(watched.heard, watched.reached) <= pause and not (failed and watched.refused_since is None):
            return False
        host, _, port = watched.facts.address.rpartition(":")
        try:
            knock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as problem:  # no more files may be opened
            log.debug("%s is not knocked at: %s", watched.facts.node, problem)
            return False
        knock.settimeout(0.0)
        outcome = knock.connect_ex((host.strip("[]"), int(port)))
        if outcome == errno.EINPROGRESS:
            watched.knock, watched.knocked = knock, now
            return False
        knock.close()
        return self._answered(watched, now, outcome)

    def _answered(self, watched: _Watched, now: float, outcome: int) -> bool:
        """Take in what became of a knock; returns whether it was accepted."""
        before = max(watched.heard, watched.reached)
        if outcome == errno.ECONNREFUSED and self._revival is not None and now - before <= GAP_S:
            # Its kernel was there all the while: it has lost its agent, and nothing else. One that was out of
            # reach and refuses now has been booted anew: of what ran there nothing is left.
            watched.refused_since = now if watched.refused_since is None else watched.refused_since
        elif outcome != 0:
            return False
        else:
            watched.refused_since = None
        if now - before > GAP_S:
            watched.reached_since = now
        watched.reached = now
        return outcome == 0

    def silence(self) -> dict[NodeName, Silence]:
        """Return how long each node has been silent."""
        now = self._clock.monotonic()
        return {
            name: Silence(
                now - one.heard,
                now - max(one.heard, one.reached),
                now - one.asked_and_answered,
                one.heard - one.well_since,
                now - max(one.heard, one.reached_since),
            )
            for name, one in self._nodes.items()
        }

    def health(self) -> dict[NodeName, tuple[Finding, ...]]:
        """Return what was wrong with each node, by its own checks, when it last answered."""
        return {name: one.health for name, one in self._nodes.items()}

    def unix(self) -> dict[NodeName, float]:
        """Return what each node's clock shows by now, within seconds; those that did not tell are left out."""
        now = self._clock.monotonic()
        return {name: one.unix[0] + now - one.unix[1] for name, one in self._nodes.items() if one.unix[0]}

    def sick(self) -> set[NodeName]:
        """Return the nodes that are unfit for ranks by their own checks."""
        return {
            name
            for name, one in self._nodes.items()
            if any(finding.severity is Severity.DRAIN for finding in one.health)
        }

    def boot_ids(self) -> dict[NodeName, str]:
        """Return which boot of its kernel each node runs; empty where it does not say."""
        return {name: one.boot_id for name, one in self._nodes.items()}

    def ask_stacks(
        self, nodes: Iterable[NodeName], request: node_pb2.StacksRequest, timeout_s: float
    ) -> dict[NodeName, Any]:
        """Ask these nodes' agents at once where ranks are; return the calls under way, futures of StacksReply."""
        known = [node for node in nodes if node in self._nodes]
        return {node: self._nodes[node].stub.Stacks.future(request, timeout=timeout_s) for node in known}

    @property
    def is_gone(self) -> bool:
        """Whether all agents have ended, and none was started once more."""
        if self._step.ended() is None:
            return False
        now = self._clock.monotonic()
        return all(now - one.heard >= GAP_S for one in self._nodes.values())

    def abandon(self) -> None:
        """Let go of the agents, where they are not ours to end any more."""
        self._step.abandon()
        if self._revival is not None:
            self._revival.abandon()

    def close(self) -> None:
        """End the agents and let go of every connection; returns in bounded time."""
        for watched in self._nodes.values():
            if watched.knock is not None:
                watched.knock.close()
            watched.channel.close()
        if self._revival is not None:
            self._revival.close()
        self._step.stop()


def _findings(wire: Iterable[common_pb2.Finding]) -> tuple[Finding, ...]:
    """Return a node's findings; one that cannot be read, of a newer agent, is as good as none."""
    found = []
    for message in wire:
        with contextlib.suppress(RecordError):
            found.append(finding_from_wire(message))
    return tuple(found)
