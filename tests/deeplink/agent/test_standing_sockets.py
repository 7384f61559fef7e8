"""A standing agent is killed: its ports stay its own, and systemd hears of its parent alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deeplink.core.clock import SystemClock
from deeplink.rpc.plain import PlainConnection, PlainSilentError
from deeplink.rpc.tokens import new_token, write_token
from tests.deeplink.agent.test_agent_sockets import taken
from tests.processes import children
from tests.waiting import LIMIT_S, until

CREDENTIALS_BYTES = 12
"""Of struct ucred, unix(7)."""


class Service:
    """`deeplink node` as systemd starts it (Type=notify): readiness counts from the process that was started."""

    def __init__(self, folder: Path) -> None:
        self.token = new_token()
        write_token(folder / "token", self.token)
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.systemd.settimeout(LIMIT_S)
        self.systemd.bind(str(folder / "notify"))
        argv = [sys.executable, "-m", "deeplink", "node", "--bind", "127.0.0.1:0", "--name", "n1"]
        env = {**os.environ, "DEEPLINK_STATE": str(folder / "state"), "NOTIFY_SOCKET": str(folder / "notify")}
        self.process = subprocess.Popen(
            [*argv, "--token-file", str(folder / "token"), "--store", str(folder / "store")],
            stdout=subprocess.PIPE,
            env=env,
        )
        self.said = self.announced()

    def announced(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def notified(self) -> tuple[str, int]:
        """Return what systemd is told, and the process that it hears it from."""
        data, ancillary, _, _ = self.systemd.recvmsg(100, socket.CMSG_SPACE(CREDENTIALS_BYTES))
        ((_, _, credentials),) = ancillary
        return data.decode(), int.from_bytes(credentials[:4], sys.byteorder)

    @property
    def port(self) -> int:
        return int(self.said["address"].rpartition(":")[2])

    def child(self) -> int:
        """Return the process that serves."""
        (found,) = children(self.process.pid)
        return found

    def answers(self) -> bool:
        try:
            with PlainConnection(self.said["address"], self.token, SystemClock()) as connection:
                connection.call("/grpc.health.v1.Health/Check", b"", SystemClock().monotonic() + LIMIT_S)
        except PlainSilentError:
            return False
        return True


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    started = Service(tmp_path)
    yield started
    started.process.kill()
    started.process.communicate(timeout=LIMIT_S)
    started.systemd.close()


def test_the_ports_of_a_killed_standing_agent_are_nobody_elses_and_it_is_there_again(service: Service) -> None:
    main = service.process.pid
    assert service.said["pid"] == main
    assert service.notified() == ("READY=1", main)
    for _ in range(2):
        child = service.child()
        os.kill(child, signal.SIGKILL)
        until(partial(_has_another_child, service, child), LIMIT_S)
        assert taken(service.port)
        assert service.announced()["address"] == service.said["address"]
        assert service.notified() == ("READY=1", main)
        until(service.answers, LIMIT_S)


def test_systemd_ends_it_in_order(service: Service) -> None:
    assert service.notified()[0] == "READY=1"
    for pid in (service.process.pid, service.child()):  # KillMode=control-group: all at once
        os.kill(pid, signal.SIGTERM)
    assert service.notified() == ("STOPPING=1", service.process.pid)
    assert service.process.wait(LIMIT_S) == 0
    assert not taken(service.port)


def test_nothing_serves_without_the_process_that_systemd_started(service: Service) -> None:
    service.process.kill()
    service.process.wait(LIMIT_S)
    until(lambda: not taken(service.port), LIMIT_S)


def _has_another_child(service: Service, than: int) -> bool:
    assert taken(service.port), "not for a moment"
    try:
        return service.child() != than
    except ValueError:
        return False
