"""What comes of a call: replies as they are received, and the status in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol
from urllib.parse import unquote

from deeplink.plainrpc.errors import (
    PlainBusyError,
    PlainFormatError,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
)
from deeplink.plainrpc.framing import Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST_RETRY_S = 60.0
_MOST_DIGITS = 9


class Receiving(Protocol):
    """Where a reply comes from."""

    def take(self, parts: Sequence[memoryview], size: int) -> None:
        """Fill `parts`, `size` bytes in all, with what comes next."""
        ...

    def take_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        ...

    def refuse(self, problem: str) -> NoReturn:
        """Raise what says that this is no gRPC server of ours."""
        ...


class Incoming:
    """A reply that is being received. Take all of it before the next.

    Attributes:
        left: bytes of it that are not yet taken.
    """

    def __init__(self, connection: Receiving, size: int) -> None:
        self._connection, self.left = connection, size

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes.

        Raises:
            PlainFormatError: the reply has not as many.
        """
        if size > self.left:
            self._connection.refuse("a reply that ends too soon")
        self.left -= size
        return self._connection.take_bytes(size)

    def read_into(self, parts: Sequence[memoryview]) -> None:
        """Fill `parts`, in order, with the next bytes.

        Raises:
            PlainFormatError: the reply has not as many.
        """
        size = sum(map(len, parts))
        if size > self.left:
            self._connection.refuse("a reply that ends too soon")
        self.left -= size
        self._connection.take(parts, size)


def check_status(address: str, fields: Mapping[str, str]) -> None:
    """Return if a call ended well, as its last header block says.

    Raises:
        PlainCallError: it did not; one class for each thing a caller may do differently.
    """
    try:
        code = int(fields.get("grpc-status", "none"))
    except ValueError as problem:
        raise PlainFormatError(address, f"a call without a status ({problem})") from problem
    details = unquote(fields.get("grpc-message", ""))
    if code == Status.UNAUTHENTICATED:
        raise PlainRefusedError(address)
    if code in {Status.CANCELLED, Status.DEADLINE, Status.UNAVAILABLE}:
        raise PlainSilentError(address, details)
    if code == Status.EXHAUSTED:
        raise PlainBusyError(address, _retry_s(fields.get("grpc-retry-pushback-ms", "")))
    if code != Status.OK:
        raise PlainStatusError(address, code, details)


def _retry_s(said: str) -> float:
    if not (said.isascii() and said.isdigit()):
        return 0.0
    # Python refuses to read a number of thousands of digits.
    return min(int(said) / 1000, _LONGEST_RETRY_S) if len(said) <= _MOST_DIGITS else _LONGEST_RETRY_S
