from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from deeplink.core.tcp import AT_ONCE, Connecting, connect_all
from tests.waiting import until

Address = tuple[str, int]


@pytest.fixture
def listening() -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0), backlog=AT_ONCE) as server:
        yield server.getsockname()


@pytest.fixture
def closed() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: Address = server.getsockname()
    return address


@pytest.fixture
def silent() -> Iterator[Address]:
    """A port whose queue is full: the kernel drops what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        fillers = [Connecting(server.getsockname()) for _ in range(4)]
        yield server.getsockname()
        for filler in fillers:
            filler.close()


def test_each_outcome_is_told_apart_and_in_order(listening: Address, closed: Address, silent: Address) -> None:
    assert list(connect_all([silent, listening, closed], 0.2)) == [None, 0, errno.ECONNREFUSED]


def test_more_than_one_group_keeps_the_order(listening: Address, closed: Address) -> None:
    assert list(connect_all([closed] * AT_ONCE + [listening], 5.0)) == [errno.ECONNREFUSED] * AT_ONCE + [0]


def test_no_time_is_no_answer(silent: Address) -> None:
    assert list(connect_all([silent], 0.0)) == [None]


def test_an_attempt_goes_on_while_nobody_waits(listening: Address, silent: Address) -> None:
    attempt = Connecting(listening)
    until(lambda: attempt.result() is not None)
    assert (attempt.result(), attempt.fileno()) == (0, -1)
    other = Connecting(silent)
    assert other.result() is None
    other.close()
    other.close()
    assert other.result() is None
