"""Ports that are really opened and connected to, on loopback."""

from __future__ import annotations

import socket

import pytest

from deeplink.core.clock import SystemClock
from deeplink.scheduler.sitecheck.examine import peers_of
from deeplink.scheduler.sitecheck.part import connected, opened_ports, tried_peers, tried_services
from deeplink.scheduler.sitecheck.running_settings import RANK_PORTS

CLOCK = SystemClock()


def test_opened_ports_are_reached_and_closed_ones_are_not() -> None:
    with opened_ports("127.0.0.1") as listening:
        assert len(listening["agent"]) == 2
        assert len(listening["rank"]) == 4
        assert all(port in RANK_PORTS for port in listening["rank"])
        ports = (*listening["agent"], *listening["rank"])
        with opened_ports("127.0.0.1") as others:  # a second job's on this host takes the next ones
            assert not set(ports) & {*others["agent"], *others["rank"]}
        assert tried_peers({"n1": ("127.0.0.1", ports)}, CLOCK) == {"n1": {str(port): "" for port in ports}}
    assert set(tried_peers({"n1": ("127.0.0.1", ports)}, CLOCK)["n1"].values()) == {"Connection refused"}


def test_one_that_swallows_connections_is_given_up_in_time() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        target = full.getsockname()
        held = [socket.socket() for _ in range(8)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(target)
        assert connected([target], CLOCK, within_s=0.2) == ["no answer within 0.2 s"]
        for one in held:
            one.close()


def test_services_by_name_and_those_that_are_none() -> None:
    with opened_ports("127.0.0.1") as listening:
        good = f"localhost:{listening['agent'][0]}"
        found = tried_services([good, "no-such-host.invalid:1", "localhost", "localhost:1"], CLOCK)
    assert found[good] == ""
    assert "no host" in found["no-such-host.invalid:1"]
    assert "no host" in found["localhost"]
    assert found["localhost:1"] == "Connection refused"


@pytest.mark.parametrize("count", [1, 2, 5, 17, 18, 100])
def test_each_node_is_tried_by_as_many_as_it_tries(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    tried = [peer for node in nodes for peer in peers_of(node, nodes)]
    assert all(node not in peers_of(node, nodes) for node in nodes)
    assert len({tried.count(node) for node in nodes}) == 1
    assert len(peers_of("n0", nodes)) <= 16
