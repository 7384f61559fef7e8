"""Probing real sockets: answered, refused, silent, and what says nothing about the node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from deeplink.scheduler.watch import probe
from deeplink.scheduler.watch.evidence import Answer
from deeplink.scheduler.watch.probe import TcpProber
from deeplink.types import NodeName


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


def free_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


def test_all_are_asked_at_once_and_told_apart(listening: int, full: int) -> None:
    targets = {NodeName(f"silent{number}"): ("127.0.0.1", full) for number in range(20)}
    targets |= {NodeName("up"): ("127.0.0.1", listening), NodeName("refuses"): ("localhost", free_port())}
    began = time.monotonic()
    answers = TcpProber().probe(targets, 0.3)
    assert time.monotonic() - began < 3.0, "twenty silent ones take no longer than one"
    assert answers.pop(NodeName("up")) is Answer.ANSWERS
    assert answers.pop(NodeName("refuses")) is Answer.REFUSES
    assert set(answers.values()) == {Answer.SILENT}


def test_a_name_that_does_not_resolve_says_nothing_about_the_node() -> None:
    name = NodeName("n1")
    assert TcpProber().probe({name: ("no-such-host.invalid", 1)}, 0.2) == {name: Answer.UNKNOWN}


def test_nobody_to_probe() -> None:
    assert TcpProber().probe({}, 0.2) == {}


def test_a_name_server_that_hangs_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), list[str]()

    def hanging(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        answers.wait(30)
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(probe, "RESOLVE_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    prober, name = TcpProber(), NodeName("n1")
    targets = {name: ("slow.invalid", free_port())}
    for _ in range(3):
        assert prober.probe(targets, 0.1) == {name: Answer.UNKNOWN}
    assert asked == ["slow.invalid"]
    answers.set()
    end = time.monotonic() + 10
    while prober.probe(targets, 0.1) != {name: Answer.REFUSES}:
        assert time.monotonic() < end
