"""How a plain call can fail: one class for each thing a caller may do differently."""

from __future__ import annotations

from deeplink.errors import DeepLinkError


class PlainCallError(DeepLinkError):
    """A call did not get all of its replies; the connection must be closed."""

    def __init__(self, address: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{address}: {problem}", remedy=remedy)
        self.address, self.problem = address, problem


class PlainSilentError(PlainCallError):
    """The server did not answer in time, cannot be reached, or ended the connection."""


class PlainRefusedError(PlainCallError):
    """The server refuses our token."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "it refuses our token", "The token file must hold the token of that agent.")


class PlainBusyError(PlainCallError):
    """The server has as many calls to answer as it takes at once."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "the server is busy")


class PlainStatusError(PlainCallError):
    """The call ended with another status than success."""

    def __init__(self, address: str, code: int, details: str) -> None:
        super().__init__(address, f"status {code}: {details}")
        self.code, self.details = code, details


class PlainFormatError(PlainCallError):
    """What came is not gRPC over HTTP/2, or what was to be sent is too long for it."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem, "Is it an agent of the same release of DeepLink?")
