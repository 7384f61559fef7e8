"""What a run finds out once its agents are up."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from deeplink.core.clock import SystemClock
from deeplink.core.types import NodeName
from deeplink.rpc.resolving import InterfaceAddress, Route
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.event_log import EventLog
from deeplink.scheduler.launch.local_backend import LocalBackend
from deeplink.scheduler.launch.shared_network import SLURMS, SiteFabric, fabric_below, found_network
from deeplink.scheduler.topology.graph import Fabric

N0, N1 = NodeName("n0"), NodeName("n1")


def found(
    folder: Path, facts: dict[NodeName, NodeFacts], wanted: str = ""
) -> tuple[dict[NodeName, NodeFacts], list[dict[str, Any]]]:
    """Return the nodes as they are to be reached, and the events that were told."""
    chronicle = EventLog(folder, SystemClock(), [])
    try:
        nodes = found_network(facts, wanted, chronicle)
    finally:
        chronicle.close()
    events = folder / "events.jsonl"
    return nodes, [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []


def node(port: int, *networks: str) -> NodeFacts:
    """A node with an address in each of these networks, all of them this machine's loopback addresses."""
    links = tuple(
        InterfaceAddress(f"eth{n}", f"127.{net}.{port % 200}.1", f"127.{net}.0.0/16")
        for n, net in enumerate(networks)
    )
    routes = tuple(Route(link.network, link.interface) for link in links)
    return NodeFacts(node=f"n{port}", address=f"10.0.0.1:{port}", interface="eth9", links=links, routes=routes)


def test_the_first_network_that_answers_is_taken_and_told(tmp_path: Path) -> None:
    with socket.create_server(("127.2.7.1", 0)) as one, socket.create_server(("127.2.8.1", 0)) as other:
        facts, ports = {}, {}
        for name, server in ((N0, one), (N1, other)):
            ip, ports[name] = server.getsockname()
            links = (
                InterfaceAddress("eth0", ip.replace("127.2", "127.1"), "127.1.0.0/16", 100_000),
                InterfaceAddress("eth1", ip, "127.2.0.0/16", 1_000),
            )
            routes = tuple(Route(link.network, link.interface) for link in links)
            address = f"{links[0].ip}:{ports[name]}"
            facts[name] = NodeFacts(node=name, address=address, links=links, routes=routes)
        nodes, (event,) = found(tmp_path, facts)
    assert (nodes[N0].address, nodes[N0].interface) == (f"127.2.7.1:{ports[N0]}", "eth1")
    assert (nodes[N1].address, nodes[N1].interface) == (f"127.2.8.1:{ports[N1]}", "eth1")
    assert (event["event"], event["network"], event["interfaces"]) == ("network", "127.2.0.0/16", ["eth1"])
    assert event["speed_mbps"] == 1_000


def test_where_none_answers_it_is_slurms_own_and_what_was_asked_for_stands_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        facts = {N0: node(closed.getsockname()[1], "1", "2")}
        nodes, (event,) = found(tmp_path, facts)
        assert nodes[N0].address == facts[N0].address
        assert event["network"] == SLURMS
        with caplog.at_level(logging.WARNING):
            assert found(tmp_path, facts, "eth1")[0][N0].interface == "eth1"
        assert "not every node answers over eth1" in caplog.text
        with pytest.raises(LaunchError):
            found(tmp_path, facts, "ib0")


def test_a_lone_node_has_nobody_to_reach_and_keeps_slurms_address(tmp_path: Path) -> None:
    # Otherwise the bridge of its containers, which is as fast as its driver says.
    bridge = InterfaceAddress("docker0", "127.0.0.1", "127.0.0.0/16", 10_000)
    with socket.create_server(("0.0.0.0", 0)) as server:
        address = f"127.1.0.1:{server.getsockname()[1]}"
        facts = {N0: NodeFacts(node="n0", address=address, interface="eth0", links=(bridge,))}
        nodes, (event,) = found(tmp_path, facts)
        assert (nodes[N0].address, nodes[N0].interface) == (address, "eth0")
        assert (event["network"], event["interfaces"]) == (SLURMS, ["eth0"])
        assert found(tmp_path, facts, "docker0")[0][N0].interface == "docker0"


def test_agents_on_loopback_have_nothing_to_choose(tmp_path: Path) -> None:
    facts = {N0: NodeFacts(node="n0", address="127.0.0.1:4000", interface="lo")}
    assert found(tmp_path, facts, "ib0") == (facts, [])


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (SiteFabric("site", Fabric({N0: ("leaf",)})), "site lacks 1 node of the job (n1)"),
        (SiteFabric("site", Fabric({NodeName("m0"): ("leaf",)})), "site has none of the job's nodes"),
        (SiteFabric("site", Fabric({N0: ("leaf",), N1: ("leaf",)})), ""),
        (None, ""),
    ],
)
def test_a_description_that_lacks_nodes_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, site: SiteFabric | None, said: str
) -> None:
    backend = LocalBackend.on_this_machine(2, os.environ, tmp_path, tmp_path)
    with caplog.at_level(logging.WARNING):
        fabric_below(dict.fromkeys((N0, N1), ""), site, backend.fabric)
    assert said in caplog.text if said else not caplog.text
