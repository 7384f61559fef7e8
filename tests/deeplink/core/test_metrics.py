"""Each daemon exports its own metrics and no other's; they are served within bounds, to who shows the token."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from deeplink.core import metrics, metrics_server
from tests.processes import free_ports
from tests.waiting import LIMIT_S, until

_BEHIND = {"counter": "_total", "info": "_info"}


def served(registry: CollectorRegistry) -> set[str]:
    return {
        family.name + _BEHIND.get(family.type, "")
        for family in registry.collect()
        if family.name.startswith("deeplink_")
    }


def test_each_daemon_exports_what_its_table_says_and_nothing_of_another() -> None:
    watch = metrics.WatchMetrics(CollectorRegistry())
    tables = {
        "node agent": (metrics.AGENT.rows, served(metrics.AGENT.registry)),
        "watchdog": (watch.rows, served(watch.registry)),
        "console": (metrics.CONSOLE.rows, served(metrics.CONSOLE.registry)),
    }
    for daemon, (rows, found) in tables.items():
        names = {row.name for row in rows}
        assert len(names) == len(rows), daemon
        assert found <= names, daemon
        of_jobs = {name for name in names if name.startswith(("deeplink_job_", "deeplink_console_jobs"))}
        assert names - of_jobs <= found, daemon  # those are there when there are jobs
    owned = [row.name for rows, _ in tables.values() for row in rows]
    assert len(owned) == len(set(owned))
    assert not [family for family in REGISTRY.collect() if family.name.startswith("deeplink_")]


def test_each_daemon_exports_its_own_process() -> None:
    for registry in (metrics.AGENT.registry, metrics.CONSOLE.registry):
        assert registry.get_sample_value("process_resident_memory_bytes")


def scraped(port: int, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310 - of ours
        return str(answer.read().decode())


def test_metrics_are_served_beside_hundreds_of_half_requests() -> None:
    port = free_ports(1)[0]
    stop = metrics_server.serve_metrics(f"127.0.0.1:{port}", metrics.WatchMetrics(CollectorRegistry()).registry)
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
    monkeypatch.setattr(metrics_server, "PROOF_S", 0.5)
    port = free_ports(1)[0]
    stop = metrics_server.serve_metrics(f"127.0.0.1:{port}", CollectorRegistry())
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
    metrics_server.serve_metrics(f"127.0.0.1:{free_ports(1)[0]}", CollectorRegistry())()


def test_with_a_token_only_who_shows_it_is_answered() -> None:
    port = free_ports(1)[0]
    stop = metrics_server.serve_metrics(f"127.0.0.1:{port}", metrics.AGENT.registry, "right")
    try:
        assert "deeplink_store_shards" in scraped(port, "right")
        for wrong in ("", "wrong", "rightt", "r\xefght"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scraped(port, wrong)
            assert refused.value.code == 401
            refused.value.close()
    finally:
        stop()


def is_closed(peer: socket.socket) -> bool:
    peer.settimeout(0.02)
    try:
        return not peer.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True
