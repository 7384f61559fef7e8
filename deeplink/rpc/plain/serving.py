"""Answers our own clients' calls on connections that an `Acceptor` hands over; samples are sent where they lie.

A few threads wait for all connections at once; one that wakes works on its connection alone, and never waits for a
slow peer but for a moment: the rest goes on when the peer takes it. Methods that may wait have threads of their
own. Bounded are connections, what each can make us keep, answers under way, threads, and the time a peer may stand
still.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.plain import framing
from deeplink.rpc.plain.framing import NONCE_BYTES, Inbound, SessionError, Status
from deeplink.rpc.plain.local_socket import caller_of
from deeplink.rpc.plain.outgoing import AnswerStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deeplink.core.clock import Clock
    from deeplink.rpc.plain.outgoing import Reply

    Method = Callable[[bytes], Iterator[Reply]]
    WaitingMethod = Callable[[bytes, Callable[[], bool]], Iterator[Reply]]
    UserMethod = Callable[[bytes, int], Iterator[Reply]]

log = logging.getLogger(__name__)

_RECEIVED = 65_536
_SLOW_S = 0.02
"""A thread waits for a peer that reads slowly no longer, in one call and in all."""
_SEND_WAIT = struct.pack("ll", 0, int(_SLOW_S * 1e6))  # struct timeval
_LOOK_ROUND_S = 0.1
_END_S = 1.0
_PUT_AT_ONCE = 8 << 20
"""Bytes of parts made ready before the first of them is sent."""
_PROGRESS = 1024
"""So many bytes sent at once are no trickle that a peer makes us send."""
_USERS = 4
"""Of the connections one user who shows no token has this part at most."""
_PROOFS = 4
"""Credentials that are decoded at once; those that wait are of strangers, who are few and have little time."""
_QUEUED = 4
"""Calls that may wait for each of the threads that may wait themselves."""
_TOO_BUSY = "as many calls are answered as this server takes at once"
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
    workers: int = 16  # that answer methods which may wait
    stall_s: float = 10.0  # a peer may stand still in a call; also from accepting to its proof of the token
    idle_s: float = 900.0  # how long a connection is kept that is not used between calls
    retry_after_ms: int = 200  # how long a refused caller is asked to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTerms:
    """Who is answered by a server, and how.

    `methods` and `waiting_methods` hold, by `/package.Service/Method`, what makes the replies to one request; what
    it raises as CallRefusedError ends the call with a status.
    """

    node: str  # the name of the agent's node, which it proves
    find_token: Callable[[str], str]  # the token of a name (`framing.name_of`); empty where there is none
    is_valid: Callable[[str], bool]  # whether calls on a connection of this token are answered, asked for each
    methods: Mapping[str, Method]  # never wait, but for a disk
    # may wait; each is given what tells whether its caller still does, for it must not outlast it for long
    waiting_methods: Mapping[str, WaitingMethod] = field(default_factory=dict)
    # all that users may call who show no token, each with the user's number; they may wait
    user_methods: Mapping[str, UserMethod] = field(default_factory=dict)
    # the user of a credential, and what it says; it may wait, and raise a DeepLinkError. None: none counts
    user_of: Callable[[str], tuple[int, str]] | None = None
    # the reply to a call with a token that is valid no more, by token and method; None: it is refused
    farewell: Callable[[str, str], Reply | None] = lambda _token, _method: None


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection; `lock` is held by the thread that works on it."""

    socket: socket.socket
    descriptor: int
    inbound: Inbound
    moved: float  # when a call on it last went on
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: AnswerStream = field(default_factory=AnswerStream)
    may_wait: bool = False  # whether the method that is being answered may
    user: int | None = None  # who calls, where no token is shown

    @property
    def is_idle(self) -> bool:
        return self.inbound.is_idle and not (self.answers.is_open or self.answers.out.left)

    def is_left(self) -> bool:
        """Tell whether the peer has closed it now.

        An event may be of a connection that had this one's descriptor before, and while an answer is made nobody
        waits for one.
        """
        poll = select.poll()
        poll.register(self.descriptor, select.POLLRDHUP)  # POLLHUP and POLLERR come unasked
        return bool(poll.poll(0))

    def cut(self, goodbye: bytes = b"") -> None:
        """End it: the thread that works on it now, or the next one, finds it closed."""
        with contextlib.suppress(OSError):
            if goodbye:
                self.socket.send(goodbye, socket.MSG_DONTWAIT)
            self.socket.shutdown(socket.SHUT_RDWR)


