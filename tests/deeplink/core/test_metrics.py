"""The operators' guide lists every metric there is, by the name that Prometheus sees."""

from __future__ import annotations

import re
import socket
import urllib.request
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from deeplink.core import metrics
from tests.processes import free_ports
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

GUIDE = Path(__file__).parents[3] / "docs" / "operator.md"
_BEHIND = {"counter": "_total", "info": "_info"}


def served(registry: CollectorRegistry) -> Iterator[str]:
    for family in registry.collect():
        if family.name.startswith("deeplink_"):
            yield family.name + _BEHIND.get(family.type, "")


def test_the_guide_lists_every_metric_and_no_other() -> None:
    of_watch = metrics.WatchMetrics(CollectorRegistry()).registry
    listed = re.findall(r"^\| `(deeplink_\w+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted([*served(REGISTRY), *served(of_watch)])


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def test_metrics_are_served_beside_hundreds_of_half_requests() -> None:
    port = free_ports(1)[0]
    stop = metrics.serve_metrics(f"127.0.0.1:{port}", metrics.WatchMetrics(CollectorRegistry()).registry)
    try:
        with ExitStack() as stack:
            held = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
                for _ in range(300)
            ]
            for one in held:
                with suppress(OSError):  # cut off already
                    one.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
            assert "deeplink_watch_leading" in scraped(port)
            assert sum(not is_closed(one) for one in held) <= 64
    finally:
        stop()


def test_who_does_not_end_a_request_is_cut_off_whatever_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PROOF_S", 0.5)
    port = free_ports(1)[0]
    stop = metrics.serve_metrics(f"127.0.0.1:{port}", CollectorRegistry())
    try:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")

            def is_over() -> bool:
                try:
                    slow.sendall(b"X")
                except OSError:
                    return True
                return is_closed(slow)

            until(is_over)
    finally:
        stop()


def test_serving_metrics_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda _name="": pytest.fail("a name server was asked"))
    metrics.serve_metrics(f"127.0.0.1:{free_ports(1)[0]}", CollectorRegistry())()


def is_closed(peer: socket.socket) -> bool:
    peer.settimeout(0.02)
    try:
        return not peer.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True
