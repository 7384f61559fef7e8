"""Which nodes' network is broken, told by pairs that cannot exchange bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import SystemClock
from deeplink.core.types import NodeName
from deeplink.rpc.channel import open_channel
from deeplink.rpc.grpc_server import bound_server
from deeplink.scheduler.launch.hang_attribution import Blame, NeighbourTest, Pair, found, ring
from deeplink.scheduler.node.servicer import NodeServicer, add_to
from deeplink.v1 import node_pb2, node_pb2_grpc
from tests.waiting import LIMIT_S, until


def names(count: int, first: int = 0) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(first, first + count)]


def talk_of(cut: Collection[NodeName]) -> Any:
    return lambda pairs: {pair: not set(pair) & set(cut) for pair in pairs}


@given(st.integers(2, 9), st.integers(0, 2), st.data())
def test_the_nodes_that_are_cut_off_are_named_and_no_others(count: int, spares: int, data: st.DataObject) -> None:
    nodes = names(count)
    cut = data.draw(st.sets(st.sampled_from(nodes), min_size=1, max_size=count))
    told = found(nodes, names(spares, first=count), talk_of(cut))
    assert told.why
    is_witness_left = spares or any(not set(pair) & cut for pair in ring(nodes))
    assert set(told.nodes) == (cut if is_witness_left and len(cut) < count else set())


@given(st.integers(2, 9), st.booleans())
def test_a_pair_that_can_in_the_second_round_was_only_slow(count: int, is_known: bool) -> None:
    nodes, rounds = names(count), iter([False, True])

    def talk(pairs: Collection[Pair]) -> dict[Pair, bool]:
        works = next(rounds)
        return dict.fromkeys(pairs, works) if is_known or not works else {}

    assert found(nodes, [], talk) == Blame()


@given(st.integers(3, 9), st.data())
def test_one_broken_cable_is_told_and_no_node_is_blamed(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    one, other = data.draw(st.sampled_from(ring(nodes)))
    told = found(nodes, [], lambda pairs: {pair: set(pair) != {one, other} for pair in pairs})
    assert told.nodes == ()
    assert f"{one} and {other}" in told.why


def test_a_spare_whose_own_network_is_broken_blames_nobody() -> None:
    nodes, spare = names(2), NodeName("n9")
    told = found(nodes, [spare], talk_of({nodes[0], spare}))
    assert told == Blame(why="no bytes pass between n0 and n1 on the ranks' network")


def _served(servicer: NodeServicer, server: grpc.Server) -> list[str]:
    return [add_to(server, servicer)]


@pytest.fixture
def stubs() -> Iterator[dict[NodeName, Any]]:
    """Agents of four nodes, each at an address of its own of this machine."""
    made = {}
    with ExitStack() as stack:
        for node in names(4):
            servicer = NodeServicer(node, "", node_pb2.StoreStatus)
            bound = bound_server("127.0.0.1:0", "secret", partial(_served, servicer))
            bound.server.start()
            stack.callback(bound.server.stop, None)
            channel = stack.enter_context(open_channel(f"127.0.0.1:{bound.port}", "secret"))
            made[node] = node_pb2_grpc.NodeStub(channel)
        yield made


def answered(test: NeighbourTest) -> Blame:
    test.start()
    until(lambda: test.answer is not None, LIMIT_S)
    assert test.answer is not None
    return test.answer


def test_agents_exchange_bytes_and_the_one_that_is_cut_off_is_found(stubs: dict[NodeName, Any]) -> None:
    nodes = names(3)
    hosts = {node: f"127.0.0.{number + 11}" for number, node in enumerate(names(4))}
    test = NeighbourTest(nodes, hosts, lambda _: stubs, SystemClock())
    test.learn()
    until(lambda: test.are_ports_open, LIMIT_S)
    assert answered(test) == Blame()
    hosts[nodes[1]] = "127.0.0.99"  # it listens where the others do not come to

    class Deaf:
        class TestPeers:
            @staticmethod
            def future(request: node_pb2.TestPeersRequest, timeout: float) -> Any:
                request = node_pb2.TestPeersRequest(
                    listen_on=request.listen_on and "127.0.0.98",
                    peers=[peer.replace("127.0.0.", "127.1.0.") for peer in request.peers],
                    for_s=request.for_s,
                )
                return real.TestPeers.future(request, timeout=timeout)

    real, stubs[nodes[1]] = stubs[nodes[1]], Deaf
    told = answered(test)
    assert told.nodes == (nodes[1],)


def test_agents_that_are_too_old_or_gone_tell_nothing(stubs: dict[NodeName, Any]) -> None:
    nodes = names(3)
    hosts = dict.fromkeys(names(4), "127.0.0.1")
    hosts[nodes[1]] = "203.0.113.1"  # no address of its own: it cannot listen there
    gone = {node: stub for node, stub in stubs.items() if node != nodes[2]}
    assert answered(NeighbourTest(nodes, hosts, lambda _: gone, SystemClock(), are_ports_open=True)) == Blame()


def test_where_the_ports_were_never_open_nothing_is_broken(stubs: dict[NodeName, Any]) -> None:
    hosts = dict(zip(names(3), ("127.0.0.1", "203.0.113.1", "127.0.0.1"), strict=True))
    test = NeighbourTest(names(3), hosts, lambda _: stubs, SystemClock())
    test.learn()
    until(lambda: not test.is_under_way, LIMIT_S)
    assert not test.are_ports_open
    assert answered(test) == Blame()
