"""A client's connection to an agent: one call at a time, one request, any number of replies.

Replies are received straight into the memory they are wanted in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, NoReturn

from deeplink.core.errors import DeepLinkError
from deeplink.rpc.plain import framing
from deeplink.rpc.plain.framing import (
    HEAD,
    LARGEST_REQUEST,
    FrameKind,
    PlainCallError,
    PlainRefusedError,
    PlainSilentError,
    check_status,
)
from deeplink.rpc.plain.local_socket import UNIX
from deeplink.rpc.resolving import UnresolvedError, addresses, split_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from deeplink.core.clock import Clock
    from deeplink.rpc.plain.framing import Head
    from deeplink.rpc.tokens import Credentials

_SAME_RELEASE = "Is it an agent of the same release of DeepLink?"
_BUFFER = 1 << 14
_SLACK_S = 0.02  # of a deadline, which saves a system call at most reads
_MOST_PARTS = 1024  # in one call: IOV_MAX
_TIME = struct.Struct("ll")  # struct timeval


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
    return count


class StreamConnection:
    """A connection to `host:port`, or to `unix:PATH`, begun when it is made; `establish` waits for it.

    What it raises is OSError: TimeoutError where the deadline has passed, ConnectionResetError where the other end
    has closed. Close it then.

    Attributes:
        deadline: by the clock's monotonic time, until when whatever is waited for must have happened.
        patience_s: how long the other end may stand still before the deadline; 0: until then.
        is_established: whether bytes can be sent.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        """Begin to connect."""
        self._clock = clock
        self.deadline = self.patience_s = 0.0
        self.is_established = False
        self._addresses: list[tuple[int, int, int, str, Any]] = (
            [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", address.removeprefix(UNIX))]
            if address.startswith(UNIX)
            else addresses(*split_address(address), clock)
        )
        self._socket = self._next_socket()
        # Small reads are served from here, so that a frame's header costs no system call.
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._armed: dict[int, float] = {}

    def _next_socket(self) -> socket.socket:
        """Return a socket that connects to the next of the host's addresses (`localhost` has two)."""
        while True:
            family, kind, protocol, _, address = self._addresses.pop(0)
            connection = socket.socket(family, kind, protocol)
            try:
                if family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)  # noqa: FBT003 - the standard library's
                with contextlib.suppress(BlockingIOError):
                    connection.connect(address)
            except OSError:
                connection.close()
                if not self._addresses:
                    raise
            else:
                return connection

    def establish(self) -> None:
        """Wait until the connection stands."""
        self._stands(max(self.deadline - self._clock.monotonic(), 0.001))

    def stands(self) -> bool:
        """Tell whether the connection stands, without waiting."""
        return self._stands(0.0)

    def _stands(self, wait_s: float) -> bool:
        while not self.is_established:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(wait_s * 1000):
                if wait_s:
                    raise TimeoutError("no connection in time")
                return False
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                self._socket.setblocking(True)  # noqa: FBT003 - the standard library's
                self.is_established = True
            elif self._addresses:
                self._socket.close()
                self._socket = self._next_socket()
            else:
                raise OSError(code, os.strerror(code))
        return True

    def fileno(self) -> int:
        """Return the socket's number; another one until the connection stands."""
        return self._socket.fileno()

    def is_ready(self, events: int) -> bool:
        """Tell, without waiting, whether one of poll's events has come, or the connection has failed."""
        if events & select.POLLIN and self._end > self._start:
            return True
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(0))

    def _arm(self, option: int) -> None:
        """Let the kernel end the next call at the deadline: it counts all of a call's waits, not each."""
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        if option == socket.SO_RCVTIMEO and self.patience_s:
            left = min(left, self.patience_s)
        if abs(left - self._armed.get(option, 0.0)) <= _SLACK_S:
            return
        seconds, microseconds = divmod(int(left * 1e6) + 1, 1_000_000)  # EDOM for a whole million
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(seconds, microseconds))
        self._armed[option] = left

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        left = memoryview(data)
        try:
            while left:
                self._arm(socket.SO_SNDTIMEO)
                left = left[self._socket.send(left) :]
        except BlockingIOError as problem:
            raise TimeoutError("timed out") from problem

    def _receive(self, into: memoryview) -> int:
        self._arm(socket.SO_RCVTIMEO)
        try:
            count = self._socket.recv_into(into)
        except BlockingIOError as problem:
            raise TimeoutError("timed out") from problem
        return _some(count)

    def read(self, wanted: int) -> bytes:
        """Return the next `wanted` bytes."""
        if wanted > _BUFFER:
            whole = bytearray(wanted)
            self.read_into([memoryview(whole)])
            return bytes(whole)
        if self._end - self._start < wanted:
            self._fill(wanted)
        found = bytes(self._buffer[self._start : self._start + wanted])
        self._start += wanted
        return found

    def _move_up(self) -> None:
        held = self._end - self._start
        self._buffer[:held] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, held

    def _fill(self, least: int) -> None:
        self._move_up()
        while self._end < least:
            self._end += self._receive(self._buffer[self._end :])

    def has(self, wanted: int) -> bool:
        """Tell, without waiting, whether so many bytes have come; never of more than are read ahead."""
        if self._end - self._start < wanted <= _BUFFER:
            self._move_up()
            try:
                self._end += _some(self._socket.recv_into(self._buffer[self._end :], 0, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return False
        return self._end - self._start >= wanted

    def ahead(self, wanted: int) -> bytes:
        """Return the next bytes, which `has` found, and leave them to be read."""
        return bytes(self._buffer[self._start : self._start + wanted])

    def read_into(self, parts: Sequence[memoryview], *, then: int = 0) -> None:
        """Fill `parts`, in order, with the next bytes; straight from the socket but for what was read ahead.

        `then` more bytes, which must follow, are read ahead in the same call.
        """
        at = 0
        left = [part for part in parts if part.nbytes]
        while at < len(left) and self._start < self._end:
            done = min(self._end - self._start, len(left[at]))
            left[at][:done] = self._buffer[self._start : self._start + done]
            self._start += done
            left[at] = left[at][done:]
            at += not left[at]
        if at == len(left):
            return
        self._start = self._end = 0  # nothing is read ahead
        if then:
            left.append(self._buffer[:then])
        while at < len(left):
            # Before each piece: a peer that sends a byte now and then must not keep us beyond the deadline.
            self._arm(socket.SO_RCVTIMEO)
            try:
                some = left[at : at + _MOST_PARTS]
                count = _some(self._socket.recvmsg_into(some, 0, socket.MSG_WAITALL)[0])
            except BlockingIOError as problem:
                raise TimeoutError("timed out") from problem
            while at < len(left) and count >= len(left[at]):
                count -= len(left[at])
                at += 1
            if count:
                left[at] = left[at][count:]
        self._end = then

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()


def _silence(address: str, problem: OSError) -> PlainSilentError:
    return PlainSilentError(address, str(problem), is_late=isinstance(problem, TimeoutError))


class Incoming:
    """A reply that is being received. Take all of it before the next.

    Attributes:
        left: bytes of it that are not yet taken.
    """

    def __init__(self, connection: PlainConnection, size: int) -> None:
        self._connection, self.left = connection, size

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > self.left:
            self._connection.refuse("a reply that ends too soon")
        self.left -= size
        return self._connection.take_bytes(size)

    def read_into(self, parts: Sequence[memoryview], *, ends: bool = False) -> None:
        """Fill `parts`, in order, with the next bytes; `ends`: these are the last, and what follows comes soon."""
        self.left -= sum(map(len, parts))
        if self.left < 0:
            self._connection.refuse("a reply that ends too soon")
        self._connection.take(parts, then=HEAD.size if ends and not self.left else 0)


class PlainConnection:
    """A connection to one agent, for one call at a time. Not thread-safe. Close it when done, and after an error.

    Connecting begins at once and does not wait; the first call does, until its deadline. The token does not
    travel: both ends prove that they know it. Proof of the user is waited for when the agent asks for it.

    Attributes:
        address: of the agent.
        is_used: whether a call has succeeded on it; if the next fails, the agent may just have closed it since.
    """

    def __init__(self, address: str, shown: Credentials, clock: Clock, *, node: str = "") -> None:
        """`node` is the name that the agent must prove to have; empty for any."""
        self.address, self._shown, self._node = address, shown, node
        self._hello = framing.hello(secrets.token_bytes(framing.NONCE_BYTES), shown)
        self._is_greeted = self._is_proven = self.is_used = False
        self._unsent = b""
        try:
            self._link = StreamConnection(address, clock)
        except (OSError, ValueError, UnresolvedError) as problem:
            raise PlainSilentError(address, str(problem)) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._link.close()

    @property
    def awaits(self) -> tuple[int, int]:
        """The socket's number, and which of poll's events it waits for; another number until it stands."""
        return self._link.fileno(), select.POLLIN if self._is_greeted else select.POLLOUT

    def call(self, method: str, message: bytes, deadline: float) -> bytes:
        """Make a call that has one reply, and return it. See `send` and `replies`."""
        self.send(method, message, deadline)
        found = list(self.replies())
        if len(found) != 1:
            raise PlainCallError(self.address, f"{len(found)} replies instead of one", _SAME_RELEASE)
        return found[0]

    def send(self, method: str, message: bytes, deadline: float) -> None:
        """Begin a call of `/package.Service/Method`; sends now if that needs no waiting, else in `replies`."""
        if len(message) > LARGEST_REQUEST:
            raise PlainCallError(
                self.address,
                f"a request of {len(message)} bytes is too long, at most {LARGEST_REQUEST} can be sent",
            )
        self._link.deadline, self._link.patience_s = deadline, 0.0
        self._unsent = framing.call(method, message)
        self.advance()

    def advance(self) -> bool:
        """Go on, without waiting, towards the call that was begun by `send`; tell whether it is sent."""
        return not self._unsent or self._go_on(waits=False)

    def flush(self) -> None:
        """Send the call that was begun by `send`, if that needed waiting; waits for it."""
        self._go_on(waits=True)

    def _go_on(self, *, waits: bool) -> bool:
        if not self._unsent:
            return True
        try:
            if not self._is_greeted:
                if waits:
                    self._link.establish()
                elif not self._link.stands():
                    return False
                self._link.send(self._hello)
                self._is_greeted = True
            if not self._is_proven:
                if not waits and not self._is_challenged():
                    return False
                self._unsent = self._proof() + self._unsent
                self._is_proven = True
            unsent, self._unsent = self._unsent, b""
            self._link.send(unsent)
        except (OSError, PlainSilentError) as problem:
            raise self._unproven(problem) from problem
        return True

    def _unproven(self, problem: OSError | PlainSilentError) -> PlainSilentError:
        """Return the error for an agent that ends the connection instead of proving that it knows the token."""
        found = problem if isinstance(problem, PlainSilentError) else _silence(self.address, problem)
        if found.is_late or self._is_proven or not self._is_greeted:
            return found
        return PlainSilentError(self.address, f"{found.problem}, unproven: an agent of another release, or none")

    def _is_challenged(self) -> bool:
        if not self._link.has(HEAD.size):
            return False
        return self._link.has(HEAD.size + self._checked(self._link.ahead(HEAD.size)).size)

    def _proof(self) -> bytes:
        found = self._next_frame()
        payload = self._link.read(found.size)
        if found.kind == FrameKind.END:
            self._ended(found, payload)
        try:
            proof, node = framing.answered(self._shown, self._hello, payload)
        except PermissionError as problem:
            raise PlainRefusedError(self.address) from problem
        except DeepLinkError as problem:
            raise PlainCallError(self.address, str(problem), problem.remedy) from problem
        except ValueError as problem:
            self.refuse(str(problem))
        if self._node not in {"", node}:
            what = f"that is the agent of node {node}, not of {self._node}"
            raise PlainCallError(self.address, what, "The list of members must name each node's own agent.")
        return proof

    def postpone(self, deadline: float) -> None:
        """Let the call begun by `send` go on until `deadline`, if it can go on at all at this moment.

        For who waited for another server meanwhile: what has come from this one in time is not late.
        """
        if deadline > self._link.deadline:
            goes_on = self._link.is_ready(self.awaits[1])
            self._link.deadline = deadline if goes_on else self._link.deadline

    def has_begun(self) -> bool:
        """Tell, without waiting, whether the call's answer has begun to come or has failed."""
        try:
            return (not self._unsent or self.advance()) and self._link.has(HEAD.size)
        except (OSError, PlainCallError):
            return True  # the caller that takes the answer meets it too

    def replies(self) -> Iterator[bytes]:
        """Yield the replies of the call begun by `send`. See `incoming`."""
        for reply in self.incoming():
            yield reply.read(reply.left)

    def incoming(self, *, patience_s: float = 0.0) -> Iterator[Incoming]:
        """Yield the replies of the call begun by `send`, as they begin to come.

        The connection can be used again once all were taken, and must be closed after an error.
        """
        self.flush()
        while (found := self._next_frame()).kind == FrameKind.PART:
            self._link.patience_s = patience_s
            reply = Incoming(self, found.size)
            yield reply
            if reply.left:
                self.take_bytes(reply.left)
        if found.kind != FrameKind.END:
            self.refuse("a challenge in the middle of a call")
        self._ended(found, self.take_bytes(found.size))
        self.is_used = True

    def _ended(self, found: Head, text: bytes) -> None:
        check_status(self.address, found.status, text.decode(errors="replace"), framing.retry_s(found.value))

    def take_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes of the call; `Incoming` asks for them."""
        try:
            return self._link.read(size)
        except OSError as problem:
            raise _silence(self.address, problem) from problem

    def take(self, parts: Sequence[memoryview], *, then: int) -> None:
        """Fill `parts` with what comes next in the call, and read `then` more ahead; `Incoming` asks for it."""
        try:
            self._link.read_into(parts, then=then)
        except OSError as problem:
            raise _silence(self.address, problem) from problem

    def refuse(self, problem: str) -> NoReturn:
        """Raise what says that this is no agent of ours, or of another release."""
        raise PlainCallError(self.address, problem, _SAME_RELEASE)

    def _next_frame(self) -> Head:
        return self._checked(self.take_bytes(HEAD.size))

    def _checked(self, head: bytes) -> Head:
        try:
            found = framing.head_of(head)
        except ValueError as problem:
            self.refuse(str(problem))
        if found.kind == FrameKind.PART and not self._is_proven:
            self.refuse("an answer of who has not proved to know the token")
        return found
