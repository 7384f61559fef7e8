"""A small gRPC server on plain sockets, for the data path: what it sends is sent where it lies, by system calls.

A few threads wait for all connections at once; one that wakes works on its connection alone, and never waits for a
slow peer but for a moment: the rest goes on when the peer takes it. Bounded are connections, what each can make us
keep (`Terms`), answers under way, threads, and the time a peer may stand still.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.rpc.forksafe import framing
from deeplink.rpc.forksafe.framing import ErrorCode
from deeplink.rpc.forksafe.intake import SessionError, Terms
from deeplink.rpc.forksafe.session import Session
from deeplink.rpc.listeners import listening_socket
from deeplink.rpc.tokens import only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.core.clock import Clock
    from deeplink.rpc.forksafe.intake import Method

log = logging.getLogger(__name__)

_RECEIVED = 65_536
_SLOW_S = 0.02
"""A thread waits for a peer that reads slowly no longer, in one call and in all."""
_SEND_WAIT = struct.pack("ll", 0, int(_SLOW_S * 1e6))  # struct timeval
_LOOK_ROUND_S = 0.1
_AT_ONCE = 32
"""Connections accepted in one go."""
_END_S = 1.0
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_ONCE = select.EPOLLONESHOT | select.EPOLLRDHUP
_BROKEN = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """A server's bounds."""

    connections: int = 4096  # held at once, of which strangers have half (see `ConnectionBounds`)
    answers: int = 80  # requests being answered at once, those that wait for a slow reader among them
    waiting: int = 256  # connections that may wait for a thread; those beyond are refused
    threads: int = 8  # that answer
    stall_s: float = 10.0  # a peer may stand still in a call; also from accepting to its first call with the token
    idle_s: float = 900.0  # how long a connection is kept that is not used between calls
    retry_after_ms: int = 200  # how long a refused caller is asked to wait


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection; `lock` is held by the thread that works on it."""

    socket: socket.socket
    session: Session
    lock: threading.Lock
    moved: float  # when a call on it last went on; frames that belong to none do not count
    work: int = 0  # of its intake, at that moment

    def cut(self, goodbye: bytes = b"") -> None:
        """End it: the thread that works on it now, or the next one, finds it closed."""
        with contextlib.suppress(OSError):
            if goodbye:
                self.socket.send(goodbye, socket.MSG_DONTWAIT)
            self.socket.shutdown(socket.SHUT_RDWR)


class PlainServer:
    """Answers gRPC calls on a port of its own from `start` to `stop`.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self,
        bind: str | socket.socket,
        token: str | Callable[[str], bool],
        methods: Mapping[str, Method],
        clock: Clock,
        *,
        limits: ServerLimits | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits, self._clock, self._on_refused = limits or ServerLimits(), clock, on_refused
        self._lock = threading.Lock()
        self._answers = self._idle_threads = 0
        self._is_ending = False
        self._connections: dict[int, _Connection] = {}
        bounds = ConnectionBounds(connections=self._limits.connections, proof_s=self._limits.stall_s)
        self._admission = Admission[_Connection](bounds, clock)
        self._terms = Terms(
            is_valid=only(token) if isinstance(token, str) else token,
            methods=methods,
            admit=self._admit,
            release=self._release,
            retry_after_ms=self._limits.retry_after_ms,
        )
        self._listener = listening_socket(bind) if isinstance(bind, str) else bind
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, _READ | select.EPOLLONESHOT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, _READ)
        self._threads = [
            threading.Thread(target=self._work, name=f"deeplink-data-{number}", daemon=True)
            for number in range(self._limits.threads)
        ]
        self._threads.append(threading.Thread(target=self._look_round, name="deeplink-data-bounds", daemon=True))
        self._ending = threading.Event()

    def start(self) -> None:
        """Serve from now on."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return once nothing is served any more; a caller that waits finds the connection closed."""
        if self._is_ending:
            return
        self._is_ending = True
        self._ending.set()
        os.eventfd_write(self._wake, 1)
        until = self._clock.monotonic() + _END_S
        for thread in self._threads:
            if thread.ident is not None:  # one that a disk holds up ends with the process
                thread.join(max(0.0, until - self._clock.monotonic()))
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._epoll.close()
        os.close(self._wake)

    def open_connections(self) -> int:
        """Return how many connections there are."""
        return len(self._connections)

    def _admit(self) -> bool:
        with self._lock:
            if self._answers >= self._limits.answers:
                return False
            self._answers += 1
            return True

    def _release(self) -> None:
        with self._lock:
            self._answers -= 1

    def _work(self) -> None:
        while not self._is_ending:
            with self._lock:
                self._idle_threads += 1
            events = self._epoll.poll(maxevents=1)
            with self._lock:
                self._idle_threads -= 1
            for descriptor, event in events:
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor != self._wake:
                    self._serve(descriptor, event)

    def _accept(self) -> None:
        try:
            for _ in range(_AT_ONCE):  # others prove themselves in between
                accepted, peer = self._listener.accept()
                self._take_in(accepted, str(peer[0]))
        except BlockingIOError:
            pass
        except OSError as problem:
            log.warning("a connection cannot be taken: %s", problem)
            self._ending.wait(_LOOK_ROUND_S)  # no descriptors left: not again at once
        self._arm(self._listener.fileno(), _READ)

    def _take_in(self, accepted: socket.socket, address: str) -> None:
        accepted.setblocking(True)  # noqa: FBT003 - the standard library's
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_WAIT)
        _send_unpaced(accepted)
        connection = _Connection(accepted, Session(self._terms), threading.Lock(), self._clock.monotonic())
        leaves = self._admission.admit(connection, address)
        if leaves is not None:
            self._on_refused()
            leaves.cut(
                framing.settings({}) + framing.going_away(0, ErrorCode.CALM, "as many connections as it holds")
            )
        if leaves is connection:
            accepted.close()
            return
        with self._lock:
            self._connections[accepted.fileno()] = connection
        self._epoll.register(accepted, _READ | _ONCE)

    def _arm(self, descriptor: int, events: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by `stop`
            self._epoll.modify(descriptor, events | select.EPOLLONESHOT)

    def _serve(self, descriptor: int, event: int, *, refuse: bool = False) -> None:
        """Work on the connection that woke."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        with connection.lock:
            if self._connections.get(descriptor) is not connection:
                return
            try:
                wanted = self._progress(connection, event, refuse=refuse)
            except SessionError as problem:
                log.warning("a peer is cut off: %s", problem)
                self._on_refused()
                goodbye = framing.going_away(0, problem.fault, problem.why)
                with contextlib.suppress(OSError):
                    connection.socket.send(goodbye, socket.MSG_DONTWAIT)
                self._drop(connection)
            except OSError as problem:
                log.debug("a connection broke: %s", problem)
                self._drop(connection)
            except Exception:
                log.exception("a connection is given up")
                self._drop(connection)
            else:
                self._note(connection)
                self._arm(descriptor, wanted | _ONCE)

    def _note(self, connection: _Connection) -> None:
        """Take note of whether a call on it went on."""
        work = connection.session.intake.work
        if work != connection.work:
            connection.work, connection.moved = work, self._clock.monotonic()

    def _progress(self, connection: _Connection, event: int, *, refuse: bool) -> int:
        """Read what came and send what can be sent; return what to wait for."""
        session, peer = connection.session, connection.socket
        if event & _BROKEN:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed it")
        if event & _READ:
            self._receive(connection)
        flags = socket.MSG_DONTWAIT if event & _WRITE else 0
        until = self._clock.monotonic() + _SLOW_S
        while True:
            session.fill(refuse=refuse)
            if not session.out.left:
                return _READ
            try:
                if not session.out.send(peer, flags) or self._clock.monotonic() > until:
                    flags = socket.MSG_DONTWAIT
            except BlockingIOError:
                return _WRITE
            except OSError as problem:
                if problem.errno != errno.EFAULT:
                    raise
                session.blank()

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(_RECEIVED, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed it")
        intake = connection.session.intake
        intake.receive(data)
        if intake.is_proven and not connection.work:
            self._admission.prove(connection)  # before its answer lets the peer go on

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            if self._connections.pop(connection.socket.fileno(), None) is None:
                return
        self._admission.leave(connection)
        connection.session.abandon()
        connection.socket.close()

    def _look_round(self) -> None:
        """Cut off who stands still, and refuse who would wait too long."""
        was_busy, looked, every_s = False, 0.0, min(1.0, self._limits.stall_s / 4)
        while not self._ending.wait(_LOOK_ROUND_S):
            now = self._clock.monotonic()
            if now - looked >= every_s:
                looked = now
                for connection in self._admission.overdue():
                    connection.cut()
                for connection in list(self._connections.values()):
                    self._look_at(connection, now)
            is_busy = not self._idle_threads
            if is_busy and was_busy:
                self._refuse_some()
            was_busy = is_busy

    def _look_at(self, connection: _Connection, now: float) -> None:
        if not connection.lock.acquire(blocking=False):
            return  # it is being worked on
        try:
            if not connection.session.intake.is_proven:
                return  # its time is another one
            allowed = self._limits.idle_s if connection.session.is_idle else self._limits.stall_s
            if now - connection.moved > allowed:
                self._drop(connection)
        finally:
            connection.lock.release()

    def _refuse_some(self) -> None:
        """Tell the last of those that wait for a thread to come again later."""
        waiting = self._epoll.poll(0, self._limits.connections)
        for number, (descriptor, event) in enumerate(waiting):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._wake:
                continue
            elif number >= self._limits.waiting:
                self._on_refused()
                self._serve(descriptor, event, refuse=True)
            else:
                self._arm(descriptor, _READ | _WRITE * bool(event & _WRITE) | _ONCE)


def _send_unpaced(accepted: socket.socket) -> None:
    """Take cubic, Linux's own choice, where the machine's congestion control is BBR; reno where that is refused.

    BBR paces what it sends for the sake of long ways with small buffers. Within a cluster batches come in twice to
    three times the time (measured, docs/decisions/0007). Any other choice of the machine's operator stands.
    """
    with contextlib.suppress(OSError):
        if not accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
            return
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
