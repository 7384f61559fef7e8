"""Asks the agents of a leaf for their status, in the launcher's place, with the token it came with."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.rpc.channel import agent_channel
from deeplink.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName

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
