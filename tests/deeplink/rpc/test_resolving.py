"""Names are looked up within a moment, and what is known does where nobody answers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deeplink.core.clock import ManualClock
from deeplink.rpc import resolving
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set it, and names are not answered any more."""
    real, is_silent, over = socket.getaddrinfo, threading.Event(), threading.Event()

    def asked(host: str, *args: Any, **options: Any) -> Any:
        if is_silent.is_set() and not options["flags"] & socket.AI_NUMERICHOST:
            assert over.wait(LIMIT_S)
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.setattr(resolving, "_names", resolving._Names())
    monkeypatch.setattr(resolving, "_WAIT_S", 0.05)
    yield is_silent
    over.set()


def test_a_number_needs_no_name_server(silence: threading.Event) -> None:
    silence.set()
    assert [found[4] for found in resolving.addresses("127.0.0.1", 7, ManualClock())] == [("127.0.0.1", 7)]


def test_a_name_server_that_is_silent_is_not_waited_for(silence: threading.Event) -> None:
    silence.set()
    with pytest.raises(resolving.UnresolvedError, match="name server"):
        resolving.addresses("localhost", 7, ManualClock())


def test_what_is_known_of_a_host_serves_for_each_of_its_ports(
    silence: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_WAIT_S", 20.0)
    clock = ManualClock()
    first = resolving.addresses("localhost", 7, clock)
    assert {found[4][1] for found in first} == {7}
    silence.set()
    monkeypatch.setattr(resolving, "_WAIT_S", 0.05)
    for _ in range(2):
        assert {found[4][1] for found in resolving.addresses("localhost", 8, clock)} == {8}
        clock.sleep(3600.0)


def test_a_name_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(resolving, "_names", resolving._Names())
    monkeypatch.setattr(resolving, "_WAIT_S", 20.0)
    with pytest.raises(resolving.UnresolvedError, match="not known"):
        resolving.addresses("nobody", 7, ManualClock())


def test_many_callers_ask_one_question_and_what_comes_late_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real, over, asked = socket.getaddrinfo, threading.Event(), list[str]()

    def slow(host: str, *args: Any, **options: Any) -> Any:
        if not options["flags"] & socket.AI_NUMERICHOST:
            asked.append(host)
            assert over.wait(LIMIT_S)
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(resolving, "_names", resolving._Names())
    monkeypatch.setattr(resolving, "_WAIT_S", 0.01)
    for _ in range(5):
        with pytest.raises(resolving.UnresolvedError, match="name server"):
            resolving.addresses("localhost", 7, ManualClock())
    over.set()
    until(lambda: "localhost" in resolving._names.known)
    assert resolving.addresses("localhost", 7, ManualClock())
    assert asked == ["localhost"]


INSIDE = """
import socket, sys
from pathlib import Path
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from deeplink.rpc.grpc_server import bound_server

class Watch(watch_pb2_grpc.WatchServicer):
    def Beat(self, request, context):
        return watch_pb2.BeatReply(known=True)

def register(server):
    watch_pb2_grpc.add_WatchServicer_to_server(Watch(), server)
    return ["deeplink.v1.Watch"]

sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sink.bind(("127.0.0.53", 53))
token = Path(sys.argv[1])
bound = bound_server("127.0.0.1:0", token.read_text(), register)
bound.server.start()
line = WatchdogClient(f"watch-host:{bound.port}", token, "n1")
for _ in range(2):
    assert line.call(lambda stub: stub.Beat(watch_pb2.BeatRequest(), timeout=CALL_S)).known
line.close()
bound.server.stop(0).wait()
print("heard")
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="namespaces need root")
def test_the_watchdog_is_told_though_the_name_server_swallows_every_question(tmp_path: Path) -> None:
    """The name is in /etc/hosts, and `nameserver` leads to a socket that nobody reads; calls have CALL_S."""
    etc = tmp_path / "etc"  # a copy of all of it: a minimal Debian has no /etc/hosts to mount over
    subprocess.run(["cp", "-a", "/etc", etc], timeout=LIMIT_S, check=True)
    for name, text in (
        ("resolv.conf", "nameserver 127.0.0.53\n"),
        ("hosts", "127.0.0.1 localhost watch-host\n"),
        ("nsswitch.conf", "hosts: files dns\n"),
    ):
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    inside = f"from deeplink.agent.node_heartbeat import CALL_S\n{INSIDE}"
    enter = [
        "unshare",
        "--net",
        "--mount",
        "sh",
        "-c",
        f'mount --bind {etc} /etc && ip link set lo up && exec "$@"',
        "sh",
    ]
    done = subprocess.run(
        [*enter, sys.executable, "-c", inside, str(token)],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
    )
    assert done.stdout == "heard\n", done.stderr


def test_many_hosts_are_asked_at_once_and_unknown_ones_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real, all_asked = socket.getaddrinfo, threading.Barrier(20)

    def together(host: str, port: int, *_: Any, flags: int, **__: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return real(host, port, type=socket.SOCK_STREAM, flags=flags)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        all_asked.wait(LIMIT_S)
        return real("127.0.0.1", port, type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", together)
    monkeypatch.setattr(resolving, "_names", resolving._Names())
    monkeypatch.setattr(resolving, "_WAIT_S", LIMIT_S)
    targets = [(f"n{number}", 7) for number in range(20)] + [("unknown", 7), ("127.0.0.3", 8)]
    found = resolving.addresses_of_all(targets, ManualClock())
    assert {target for target in targets if target not in found} == {("unknown", 7)}
    assert {door[4] for door in found["n7", 7]} == {("127.0.0.1", 7)}
    assert {door[4] for door in found["127.0.0.3", 8]} == {("127.0.0.3", 8)}


def test_a_question_that_is_under_way_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, waited = threading.Event(), list[int]()

    def hanging(_host: str, port: int, *_: Any, flags: int, **__: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        answers.wait(LIMIT_S)
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    def noted(questions: list[Any], _wait_s: float) -> None:
        waited.append(len(questions))

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(resolving, "wait", noted)
    monkeypatch.setattr(resolving, "_names", resolving._Names())
    for _ in range(3):
        assert resolving.addresses_of_all([("slow", 7)], ManualClock()) == {}
    answers.set()
    assert waited == [1, 0, 0]
