"""Polls of many agents: of each leaf one is asked for all that are there.

A node that is missing in its leaf's replies is asked by the launcher itself from then on, for a while. Where no
reply comes, another agent of the leaf is asked. So what becomes of a node is told as soon as if all were asked.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.agent_monitor import ANSWER_S, MOST_IN_FLIGHT, POLL_S
from deeplink.scheduler.node.servicer import MOST_GATHERED
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.launch.agent_monitor import AgentMonitor
    from deeplink.v1 import common_pb2

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