class PlainServer:
    """Answers calls on the connections that `take_in` is given, from `start` to `stop`."""

    def __init__(
        self,
        terms: PlainTerms,
        clock: Clock,
        *,
        limits: ServerLimits | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._terms, self._limits, self._clock = terms, limits or ServerLimits(), clock
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._answers = self._waiting_answers = self._idle_threads = 0
        self._is_ending = False
        self._connections: dict[int, _Connection] = {}
        bounds = ConnectionBounds(connections=self._limits.connections, proof_s=self._limits.stall_s)
        self._admission = Admission[_Connection](bounds, clock)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, _READ)
        self._threads = [
            threading.Thread(target=self._work, name=f"deeplink-data-{number}", daemon=True)
            for number in range(self._limits.threads)
        ]
        self._threads.append(threading.Thread(target=self._look_round, name="deeplink-data-bounds", daemon=True))
        self._workers = ThreadPoolExecutor(self._limits.workers, thread_name_prefix="deeplink-calls")
        self._provers = ThreadPoolExecutor(_PROOFS, thread_name_prefix="deeplink-proofs")
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
        for pool in (self._workers, self._provers):
            pool.shutdown(wait=False, cancel_futures=True)
        until = self._clock.monotonic() + _END_S
        for connection in list(self._connections.values()):
            connection.cut()
        for thread in self._threads:
            if thread.ident is not None:  # one that a disk holds up ends with the process
                thread.join(max(0.0, until - self._clock.monotonic()))
        for connection in list(self._connections.values()):
            if connection.lock.acquire(timeout=max(0.0, until - self._clock.monotonic())):
                self._drop(connection)
                connection.lock.release()
        self._epoll.close()
        os.close(self._wake)

    def open_connections(self) -> int:
        """Return how many connections there are."""
        return len(self._connections)

    def take_in(self, accepted: socket.socket, address: str) -> None:
        """Serve a connection that was accepted from this address."""
        accepted.setblocking(True)  # noqa: FBT003 - the standard library's
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_WAIT)
        user = caller_of(accepted)
        if user is None:
            _send_unpaced(accepted)
        takes_users = user is None and self._terms.user_of is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        inbound = Inbound(self._terms.find_token, self._terms.node, nonce, takes_users=takes_users)
        connection = _Connection(accepted, accepted.fileno(), inbound, self._clock.monotonic(), user=user)
        leaves = connection if self._has_enough(user) else self._admission.admit(connection, address)
        if leaves is not None:
            self._on_refused()
            leaves.cut(framing.end(Status.EXHAUSTED, "as many connections as it holds"))
        if leaves is connection or self._is_ending:
            self._admission.leave(connection)
            accepted.close()
            return
        with self._lock:
            self._connections[connection.descriptor] = connection
        try:
            self._epoll.register(accepted, _READ | _ONCE)
        except OSError:
            self._drop(connection)
            raise

    def _has_enough(self, user: int | None) -> bool:
        """Tell whether a user has as many connections as one may: the others find room."""
        if user is None:
            return False
        held = sum(one.user == user for one in list(self._connections.values()))
        return held >= max(1, self._limits.connections // _USERS)

    def _work(self) -> None:
        while not self._is_ending:
            with self._lock:
                self._idle_threads += 1
            events = self._epoll.poll(maxevents=1)
            with self._lock:
                self._idle_threads -= 1
            for descriptor, event in events:
                connection = self._connections.get(descriptor)
                if connection is not None:
                    self._serve(connection, event)

    def _arm(self, connection: _Connection, events: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by `stop`
            self._epoll.modify(connection.descriptor, events | _ONCE)

    def _serve(self, connection: _Connection, event: int, *, refuse: bool = False, may_wait: bool = False) -> None:
        """Work on a connection that woke, or whose answer goes on in a thread that may wait."""
        with connection.lock:
            if self._connections.get(connection.descriptor) is not connection:
                return
            try:
                wanted = self._progress(connection, event, refuse=refuse, may_wait=may_wait)
                if wanted:
                    self._arm(connection, wanted)
                else:
                    pool = self._provers if connection.inbound.credential else self._workers
                    pool.submit(self._serve, connection, 0, may_wait=True)
            except SessionError as problem:
                log.warning("a peer is cut off: %s", problem)
                self._on_refused()
                with contextlib.suppress(OSError):
                    connection.socket.send(framing.end(problem.status, problem.why), socket.MSG_DONTWAIT)
                self._drop(connection)
            except OSError as problem:
                log.debug("a connection broke: %s", problem)
                self._drop(connection)
            except Exception:
                if not self._is_ending:  # then the workers take nothing more
                    log.exception("a connection is given up")
                self._drop(connection)

    def _progress(self, connection: _Connection, event: int, *, refuse: bool, may_wait: bool) -> int:
        """Read what came and send what can be sent; return what to wait for, 0 for a thread that may wait."""
        if event & _BROKEN and connection.is_left():
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed it")
        if event & _READ:
            with contextlib.suppress(BlockingIOError):  # as in `is_left`
                self._receive(connection)
        if connection.inbound.credential:
            if not may_wait:
                return 0
            self._believe(connection)
        flags = socket.MSG_DONTWAIT if event & _WRITE else 0
        until = self._clock.monotonic() + _SLOW_S
        while (wanted := self._make_ready(connection, refuse=refuse, may_wait=may_wait)) is None:
            try:
                if not self._send(connection, flags) or connection.moved > until:
                    flags = socket.MSG_DONTWAIT
            except BlockingIOError:
                return _WRITE
        return wanted

    def _make_ready(self, connection: _Connection, *, refuse: bool, may_wait: bool) -> int | None:
        """Make what is to be sent next; return what to wait for where there is nothing."""
        answers, requests = connection.answers, connection.inbound.requests
        while True:
            if requests and not (answers.is_open or answers.out.left):
                self._begin(connection, refuse=refuse)
            if answers.is_open:
                if connection.may_wait and not may_wait:
                    return 0
                answers.fill(1 if connection.may_wait else _PUT_AT_ONCE)  # 1: each as soon as it is there
            if answers.out.left:
                return None
            if not requests:
                return _READ

    def _send(self, connection: _Connection, flags: int) -> bool:
        """Send once; tell whether the socket took all that it was offered."""
        out = connection.answers.out
        left = out.left
        try:
            took_all = out.send(connection.socket, flags)
        except OSError as problem:
            if problem.errno != errno.EFAULT:
                raise
            connection.answers.blank()
            return True
        if left - out.left >= _PROGRESS or not out.left:
            connection.moved = self._clock.monotonic()
        return took_all

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(_RECEIVED, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed it")
        inbound = connection.inbound
        was_idle, was_proven = inbound.is_idle, bool(inbound.token)
        inbound.receive(data)
        if inbound.said:
            connection.answers.out.put([inbound.said], len(inbound.said))
            inbound.said = b""
        if inbound.token and not was_proven:
            self._admission.prove(connection)  # before its answer lets the peer go on
        if was_idle or inbound.requests:  # bytes of half a request do not count
            connection.moved = self._clock.monotonic()

    def _believe(self, connection: _Connection) -> None:
        """Find out whose the credential is that a peer has shown; SessionError where it is not to be believed."""
        user_of, shown = self._terms.user_of, connection.inbound.credential
        if user_of is None or shown is None or connection.is_left():
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed it")
        try:
            user, said = user_of(shown[0])
        except DeepLinkError as problem:
            raise SessionError(str(problem), Status.UNAUTHENTICATED) from problem
        if said != shown[1]:
            raise SessionError("a credential that was made for another connection", Status.UNAUTHENTICATED)
        if self._has_enough(user):
            raise SessionError("as many connections as one user may have", Status.EXHAUSTED)
        connection.user = user
        connection.inbound.believe()
        self._admission.prove(connection)
        connection.moved = self._clock.monotonic()

    def _begin(self, connection: _Connection, *, refuse: bool) -> None:
        """Take the next request, and begin its answer."""
        request, answers, terms = connection.inbound.requests.popleft(), connection.answers, self._terms
        connection.may_wait = False
        method = waiting = None
        if connection.user is None:
            method, waiting = terms.methods.get(request.method), terms.waiting_methods.get(request.method)
        elif (of_user := terms.user_methods.get(request.method)) is not None:
            waiting = partial(_called, of_user, connection.user)
        if connection.user is None and not terms.is_valid(connection.inbound.token):
            farewell = terms.farewell(connection.inbound.token, request.method)
            if farewell is None:
                answers.finish(Status.UNAUTHENTICATED, "the token is not valid any more")
            else:
                answers.begin(iter([farewell]))
        elif refuse:
            answers.finish(Status.EXHAUSTED, _TOO_BUSY, retry_ms=self._limits.retry_after_ms)
        elif method is None and waiting is None:
            answers.finish(Status.UNIMPLEMENTED, "no such method")
        elif not self._admit(waits=method is None):
            answers.finish(Status.EXHAUSTED, _TOO_BUSY, retry_ms=self._limits.retry_after_ms)
        elif method is not None:
            answers.begin(method(request.message), self._release)
        elif waiting is not None:
            connection.may_wait = True
            answers.begin(waiting(request.message, lambda: not connection.is_left()), self._release_waiting)

    def _admit(self, *, waits: bool) -> bool:
        with self._lock:
            if waits:
                if self._waiting_answers >= _QUEUED * self._limits.workers:
                    return False
                self._waiting_answers += 1
            else:
                if self._answers >= self._limits.answers:
                    return False
                self._answers += 1
            return True

    def _release(self) -> None:
        with self._lock:
            self._answers -= 1

    def _release_waiting(self) -> None:
        with self._lock:
            self._waiting_answers -= 1

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            if self._connections.pop(connection.descriptor, None) is None:
                return
        self._admission.leave(connection)
        connection.answers.abandon()
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
        if not connection.inbound.token or not connection.lock.acquire(blocking=False):
            return  # its time is another one, or it is being worked on
        try:
            allowed = self._limits.idle_s if connection.is_idle else self._limits.stall_s
            is_queued = connection.may_wait and connection.answers.is_open and not connection.answers.out.left
            if now - connection.moved > allowed and not is_queued:
                self._drop(connection)
        finally:
            connection.lock.release()

    def _refuse_some(self) -> None:
        """Tell the last of those that wait for a thread to come again later."""
        waiting = self._epoll.poll(0, self._limits.connections)
        for number, (descriptor, event) in enumerate(waiting):
            connection = self._connections.get(descriptor)
            if connection is None:
                continue
            if number >= self._limits.waiting:
                self._on_refused()
                self._serve(connection, event, refuse=True)
            else:
                self._arm(connection, _READ | _WRITE * bool(event & _WRITE))


def _called(method: UserMethod, user: int, message: bytes, _is_awaited: Callable[[], bool]) -> Iterator[Reply]:
    return method(message, user)


def _send_unpaced(accepted: socket.socket) -> None:
    """Take cubic, Linux's own choice, where the machine's congestion control is BBR; reno where that is refused.

    BBR paces what it sends for the sake of long ways with small buffers. Within a cluster batches come in twice to
    three times the time (measured, docs/decisions/0036). Any other choice of the machine's operator stands.
    """
    with contextlib.suppress(OSError):
        if not accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
            return
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
