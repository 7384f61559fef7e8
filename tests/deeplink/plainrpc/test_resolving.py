"""Names are looked up within a moment, and what is known does where nobody answers."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from deeplink.clock import ManualClock
from deeplink.plainrpc import resolving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set it, and names are not answered any more."""
    real, is_silent, over = socket.getaddrinfo, threading.Event(), threading.Event()

    def asked(host: str, *args: Any, **options: Any) -> Any:
        if is_silent.is_set() and not options["flags"] & socket.AI_NUMERICHOST:
            assert over.wait(30)
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.setattr(resolving, "_known", {})
    monkeypatch.setattr(resolving, "_WAIT_S", 0.05)
    yield is_silent
    over.set()


def test_a_number_needs_no_name_server(silence: threading.Event) -> None:
    silence.set()
    assert [found[4] for found in resolving.addresses("127.0.0.1", 7, ManualClock())] == [("127.0.0.1", 7)]


def test_a_name_server_that_is_silent_is_not_waited_for(silence: threading.Event) -> None:
    silence.set()
    with pytest.raises(TimeoutError, match="name server"):
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
    monkeypatch.setattr(resolving, "_known", {})
    monkeypatch.setattr(resolving, "_WAIT_S", 20.0)
    with pytest.raises(socket.gaierror, match="not known"):
        resolving.addresses("nobody", 7, ManualClock())
