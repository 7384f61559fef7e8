"""Addresses that cannot be listened on, and what each daemon says of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.rpc.listeners import FREE_WAIT_S, ListenError, PortBusyError, free_again, listening_socket
from tests.waiting import LIMIT_S


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use_is_known_also_by_name_and_for_all_interfaces(taken: str) -> None:
    port = taken.rpartition(":")[2]
    for bind in (taken, f"localhost:{port}", f"0.0.0.0:{port}"):
        with pytest.raises(PortBusyError) as caught:
            listening_socket(bind).close()
        assert caught.value.bind == bind


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:0", "0.0.0.0:0"])
def test_a_free_port_is_free(bind: str) -> None:
    listening_socket(bind).close()


@pytest.mark.parametrize("bind", ["203.0.113.1:0", "127.0.0.1:abc"])
def test_what_the_system_refuses_is_said_in_its_words(bind: str) -> None:
    with pytest.raises(ListenError, match="cannot listen on"):
        listening_socket(bind).close()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["node", "watch", "console"])
def test_every_daemon_says_the_same_of_a_busy_port(taken: str, verb: str, tmp_path: Path) -> None:
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DEEPLINK_STATE": str(tmp_path / "state"),
        "DEEPLINK_STORE": str(tmp_path / "store"),
        "DEEPLINK_CONFIG": os.devnull,
    }
    argv = [sys.executable, "-m", "deeplink", verb, "--bind", taken]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert said[0] == f"deeplink: cannot listen on {taken}: it is in use"
    assert "ss -ltnp" in said[1]
    assert len(said) == 2


def test_a_port_is_waited_for_until_whoever_listened_there_has_ended() -> None:
    clock = ManualClock()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    class Ending(ManualClock):
        @override
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            listener.close()

    assert free_again("127.0.0.1:0", port, clock) == "127.0.0.1:0", "any port, when it does not end"
    assert clock.now >= FREE_WAIT_S
    assert free_again("127.0.0.1:0", port, Ending()) == f"127.0.0.1:{port}"
