"""Calls on a Unix socket: who calls is what the kernel says."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from deeplink.core.clock import SystemClock
from deeplink.rpc.plain import PlainBusyError, PlainCallError, PlainConnection, PlainSilentError
from deeplink.rpc.plain.framing import NO_SECRET
from deeplink.rpc.plain.local_socket import UNIX, LocalListener, caller_of
from deeplink.rpc.plain.serving import PlainServer, PlainTerms, ServerLimits
from tests.deeplink.rpc.plain.servers import Said, soon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WHO, MOST = "/t.T/Who", 4


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a server that says who calls."""

    def who(message: bytes, user: int) -> Iterator[Said]:
        yield Said([message, b"%d" % user])

    terms = PlainTerms(
        node="n0",
        find_token=lambda _name: NO_SECRET,
        is_valid=lambda _token: True,
        methods={},
        user_methods={WHO: who},
    )
    limits = ServerLimits(connections=4 * MOST, threads=2, workers=2)
    listener = LocalListener(tmp_path / "socket", PlainServer(terms, SystemClock(), limits=limits))
    listener.start()
    yield f"{UNIX}{tmp_path / 'socket'}"
    listener.close()


def connect(address: str) -> PlainConnection:
    return PlainConnection(address, NO_SECRET, SystemClock())


def test_a_call_carries_the_number_of_the_user(address: str) -> None:
    with connect(address) as connection:
        for _ in range(3):
            assert connection.call(WHO, b"it is ", soon(30)) == b"it is %d" % os.geteuid()


def test_other_methods_and_other_tokens_are_refused(address: str) -> None:
    with connect(address) as connection, pytest.raises(PlainCallError, match="no such method"):
        connection.call("/t.T/Other", b"", soon(30))
    with PlainConnection(address, "guessed", SystemClock()) as connection, pytest.raises(PlainCallError):
        connection.call(WHO, b"", soon(30))


def test_one_user_cannot_have_all_connections(address: str) -> None:
    held = [connect(address) for _ in range(MOST)]
    try:
        for connection in held:
            connection.call(WHO, b"", soon(30))
        # Told that it is busy, or, where the connection was closed before the hello, nothing.
        with connect(address) as another, pytest.raises((PlainBusyError, PlainSilentError)):
            another.call(WHO, b"", soon(30))
        for connection in held:
            assert connection.call(WHO, b"", soon(30))
    finally:
        for connection in held:
            connection.close()


def test_tcp_says_nothing_of_users() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        assert caller_of(one) is None
