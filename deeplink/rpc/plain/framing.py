"""Frames between our own clients and agents: the mutual proof of the token, then calls with answers. Pure.

A client says a hello, an agent a challenge with its proof that it knows the token, the client its own proof; the
token never travels. Who has none says so in the hello, and in place of the proof shows a credential that says it:
MUNGE tells whose it is. Then one call at a time: a CALL is answered by PARTs and one END. Numbers are little
endian.
"""

from __future__ import annotations

import hmac
import struct
from collections import deque
from enum import IntEnum
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.rpc.tokens import Credentials

MAGIC = b"\xd1DEEPLNK"
"""How a client begins; one of HTTP/2 begins with another byte."""
VERSION, _VERSION_AT = 2, len(MAGIC)
HELLO = struct.Struct("<8sHxx32s48s")
"""MAGIC, VERSION, the client's nonce, the name of its token in ASCII with zeros behind it."""
HEAD = struct.Struct("<BBHII")
"""Kind, status, length of the method's name, length of what follows that, value."""
NONCE_BYTES = PROOF_BYTES = 32
NO_SECRET = "local"  # noqa: S105 - it is none
"""The token, in name alone, of who has none: the kernel says who calls, or MUNGE."""
LARGEST_REQUEST = 60_000
"""Bytes of a request."""
LARGEST_PART = 64 << 20
"""Bytes of one part of an answer; of texts and challenges `LONGEST_TEXT`."""
LONGEST_TEXT = 2048
_LONGEST_METHOD = 128
_LONGEST_CREDENTIAL = 4096
_MOST_WAITING = 32
_LONGEST_RETRY_S = 60.0


class FrameKind(IntEnum):
    """What a frame is."""

    CHALLENGE = 1  # agent: nonce, proof, its node's name
    PROOF = 2  # client: its proof
    CALL = 3  # client: method's name, request
    PART = 4  # agent: one message of an answer; another frame follows
    END = 5  # agent: the answer's end, with a text that says why; the value is when to ask again, milliseconds
    CREDENTIAL = 6  # client: a credential that says what would be its proof, in place of that


class Status(IntEnum):
    """How an answer ended: gRPC's statuses."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID = 3
    DEADLINE = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class SessionError(DeepLinkError):
    """A client broke the rules of its connection, or a bound; its connection must end."""

    def __init__(self, why: str, status: Status = Status.INVALID) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class CallRefusedError(DeepLinkError):
    """A method of ours ends a call with a status; raised by what answers calls of a `PlainServer`."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"{Status(status).name}: {why}")
        self.status, self.why = status, why


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


class Head(NamedTuple):
    """What a frame begins with; `method` and `size` are the lengths of what follows."""

    kind: int
    status: int
    method: int
    size: int
    value: int


def name_of(token: str) -> str:
    """Return what may be said openly of a token: the attempt that it is of; empty where it is of none.

    >>> name_of("7.0.2:x"), name_of("x:y")
    ('7.0.2', '')
    """
    name = token.partition(":")[0]
    try:
        return str(Attempt.parse(name)) if name != token else ""
    except AttemptFormatError:
        return ""


def hello(nonce: bytes, shown: Credentials) -> bytes:
    """Return what a client says first; `nonce` has `NONCE_BYTES` that nobody can foresee."""
    name = name_of(shown) if isinstance(shown, str) else NO_SECRET
    return HELLO.pack(MAGIC, VERSION, nonce, name.encode())


def proof(token: str, side: bytes, said: bytes, nonce: bytes, node: bytes) -> bytes:
    """Return what shows that a side (b"agent" or b"client") knows the token.

    It holds for one connection: `said` is the client's hello with its nonce, `nonce` the agent's, `node` its name.
    """
    return hmac.new(token.encode(), b"deeplink %b %b%b%b" % (side, said, nonce, node), sha256).digest()


def challenge(token: str, said: bytes, nonce: bytes, node: str) -> bytes:
    """Return an agent's answer to the hello `said`."""
    name = node.encode()
    payload = nonce + proof(token, b"agent", said, nonce, name) + name
    return HEAD.pack(FrameKind.CHALLENGE, 0, 0, len(payload), 0) + payload


