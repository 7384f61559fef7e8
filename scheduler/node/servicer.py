"""The node agent's service: ranks report their progress to it, the launcher asks it how the node is.

`Bulletin` holds the reports and decides who is fenced (no wire, no clock); `NodeServicer` is its gRPC face. For a
launcher of many nodes it asks the other agents of its leaf, with the token that the question came with.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from deeplink.core import process_metrics
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.metrics import NODE_HEARTBEATS, NODE_REPORTS
from deeplink.rpc.channel import agent_channel, attempt_from_wire, attempt_to_wire
from deeplink.rpc.tokens import TOKEN_HEADER
from deeplink.scheduler.node import peer_test
from deeplink.scheduler.node.rank_processes import Reported
from deeplink.v1 import common_pb2, node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.node.rank_slots import RankSlots

MOST_GATHERED = 64
"""Agents that one asks."""
WAIT_S = 0.3
"""A reply waits for answers so long: those of agents that are slower are in a later one."""
ANSWER_S = 3.0
_MOST_IN_FLIGHT = 6


@dataclass(eq=False)
class _Asked:
    """An agent that is asked, and what it was asked and has not answered: the question's number, and the call."""

    node: str
    channel: grpc.Channel
    pending: list[tuple[int, Any]] = field(default_factory=list)

    def ask(self, number: int, request: node_pb2.StatusRequest) -> None:
        if len(self.pending) < _MOST_IN_FLIGHT:
            stub: Any = node_pb2_grpc.NodeStub(self.channel)
            self.pending.append((number, stub.Status.future(request, timeout=ANSWER_S)))

    def taken(self) -> Iterable[node_pb2.GatheredStatus]:
        """Return what has come, once."""
        done = [one for one in self.pending if one[1].done()]
        self.pending = [one for one in self.pending if one not in done]
        for number, call in done:
            is_answer = not call.cancelled() and call.exception() is None
            yield node_pb2.GatheredStatus(
                node=self.node, number=number, status=call.result() if is_answer else None
            )


def _question(request: node_pb2.GatherRequest, one: node_pb2.GatheredAgent) -> node_pb2.StatusRequest:
    question = node_pb2.StatusRequest()
    question.CopyFrom(request.status)
    question.after_report = one.after_report
    return question


class StatusGatherer:
    """Keeps connections to the agents it was last told to ask. Safe to use from several threads."""

    def __init__(
        self, node: NodeName, own: Callable[[node_pb2.StatusRequest], node_pb2.StatusReply], clock: Clock
    ) -> None:
        self._node, self._own, self._clock = node, own, clock
        self._lock = threading.Lock()
        self._token = ""
        self._agents: dict[tuple[str, str], _Asked] = {}

    def gather(self, request: node_pb2.GatherRequest, token: str) -> node_pb2.GatherReply:
        """Ask all that are named, with `token`; return what they answer, and late answers to earlier questions."""
        answers = []
        with self._lock:
            self._token = token
            self._keep([(one.node, one.address) for one in request.agents if one.node != self._node])
            for one in request.agents:
                if one.node != self._node:
                    self._agents[one.node, one.address].ask(request.number, _question(request, one))
            waiting = [call for agent in self._agents.values() for _, call in agent.pending]
        deadline = self._clock.monotonic() + WAIT_S
        for one in request.agents:
            if one.node == self._node:
                own = self._own(_question(request, one))
                answers.append(node_pb2.GatheredStatus(node=one.node, number=request.number, status=own))
        for call in waiting:
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(max(0.0, deadline - self._clock.monotonic()))
        with self._lock:
            answers += [answer for agent in self._agents.values() for answer in agent.taken()]
        return node_pb2.GatherReply(answers=answers)

    def _keep(self, wanted: list[tuple[str, str]]) -> None:
        for key in self._agents.keys() - set(wanted):
            self._agents.pop(key).channel.close()
        for node, address in wanted:
            if (node, address) not in self._agents:
                self._agents[node, address] = _Asked(node, agent_channel(address, lambda: self._token))

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            self._keep([])


REPORT = "/deeplink.v1.Node/Report"
KEPT_REPORTS = 1024  # progress records kept; older ones give way. 8 ranks at 3 reports/s: the last 40 s.
KEPT_JOBS = 256  # jobs whose newest attempt is remembered; a standing agent forgets the job heard of longest ago
MOST_METRICS = 96
_MOST_SAVES = 16
LONGEST_NAME = 128
STACKS_S = 10.0  # the longest an agent looks for the stacks of its ranks


@dataclass(frozen=True, slots=True)
class BulletinPage:
    """What `Bulletin.since` returns: the newest sequence number, and the records after the one asked for."""

    last: int
    records: tuple[common_pb2.Progress, ...]


