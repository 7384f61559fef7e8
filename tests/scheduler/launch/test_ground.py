"""What a run finds out once its agents are up."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deeplink.clock import SystemClock
from deeplink.links import Link, Route
from deeplink.scheduler.launch.chronicle import Chronicle
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.ground import found_network, on_fabric
from deeplink.scheduler.launch.local import LocalBackend
from deeplink.scheduler.launch.network import SLURMS, NoInterfaceError
from deeplink.scheduler.launch.order import Order
from deeplink.scheduler.launch.site import Site
from deeplink.scheduler.topology.graph import Fabric
from deeplink.types import NodeName

N0, N1 = NodeName("n0"), NodeName("n1")
ORDER = Order(command=("true",), per_node=1, count=2)


@pytest.fixture
def chronicle(tmp_path: Path) -> Iterator[Chronicle]:
    kept = Chronicle(tmp_path, SystemClock(), [], as_json=False)
    yield kept
    kept.close()


def told(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def node(port: int, *networks: str) -> NodeFacts:
    """A node with an address in each of these networks, all of them this machine's loopback addresses."""
    links = tuple(
        Link(f"eth{n}", f"127.{net}.{port % 200}.1", f"127.{net}.0.0/16") for n, net in enumerate(networks)
    )
    routes = tuple(Route(link.network, link.interface) for link in links)
    return NodeFacts(node=f"n{port}", address=f"10.0.0.1:{port}", interface="eth9", links=links, routes=routes)


def listening(stack: list[socket.socket], host: str) -> int:
    server = socket.create_server((host, 0))
    stack.append(server)
    return int(server.getsockname()[1])


def test_the_first_network_that_answers_is_taken_and_told(tmp_path: Path, chronicle: Chronicle) -> None:
    servers: list[socket.socket] = []
    try:
        port = listening(servers, "127.2.7.1")
        links = (
            Link("eth0", "127.1.7.1", "127.1.0.0/16", 100_000),
            Link("eth1", "127.2.7.1", "127.2.0.0/16", 1_000),
        )
        routes = tuple(Route(link.network, link.interface) for link in links)
        facts = {N0: NodeFacts(node="n0", address=f"127.1.7.1:{port}", links=links, routes=routes)}
        found = found_network(facts, "", chronicle)
        assert (found[N0].address, found[N0].interface) == (f"127.2.7.1:{port}", "eth1")
        assert told.events == [
            ("network", {"network": "127.2.0.0/16", "interfaces": ["eth1"], "speed_mbps": 1_000})
        ]
    finally:
        for server in servers:
            server.close()


def test_where_none_answers_it_is_slurms_own_and_what_was_asked_for_stands_with_a_warning(
    tmp_path: Path, chronicle: Chronicle, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        facts = {N0: node(closed.getsockname()[1], "1", "2")}
        assert found_network(facts, "", chronicle)[N0].address == facts[N0].address
        assert told(tmp_path)[0]["network"] == SLURMS
        with caplog.at_level(logging.WARNING):
            assert found_network(facts, "eth1", chronicle)[N0].interface == "eth1"
        assert "not every node answers over eth1" in caplog.text
        with pytest.raises(NoInterfaceError):
            found_network(facts, "ib0", chronicle)


def test_agents_on_loopback_have_nothing_to_choose(tmp_path: Path, chronicle: Chronicle) -> None:
    facts = {N0: NodeFacts(node="n0", address="127.0.0.1:4000", interface="lo")}
    assert found_network(facts, "ib0", chronicle) == facts
    assert told(tmp_path) == []


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (Site("site", Fabric({N0: ("leaf",)})), "site lacks 1 node of the job (n1)"),
        (Site("site", Fabric({NodeName("m0"): ("leaf",)})), "site has none of the job's nodes"),
        (Site("site", Fabric({N0: ("leaf",), N1: ("leaf",)})), ""),
        (None, ""),
    ],
)
def test_a_description_that_lacks_nodes_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, site: Site | None, said: str
) -> None:
    backend = LocalBackend.on_this_machine(2, os.environ, tmp_path, tmp_path)
    with caplog.at_level(logging.WARNING):
        found = on_fabric(ORDER, backend, site, dict.fromkeys((N0, N1), ""))
    assert found.fabric is not None
    assert said in caplog.text if said else not caplog.text