def answered(shown: Credentials, said: bytes, payload: bytes) -> tuple[bytes, str]:
    """Return the frame with a client's proof, and the node's name, for a CHALLENGE's payload.

    Raises:
        PermissionError: who sent it does not know the token.
        ValueError: it is no challenge.
    """
    if len(payload) < NONCE_BYTES + PROOF_BYTES:
        raise ValueError("a challenge that is none")
    nonce, given = payload[:NONCE_BYTES], payload[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
    node = payload[NONCE_BYTES + PROOF_BYTES :]
    token = shown if isinstance(shown, str) else NO_SECRET
    if not hmac.compare_digest(given, proof(token, b"agent", said, nonce, node)):
        raise PermissionError("it does not know the token")
    ours, kind = proof(token, b"client", said, nonce, node), FrameKind.PROOF
    if not isinstance(shown, str):
        ours, kind = shown(ours.hex()).encode(), FrameKind.CREDENTIAL
    return HEAD.pack(kind, 0, 0, len(ours), 0) + ours, node.decode()


def call(method: str, message: bytes) -> bytes:
    """Return the frame of a call of `/package.Service/Method`."""
    name = method.encode()
    return HEAD.pack(FrameKind.CALL, 0, len(name), len(message), 0) + name + message


def part(size: int) -> bytes:
    """Return the head of a part of `size` bytes."""
    return HEAD.pack(FrameKind.PART, 0, 0, size, 0)


def end(status: int, why: str = "", *, retry_ms: int = 0) -> bytes:
    """Return the frame that ends an answer."""
    text = why.encode(errors="replace")[:LONGEST_TEXT]
    return HEAD.pack(FrameKind.END, status, 0, len(text), retry_ms) + text


def head_of(data: bytes) -> Head:
    """Return the head of what an agent says, from `HEAD.size` bytes; ValueError where no agent says that."""
    found = Head(*HEAD.unpack(data))
    longest = LARGEST_PART if found.kind == FrameKind.PART else LONGEST_TEXT
    if found.kind not in {FrameKind.CHALLENGE, FrameKind.PART, FrameKind.END}:
        raise ValueError(f"a frame of kind {found.kind}")
    if found.method or found.size > longest:
        raise ValueError(f"a frame of {found.size} bytes")
    return found


def retry_s(value_ms: int) -> float:
    """Return when to ask again, as an END's value says, within reason."""
    return min(value_ms / 1000, _LONGEST_RETRY_S)


class CallRequest(NamedTuple):
    """A call that has come."""

    method: str
    message: bytes


class Inbound:
    """What one client says, taken apart. Not thread-safe.

    Attributes:
        token: that the client has proved to know; empty before.
        said: what is to be sent to it besides answers.
        requests: calls that are to be answered, in order.
        credential: that is to be decoded, and the statement that it must hold, before anything else is taken.
    """

    def __init__(self, find: Callable[[str], str], node: str, nonce: bytes, *, takes_users: bool = False) -> None:
        """`find` returns the token of a name, or an empty one; `nonce` is as in `hello`."""
        self._find, self._node, self._nonce, self._takes_users = find, node, nonce, takes_users
        self._unread = self._hello = b""
        self._token = self.token = ""
        self.credential: tuple[str, str] | None = None
        self.said = b""
        self.requests: deque[CallRequest] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing has come that is not taken."""
        return not (self._unread or self.requests)

    def receive(self, data: bytes) -> None:
        """Take in what came; SessionError where no client of ours says that."""
        data, at = self._unread + data, 0
        if not self._hello:
            at = self._take_hello(data)
        while self._hello and not self.credential and len(data) - at >= HEAD.size:
            found = Head(*HEAD.unpack_from(data, at))
            begin, stop = at + HEAD.size, at + HEAD.size + found.method + found.size
            self._check(found)
            if stop > len(data):
                break
            self._take(data[begin : begin + found.method], data[begin + found.method : stop])
            at = stop
        self._unread = data[at:]

    def believe(self) -> None:
        """Go on: the credential is that of this connection."""
        self.token, self.credential = NO_SECRET, None
        self.receive(b"")

    def _take_hello(self, data: bytes) -> int:
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise SessionError("this is an agent of DeepLink")
        if len(data) < _VERSION_AT + 2:
            return 0
        version = int.from_bytes(data[_VERSION_AT : _VERSION_AT + 2], "little")  # stands there in every version
        if version != VERSION:
            raise SessionError(
                f"it speaks version {version} of the frames, this agent {VERSION}: run one release on all nodes",
                Status.FAILED_PRECONDITION,
            )
        if len(data) < HELLO.size:
            return 0
        name = HELLO.unpack_from(data)[3].rstrip(b"\0").decode("ascii", "replace")
        self._takes_users = self._takes_users and name == NO_SECRET
        self._token = NO_SECRET if self._takes_users else self._find(name)
        if not self._token:
            raise SessionError("it names no token that is known here", Status.UNAUTHENTICATED)
        self._hello = data[: HELLO.size]
        self.said = challenge(self._token, self._hello, self._nonce, self._node)
        return HELLO.size

    def _check(self, found: Head) -> None:
        is_proof = found.kind == FrameKind.PROOF and (found.method, found.size) == (0, PROOF_BYTES)
        if self._takes_users:
            is_proof = (
                found.kind == FrameKind.CREDENTIAL and not found.method and found.size <= _LONGEST_CREDENTIAL
            )
        is_call = found.kind == FrameKind.CALL and found.method <= _LONGEST_METHOD
        if not (is_call if self.token else is_proof):
            raise SessionError(f"a frame of kind {found.kind} out of its place")
        if found.size > LARGEST_REQUEST:
            raise SessionError(f"a request of {found.size} bytes, at most {LARGEST_REQUEST} are taken")
        if len(self.requests) >= _MOST_WAITING:
            raise SessionError("calls without end", Status.EXHAUSTED)

    def _take(self, method: bytes, message: bytes) -> None:
        if self.token:
            self.requests.append(CallRequest(method.decode("ascii", "replace"), message))
            return
        wanted = proof(self._token, b"client", self._hello, self._nonce, self._node.encode())
        if self._takes_users:
            self.credential = message.decode("ascii", "replace"), wanted.hex()
            return
        if not hmac.compare_digest(message, wanted):
            raise SessionError("its proof of the token is wrong", Status.UNAUTHENTICATED)
        self.token = self._token