class Bulletin:
    """The newest progress of this node's ranks, and the newest attempt of each job. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: deque[tuple[int, common_pb2.Progress]] = deque(maxlen=KEPT_REPORTS)
        self._last = 0
        self._newest: OrderedDict[int, Attempt] = OrderedDict()
        self._said: dict[int, dict[int, Reported]] = {}  # by job: its newest attempt's ranks

    def learn(self, attempt: Attempt) -> Attempt:
        """Take note that `attempt` has begun; return the newest attempt of its job."""
        with self._lock:
            return self._learn(attempt)

    def _learn(self, attempt: Attempt) -> Attempt:
        before = self._newest.get(attempt.job)
        newest = max(attempt, before or attempt)
        self._newest[attempt.job] = newest
        self._newest.move_to_end(attempt.job)
        if newest != before:
            self._said[attempt.job] = {}
        if len(self._newest) > KEPT_JOBS:
            self._said.pop(self._newest.popitem(last=False)[0])
        return newest

    def newest(self, job: int) -> Attempt | None:
        """Return the newest attempt of a job; None where none is known."""
        with self._lock:
            return self._newest.get(job)

    def report(self, progress: common_pb2.Progress) -> Attempt:
        """Keep a rank's progress, unless a newer attempt of its job has begun; return the newest attempt."""
        attempt = attempt_from_wire(progress.attempt)
        with self._lock:
            newest = self._learn(attempt)
            if newest == attempt:
                self._last += 1
                self._records.append((self._last, _passed_on(progress)))
                ranks = self._said[attempt.job]
                if progress.rank in ranks or len(ranks) < KEPT_REPORTS:
                    ranks[progress.rank] = Reported(pid=progress.pid, unix=progress.unix)
            return newest

    def reported(self, attempt: Attempt) -> dict[int, Reported]:
        """Return what each rank of an attempt said of itself last; nothing where a newer one has begun."""
        with self._lock:
            is_newest = self._newest.get(attempt.job) == attempt
            return dict(self._said[attempt.job]) if is_newest else {}

    def since(self, after: int, job: int | None = None) -> BulletinPage:
        """Return the records with a sequence number greater than `after`, in order of arrival.

        A number greater than any given out comes from before this agent's start: then all records are returned.
        """
        with self._lock:
            after = 0 if after > self._last else after
            records = tuple(
                record
                for number, record in self._records
                if number > after and (job is None or record.attempt.job == job)
            )
            return BulletinPage(self._last, records)


def _passed_on(progress: common_pb2.Progress) -> common_pb2.Progress:
    """Return a report as launchers get it: all of the first rank's, of the others' our counters that are used."""
    if not progress.rank:
        return progress
    made = common_pb2.Progress()
    made.CopyFrom(progress)
    for name in progress.metrics:
        if name.startswith(process_metrics.PREFIX) and name not in process_metrics.OF_EVERY_RANK:
            del made.metrics[name]
    return made


def _too_much(progress: common_pb2.Progress) -> str:
    if len(progress.metrics) > MOST_METRICS:
        return f"{len(progress.metrics)} metrics"
    if any(len(name) > LONGEST_NAME for name in progress.metrics):
        return f"a metric's name is over {LONGEST_NAME} characters"
    return f"its section's name is over {LONGEST_NAME} characters" if len(progress.section) > LONGEST_NAME else ""


