"""What can be wrong with the console's own start."""

from __future__ import annotations

from deeplink.errors import DeepLinkError


class ExtraMissingError(DeepLinkError):
    """What serves the page is not installed."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"the console needs the package {module}, which is not installed",
            remedy="pip install 'deeplink[console]'; `deeplink console --json` works without it.",
        )
        self.module = module


class BindRefusedError(DeepLinkError):
    """The console was to listen beyond this machine without a token."""

    exit_code = 2

    def __init__(self, bind: str) -> None:
        super().__init__(
            f"{bind} is reachable from other machines, and the console would ask nobody who they are",
            remedy="Give --token-file FILE (0600), or stay on 127.0.0.1: `ssh -L 8642:127.0.0.1:8642 HOST`.",
        )
        self.bind = bind


class BindFormatError(DeepLinkError):
    """A text that should be an address to listen on is none."""

    exit_code = 2

    def __init__(self, bind: str, problem: str) -> None:
        super().__init__(f"{bind!r} is no HOST:PORT to listen on: {problem}", remedy="For example 127.0.0.1:8642.")
        self.bind, self.problem = bind, problem
