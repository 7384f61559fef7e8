"""Which node's network is broken, when ranks hang: neighbours in the ring exchange bytes as ranks do.

First each pair of neighbours, all at once. Where some are broken, somebody who reached a neighbour, or a spare, is
the witness: those of the pairs that do not exchange bytes with the witness either are to blame. Two rounds, each
of which takes `ROUND_S` at most. Nothing counts as broken in a job no pair of which could while the ranks made
progress: a site may let through nothing but what its ranks need.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.core.text import listed
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName

log = logging.getLogger(__name__)

ROUND_S = 2.0
LISTEN_S, TRY_S = 0.7, 1.0  # of it: for agents to listen, and for the bytes, which on a fabric take a millisecond
AGAIN_S = 60.0  # after a round in which the first pair could not, while ranks make progress

Pair = tuple["NodeName", "NodeName"]  # the first one connects to the second one


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenNetwork:
    """What the rounds found."""

    why: str = ""  # for people; empty while no pair is broken
    nodes: tuple[NodeName, ...] = ()  # those to blame, where it can be told


def ring(nodes: Sequence[NodeName]) -> tuple[Pair, ...]:
    """Return the pairs of neighbours, each once.

    >>> ring("abc"), ring("ab"), ring("a")
    ((('a', 'b'), ('b', 'c'), ('c', 'a')), (('a', 'b'),), ())
    """
    pairs = zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
    return tuple(pairs)[: len(nodes) if len(nodes) > 2 else len(nodes) - 1]  # noqa: PLR2004 - two are one pair


def found(
    nodes: Sequence[NodeName],
    spares: Sequence[NodeName],
    talk: Callable[[Collection[Pair]], Mapping[Pair, bool]],  # asks pairs; those that cannot tell are missing
) -> BrokenNetwork:
    """Return what is broken among the nodes; each of the two rounds is one call of `talk`."""
    first = talk(ring(nodes))
    broken = [pair for pair, reached in first.items() if not reached]
    if not broken:
        return BrokenNetwork()
    doubted = tuple(dict.fromkeys(node for pair in broken for node in pair))
    witnesses = [*(node for pair, reached in first.items() if reached for node in pair), *spares]
    witnesses.sort(key=doubted.__contains__)
    asked = [(witness, node) for witness in witnesses[:1] for node in doubted if node != witness]
    second = talk([*broken, *asked])
    broken = [pair for pair in broken if second.get(pair) is False]
    if not broken:
        return BrokenNetwork()
    cut = tuple(node for witness, node in asked if second.get((witness, node)) is False)
    if len(cut) == len(asked) > 1:  # it is the witness, or all of the network
        cut = ()
    pairs = listed([f"{one} and {other}" for one, other in broken])
    why = f"no bytes pass between {pairs} on the ranks' network"
    return BrokenNetwork(why=f"{why}: {listed(cut)} is cut off" if cut else why, nodes=cut)


class NeighbourTest:
    """Has the agents of one launch exchange bytes, in a thread; the supervising thread asks how it went."""

    def __init__(
        self,
        nodes: Sequence[NodeName],  # in the order of the ring
        hosts: Mapping[NodeName, str],  # the address of each, and of spares besides
        stubs: Callable[[Iterable[NodeName]], Mapping[NodeName, Any]],  # what calls their agents
        clock: Clock,
        *,
        are_ports_open: bool = False,
    ) -> None:
        self._nodes, self._hosts, self._ask_for_stubs, self._clock = nodes, hosts, stubs, clock
        self.are_ports_open = are_ports_open  # whether a pair of this job's exchanged bytes while all was well
        self._stubs: Mapping[NodeName, Any] = {}
        self._thread: threading.Thread | None = None
        self._learned_at = float("-inf")
        self.answer: BrokenNetwork | None = None  # of the newest test; None while it is under way

    @property
    def is_under_way(self) -> bool:
        """Whether a test runs: it takes two rounds at most."""
        return self._thread is not None and self._thread.is_alive()

    def learn(self) -> None:
        """Find out whether the first pair can, while all is well; asked all the while, rarely. Does not wait."""
        # Not of all pairs: of many agents the launcher calls a few.
        now = self._clock.monotonic()
        if not self.are_ports_open and now - self._learned_at >= AGAIN_S and not self.is_under_way:
            self._learned_at = now
            self._start(self._learn, self._nodes[:2])

    def start(self) -> None:
        """Find out what is broken; `answer` says it. Does not wait."""
        self.answer = None if self.are_ports_open else BrokenNetwork()
        if self.are_ports_open:
            self._start(self._test, self._hosts)

    def _start(self, target: Callable[[], None], nodes: Iterable[NodeName]) -> None:
        self._stubs = self._ask_for_stubs(nodes)  # here: its owner is the supervising thread
        self._thread = threading.Thread(target=target, name="deeplink-ring-test", daemon=True)
        self._thread.start()

    def _learn(self) -> None:
        self.are_ports_open = any(self._talk(ring(self._nodes)[:1]).values())

    def _test(self) -> None:
        answer = BrokenNetwork()
        try:
            answer = found(self._nodes, [*(self._hosts.keys() - {*self._nodes})], self._talk)
        finally:
            self.answer = answer

    def _talk(self, pairs: Collection[Pair]) -> dict[Pair, bool]:
        """Have each pair exchange bytes, all at once; a pair one of whose agents does not answer is missing."""
        deadline = self._clock.monotonic() + ROUND_S
        listeners = {
            node: self._ask(node, LISTEN_S, listen_on=self._hosts[node], for_s=ROUND_S)
            for node in {other for _, other in pairs} & self._stubs.keys()
        }
        ports = {node: reply.port for node, reply in _replies(listeners).items()}
        peers = {pair: f"{self._hosts[pair[1]]}:{ports[pair[1]]}" for pair in pairs if pair[1] in ports}
        left_s = deadline - self._clock.monotonic()
        calls = {
            node: self._ask(node, left_s, peers=[peers[pair] for pair in peers if pair[0] == node], for_s=TRY_S)
            for node in {one for one, _ in peers} & self._stubs.keys()
        }
        replies = _replies(calls)
        return {pair: peers[pair] in replies[pair[0]].reached for pair in peers if pair[0] in replies}

    def _ask(self, node: NodeName, timeout_s: float, **question: Any) -> Any:
        try:
            return self._stubs[node].TestPeers.future(node_pb2.TestPeersRequest(**question), timeout=timeout_s)
        except ValueError:  # the connection was closed meanwhile
            return None


def _replies(calls: Mapping[NodeName, Any]) -> dict[NodeName, node_pb2.TestPeersReply]:
    replies = {}
    for node, call in calls.items():
        try:
            if call is not None:
                replies[node] = call.result()
        except grpc.RpcError as problem:
            log.info("%s cannot exchange bytes with its neighbours now: %s", node, problem)
    return replies
