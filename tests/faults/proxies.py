"""What lies between two machines and goes wrong: bits flip on the way, answers come late."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.waiting import LIMIT_S

Change = Callable[[bytes], bytes]


def same(data: bytes) -> bytes:
    """Hand bytes on as they are."""
    return data


def flipping(seed: int, *, every: int) -> Change:
    """Return a change that flips one bit in so many bytes in the mean."""
    rng = random.Random(seed)  # noqa: S311 - faults, no secret

    def change(data: bytes) -> bytes:
        broken = bytearray(data)
        for _ in range(sum(rng.random() < len(data) / every / 4 for _ in range(4))):
            broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(broken)

    return change


def late(seconds: float) -> Change:
    """Return a change that keeps each piece back for so long."""

    def change(data: bytes) -> bytes:
        threading.Event().wait(seconds)
        return data

    return change


HOST = "127.0.0.77"
"""Another address of this machine: where proxies stand, on the ports of those that they stand for."""


class Proxy:
    """Hands connections to ports of HOST on; `up` changes what clients send, `down` what comes back."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.up: Change = same
        self.down: Change = same
        self.pieces = 0
        self._open: set[socket.socket] = set()
        self._listeners = [socket.create_server((HOST, port)) for port in ports]
        self._threads = [
            threading.Thread(target=self._accept, args=(listener,), daemon=True) for listener in self._listeners
        ]
        for thread in list(self._threads):
            thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=LIMIT_S)
                except OSError:
                    client.close()
                    continue
                for found in (client, server):
                    found.settimeout(LIMIT_S)
                    self._open.add(found)
                for origin, target, is_up in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pump, args=(origin, target, is_up), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, origin: socket.socket, target: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(1 << 16):
                self.pieces += 1
                target.sendall((self.up if is_up else self.down)(data))
        for ended in (origin, target):
            with contextlib.suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and all its connections."""
        self.up = self.down = same
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for found in list(self._open):
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for found in self._open:
            found.close()


@contextmanager
def proxy(ports: Sequence[int]) -> Iterator[Proxy]:
    """Stand between clients and these ports of 127.0.0.1."""
    made = Proxy(ports)
    try:
        yield made
    finally:
        made.close()
