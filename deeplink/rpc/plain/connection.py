"""A client's connection to an agent: one call at a time, one request, any number of replies.

Replies are received straight into the memory they are wanted in.
"""

from __future__ import annotations

import secrets
import select
from typing import TYPE_CHECKING, NoReturn

from deeplink.core.errors import DeepLinkError
from deeplink.rpc.plain import framing
from deeplink.rpc.plain.framing import HEAD, LARGEST_REQUEST, FrameKind, Status
from deeplink.rpc.plain.link import StreamConnection
from deeplink.rpc.resolving import UnresolvedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from deeplink.core.clock import Clock
    from deeplink.rpc.plain.framing import Head

_SAME_RELEASE = "Is it an agent of the same release of DeepLink?"


class PlainCallError(DeepLinkError):
    """A call did not get all of its replies; the connection must be closed."""

    def __init__(self, address: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{address}: {problem}", remedy=remedy)
        self.address, self.problem = address, problem


class PlainSilentError(PlainCallError):
    """The server did not answer in time (`is_late`), cannot be reached, or ended the connection."""

    def __init__(self, address: str, problem: str, *, is_late: bool = False) -> None:
        super().__init__(address, problem)
        self.is_late = is_late


class PlainRefusedError(PlainCallError):
    """The server refuses our token, or does not know it."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "it refuses our token", "The token file must hold the token of that agent.")


class PlainBusyError(PlainCallError):
    """The server has as many calls to answer as it takes at once; `retry_s`: when it may be asked again."""

    def __init__(self, address: str, retry_s: float = 0.0) -> None:
        super().__init__(address, "the server is busy")
        self.retry_s = retry_s


class PlainStatusError(PlainCallError):
    """The call ended with another status than success."""

    def __init__(self, address: str, code: int, details: str) -> None:
        super().__init__(address, f"status {code}: {details}")
        self.code, self.details = code, details


def check_status(address: str, code: int, details: str, retry_s: float = 0.0) -> None:
    """Return if a call ended well, as its last frame says."""
    if code == Status.UNAUTHENTICATED:
        raise PlainRefusedError(address)
    if code in {Status.CANCELLED, Status.DEADLINE, Status.UNAVAILABLE}:
        raise PlainSilentError(address, details)
    if code == Status.EXHAUSTED:
        raise PlainBusyError(address, retry_s)
    if code != Status.OK:
        raise PlainStatusError(address, code, details)


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
        self._count(size)
        return self._connection.take_bytes(size)

    def read_into(self, parts: Sequence[memoryview], *, ends: bool = False) -> None:
        """Fill `parts`, in order, with the next bytes; `ends`: these are the last, and what follows comes soon."""
        self._count(sum(map(len, parts)))
        self._connection.take(parts, then=HEAD.size if ends and not self.left else 0)

    def _count(self, size: int) -> None:
        if size > self.left:
            self._connection.refuse("a reply that ends too soon")
        self.left -= size


class PlainConnection:
    """A connection to one agent, for one call at a time. Not thread-safe. Close it when done, and after an error.

    Connecting begins at once and does not wait; the first call does, until its deadline. The token does not
    travel: both ends prove that they know it.

    Attributes:
        address: of the agent.
        is_used: whether a call has succeeded on it; if the next fails, the agent may just have closed it since.
    """

    def __init__(self, address: str, token: str, clock: Clock, *, node: str = "") -> None:
        """`node` is the name that the agent must prove to have; empty for any."""
        self.address, self._token, self._node = address, token, node
        self._hello = framing.hello(secrets.token_bytes(framing.NONCE_BYTES), token)
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
        return self._go_on(waits=False)

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
            proof, node = framing.answered(self._token, self._hello, payload)
        except PermissionError as problem:
            raise PlainRefusedError(self.address) from problem
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
            return self.advance() and self._link.has(HEAD.size)
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
