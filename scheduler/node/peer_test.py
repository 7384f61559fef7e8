"""Exchanges bytes with other agents over the network that ranks use, on ports as ranks have them.

An agent's own port may be open where others are dropped: so one agent listens on a port that the kernel chooses,
as it does for ranks, and the other one connects and sends bytes that must come back. There are enough of them that
packets of full size are among them.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from deeplink.core.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_PEERS = 64  # that one connects to, and that connect to one
LONGEST_S = 5.0  # for which one listens, or tries
_BYTES = b"deeplink" * 8192  # 64 KiB
_AT_ONCE = 8


def listen(host: str, for_s: float, clock: Clock | None = None) -> int:
    """Answer those who connect, for so many seconds, in threads; return the port.

    Raises:
        OSError: `host` is no address of this node.
    """
    listener = socket.create_server((host, 0), backlog=MOST_PEERS)
    clock = clock or SystemClock()
    deadline = clock.monotonic() + min(for_s, LONGEST_S)
    threading.Thread(
        target=_serve, args=(listener, deadline, clock), name="deeplink-peer-test", daemon=True
    ).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket, deadline: float, clock: Clock) -> None:
    with listener, ThreadPoolExecutor(_AT_ONCE, "deeplink-peer-test") as pool, suppress(OSError):
        for _ in range(MOST_PEERS):
            listener.settimeout(max(0.01, deadline - clock.monotonic()))
            pool.submit(_answer, listener.accept()[0], deadline, clock)


def _answer(peer: socket.socket, deadline: float, clock: Clock) -> None:
    with peer, suppress(OSError):
        if _received(peer, deadline, clock):
            peer.settimeout(max(0.01, deadline - clock.monotonic()))
            peer.sendall(_BYTES)


def _received(peer: socket.socket, deadline: float, clock: Clock) -> bool:
    """Whether the whole of the bytes, and no others, came within the time."""
    came = bytearray()
    while len(came) < len(_BYTES):
        peer.settimeout(max(0.01, deadline - clock.monotonic()))
        part = peer.recv(len(_BYTES) - len(came))
        if not part:
            return False
        came += part
    return came == _BYTES


def reached(peers: Sequence[str], within_s: float, clock: Clock | None = None) -> list[str]:
    """Return the peers, `HOST:PORT` each, with which bytes went both ways within so many seconds."""
    clock = clock or SystemClock()
    deadline = clock.monotonic() + min(within_s, LONGEST_S)
    with ThreadPoolExecutor(len(peers) or 1, "deeplink-peer-test") as pool:
        answers = list(pool.map(lambda peer: _exchanges(peer, deadline, clock), peers))
    return [peer for peer, is_reached in zip(peers, answers, strict=True) if is_reached]


def _exchanges(address: str, deadline: float, clock: Clock) -> bool:
    host, _, port = address.rpartition(":")
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), max(0.01, deadline - clock.monotonic())) as peer,
    ):
        peer.sendall(_BYTES)
        return _received(peer, deadline, clock)
    return False