class NodeServicer(node_pb2_grpc.NodeServicer):
    """Answers ranks (`Report`) and launchers (the others); `stacks` is `Stacks.__call__`."""

    def __init__(
        self,
        node: NodeName,
        topology_address: str,
        store_status: Callable[[], node_pb2.StoreStatus],
        *,
        clock: Clock | None = None,
        told_members: Callable[[str], None] = lambda _members: None,
        health: Callable[[], Iterable[common_pb2.Finding]] = tuple,
        stacks: Callable[..., Iterable[node_pb2.RankStack]] | None = None,
        boot_id: str = "",
        slots: RankSlots | None = None,
    ) -> None:
        self.bulletin = Bulletin()
        self._save_at: dict[Attempt, int] = {}
        self._health, self._stacks, self._boot_id, self._slots = health, stacks, boot_id, slots
        self._node, self._topology_address = node, topology_address
        self._store_status, self._told_members = store_status, told_members
        self._clock = clock or SystemClock()
        self._gatherer = StatusGatherer(node, self._status, self._clock)
        self._began = self._asked_at = self._clock.monotonic()
        self._term, self._term_lock = 0, threading.Lock()  # the newest of a launcher
        self._kept_term = 0  # of the last one that had output kept: slots that come later have an srun

    def unasked_s(self) -> float:
        """Return for how long no launcher has asked for the status."""
        return self._clock.monotonic() - self._asked_at

    @override
    def Report(self, request: node_pb2.ReportRequest, context: grpc.ServicerContext) -> node_pb2.ReportReply:
        """Keep a rank's progress and tell whether it is fenced."""
        if not request.HasField("progress"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the report holds no progress")
        if too_much := _too_much(request.progress):
            NODE_REPORTS.labels("refused").inc()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"report refused: {too_much}")
        newest = self.bulletin.report(request.progress)
        attempt = attempt_from_wire(request.progress.attempt)
        fenced = newest > attempt
        NODE_REPORTS.labels("fenced" if fenced else "kept").inc()
        save_at = self._save_at.get(attempt, 0)
        return node_pb2.ReportReply(fenced=fenced, newest=attempt_to_wire(newest), save_at=save_at)

    @override
    def Status(self, request: node_pb2.StatusRequest, context: grpc.ServicerContext) -> node_pb2.StatusReply:
        """Answer the heartbeat; older attempts of the caller's job are fenced from now on."""
        return self._status(request)

    def _status(self, request: node_pb2.StatusRequest) -> node_pb2.StatusReply:
        NODE_HEARTBEATS.inc()
        job = newest = None
        unasked_s = self.unasked_s()
        if request.HasField("attempt") and self._is_of_now(request.term):
            self._asked_at = self._clock.monotonic()
            if request.output_gone and request.term > self._kept_term and self._slots is not None:
                self._kept_term = request.term
                self._slots.keep_output()
            newest = self.bulletin.learn(attempt_from_wire(request.attempt))
            job = newest.job
            if self._slots is not None:
                self._slots.fence(newest, over=request.over)
            self._note_save(attempt_from_wire(request.attempt), request.save_at)
            if request.members:
                self._told_members(request.members)
        heard = self.bulletin.since(request.after_report, job)
        return node_pb2.StatusReply(
            node=self._node,
            topology_address=self._topology_address,
            uptime_s=self._clock.monotonic() - self._began,
            last_report=heard.last,
            progress=heard.records,
            store=self._store_status(),
            newest=None if newest is None else attempt_to_wire(newest),
            health=self._health(),
            boot_id=self._boot_id,
            unix=self._clock.unix(),
            term=self._term,
            unasked_s=unasked_s,
        )

    @override
    def Gather(self, request: node_pb2.GatherRequest, context: grpc.ServicerContext) -> node_pb2.GatherReply:
        """Ask the agents that are named, and say what they answer within `WAIT_S`."""
        if len(request.agents) > MOST_GATHERED:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"more than {MOST_GATHERED} agents are to be asked")
        token = dict(context.invocation_metadata()).get(TOKEN_HEADER, "")
        return self._gatherer.gather(request, str(token))

    @override
    def Ranks(self, request: node_pb2.RanksRequest, context: grpc.ServicerContext) -> node_pb2.RanksReply:
        """Have this node's slots run an attempt's ranks, or end them; say what has become of them."""
        if self._slots is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "only an agent of a job has ranks started")
        if not self._is_of_now(request.term):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another launcher has taken the role")
        self.bulletin.learn(attempt_from_wire(request.attempt))
        return self._slots.ranks(request)

    def _is_of_now(self, term: int) -> bool:
        """Whether a launcher of this term has the role, as far as is known; from now on no older one has."""
        with self._term_lock:
            self._term = max(term, self._term)
            return term == self._term

    def close(self) -> None:
        """Close what is open to other agents."""
        self._gatherer.close()

    def _note_save(self, attempt: Attempt, save_at: int) -> None:
        """Remember at which step an attempt's ranks are to save; of few attempts, the newest ones."""
        if save_at:
            kept = {**self._save_at, attempt: save_at}
            self._save_at = dict(list(kept.items())[-_MOST_SAVES:])

    @override
    def Stacks(self, request: node_pb2.StacksRequest, context: grpc.ServicerContext) -> node_pb2.StacksReply:
        """Say where an attempt's ranks on this node are, with what there is within the time given."""
        if not request.HasField("attempt"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the question names no attempt")
        deadline_s = min(request.deadline_s or STACKS_S, STACKS_S)
        attempt = attempt_from_wire(request.attempt)
        reported = self.bulletin.reported(attempt)
        found = (
            self._stacks(attempt, reported, deadline_s, states_only=request.states_only) if self._stacks else ()
        )
        return node_pb2.StacksReply(node=self._node, ranks=found)

    @override
    def TestPeers(
        self, request: node_pb2.TestPeersRequest, context: grpc.ServicerContext
    ) -> node_pb2.TestPeersReply:
        """Listen for other agents, or say with which of them bytes go both ways."""
        if len(request.peers) > peer_test.MOST_PEERS:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"more than {peer_test.MOST_PEERS} peers are named")
        port = 0
        if request.listen_on:
            try:
                port = peer_test.listen(request.listen_on, request.for_s)
            except OSError as problem:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.listen_on}: {problem}")
        return node_pb2.TestPeersReply(port=port, reached=peer_test.reached(request.peers, request.for_s))


def add_to(server: grpc.Server, servicer: NodeServicer) -> str:
    """Serve the Node service on `server`; return its full name, for health and reflection."""
    node_pb2_grpc.add_NodeServicer_to_server(servicer, server)
    return node_pb2.DESCRIPTOR.services_by_name["Node"].full_name
