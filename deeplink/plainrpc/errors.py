"""How a plain call can fail: one class for each thing a caller may do differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.plainrpc.framing import ErrorCode, Status


class PlainCallError(DeepLinkError):
    """A call did not get all of its replies; the connection must be closed."""

    def __init__(self, address: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{address}: {problem}", remedy=remedy)
        self.address, self.problem = address, problem


class PlainSilentError(PlainCallError):
    """The server did not answer in time, cannot be reached, or ended the connection."""


class PlainLateError(PlainSilentError):
    """The server did not answer in time; that it closed the connection, or cannot be reached, is no such thing."""


def silence(address: str, problem: OSError) -> PlainSilentError:
    """Return the error for what a socket met."""
    kind = PlainLateError if isinstance(problem, TimeoutError) else PlainSilentError
    return kind(address, str(problem))


class PlainStrangerError(PlainSilentError):
    """Something else than a server of ours answered at this address before: it is not shown the token."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "no agent listens there any more: what answered before is none")


class PlainRefusedError(PlainCallError):
    """The server refuses our token."""

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


class PlainFormatError(PlainCallError):
    """What came is not gRPC over HTTP/2, or what was to be sent is too long for it."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem, "Is it an agent of the same release of DeepLink?")


class CallRefusedError(DeepLinkError):
    """A method of ours ends a call with a status; raised by what answers calls of a `PlainServer`."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(f"{status.name}: {why}")
        self.status, self.why = status, why


class SessionError(DeepLinkError):
    """A peer of our server broke HTTP/2's rules, or a bound; its connection must end."""

    def __init__(self, fault: ErrorCode, why: str) -> None:
        super().__init__(f"{fault.name}: {why}")
        self.fault, self.why = fault, why
