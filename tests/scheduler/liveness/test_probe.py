"""Probing real sockets: answered, refused, silent, and what says nothing about the node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.rpc import resolving
from deeplink.scheduler.liveness.probe import TcpProber
from deeplink.scheduler.recovery.evidence import ProbeResult
from tests.waiting import LIMIT_S, until


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def full() -> Iterator[int]:
    """A port whose queue is full: the kernel drops what knocks, as a host that is gone does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(4):
            knock = socket.socket()
            knock.setblocking(False)
            knock.connect_ex(server.getsockname())
            waiting.append(knock)
        yield server.getsockname()[1]
        for knock in waiting:
            knock.close()


@dataclass
class Watching(ManualClock):
    """Counts, whenever time is asked for, the connections to a port that are under way."""

    port: int = 0
    most: int = 0

    @override
    def monotonic(self) -> float:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        begun = sum(words[2].endswith(f":{self.port:04X}") and words[3] == "02" for words in lines)  # SYN_SENT
        self.most = max(self.most, begun)
        return time.monotonic()


def test_all_are_asked_at_once_and_told_apart(listening: int, full: int, closed_port: int) -> None:
    targets = {NodeName(f"silent{number}"): ("127.0.0.1", full) for number in range(20)}
    targets |= {NodeName("up"): ("127.0.0.1", listening), NodeName("refuses"): ("localhost", closed_port)}
    clock = Watching(port=full)
    answers = TcpProber(clock).probe(targets, 0.3)
    assert clock.most >= 20, "no silent one is waited for before the next is asked"
    assert answers.pop(NodeName("up")) is ProbeResult.ANSWERS
    assert answers.pop(NodeName("refuses")) is ProbeResult.REFUSES
    assert set(answers.values()) == {ProbeResult.SILENT}


def test_a_name_that_does_not_resolve_says_nothing_about_the_node() -> None:
    name = NodeName("n1")
    assert TcpProber().probe({name: ("no-such-host.invalid", 1)}, 0.2) == {name: ProbeResult.UNKNOWN}


def test_nobody_to_probe() -> None:
    assert TcpProber().probe({}, 0.2) == {}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the name server says of every name, a list to be changed."""
    real, said = socket.getaddrinfo, list[str]()

    def look_up(host: str, port: int, *_: object, flags: int = 0, **__: object) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            return list(real(host, port, type=socket.SOCK_STREAM, flags=flags))
        return [found for one in said for found in real(one, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(resolving, "_names", resolving._Names())
    monkeypatch.setattr(resolving, "_WAIT_S", LIMIT_S)
    return said


def test_a_node_whose_address_moves_is_probed_where_it_is_now(listening: int, told: list[str]) -> None:
    clock, name = ManualClock(), NodeName("n1")
    prober = TcpProber(clock)
    told[:] = ["127.0.0.2"]
    assert prober.probe({name: ("n1.site", listening)}, 1.0) == {name: ProbeResult.REFUSES}
    told[:] = ["127.0.0.1"]
    clock.sleep(3600.0)
    assert prober.probe({name: ("n1.site", listening)}, 1.0) == {name: ProbeResult.ANSWERS}


@pytest.mark.parametrize("order", [["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"]])
def test_a_node_answers_where_any_of_its_addresses_does(
    listening: int, full: int, told: list[str], order: list[str]
) -> None:
    name = NodeName("n1")
    told[:] = order
    assert TcpProber().probe({name: ("n1.site", listening)}, 1.0) == {name: ProbeResult.ANSWERS}
    assert TcpProber().probe({name: ("n1.site", full)}, 0.1) == {name: ProbeResult.REFUSES}, "its kernel is there"


def test_a_name_server_that_hangs_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    answers, asked = threading.Event(), list[str]()

    def hanging(host: str, *_: object, flags: int, **__: object) -> list[object]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        asked.append(host)
        answers.wait(LIMIT_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(resolving, "_names", resolving._Names())
    monkeypatch.setattr(resolving, "_WAIT_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    prober, name = TcpProber(), NodeName("n1")
    targets = {name: ("slow.invalid", closed_port)}
    for _ in range(3):
        assert prober.probe(targets, 0.1) == {name: ProbeResult.UNKNOWN}
    assert asked == ["slow.invalid"]
    answers.set()
    until(lambda: prober.probe(targets, 0.1) == {name: ProbeResult.REFUSES})
