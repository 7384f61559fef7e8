"""Knocking at real ports."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from deeplink.scheduler.launch.shared_network import all_reached


def test_all_that_listen_are_reached_and_one_that_does_not_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [one.getsockname(), other.getsockname()]
        assert all_reached(addresses)
        assert all_reached([])
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            assert not all_reached([*addresses, closed.getsockname()])


def test_more_than_may_be_asked_at_once_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.core.tcp.AT_ONCE", 2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert all_reached([server.getsockname()] * 5)
        assert not all_reached([server.getsockname()] * 4 + [closed.getsockname()])


def test_a_process_that_may_open_no_more_files_reaches_nobody_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_more(_family: int) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("deeplink.core.tcp.socket.socket", no_more)
    assert not all_reached([("127.0.0.1", 9)])


def test_an_address_without_a_route_is_not_reached() -> None:
    assert not all_reached([("255.255.255.255", 9)])


def test_one_that_never_answers_costs_no_more_than_the_time() -> None:
    # A full queue of connections that nobody takes: the next one is not answered.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        knocks = []
        for _ in range(4):
            knock = socket.socket()
            knock.settimeout(0)
            knock.connect_ex(listener.getsockname())
            knocks.append(knock)
        assert not all_reached([listener.getsockname()], timeout_s=0.05)
        for knock in knocks:
            knock.close()
