"""What every try to deliver a message has in common: how it fails, when it is cut off, whom it trusts."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONGEST_ANSWER = 200
AGAIN_S = 0.5


class NotSentError(DeepLinkError):
    """A message was not taken. What is said of it holds no URL, no password, and at most a line of the answer.

    Attributes:
        after_s: the other side asked to be left alone for so long; 0: it did not say.
    """

    def __init__(self, channel: str, problem: str, after_s: float = 0.0) -> None:
        line = " ".join(problem.split())[:LONGEST_ANSWER]
        super().__init__(
            f"channel {channel}: {line}", remedy="`deeplink watch --notify-test` tries every channel."
        )
        self.channel, self.problem, self.after_s = channel, line, after_s


@contextlib.contextmanager
def cut_off(after_s: float, socket_of: Callable[[], socket.socket | None]) -> Iterator[None]:
    """Shut a connection once the time is up: a socket's own timeout bounds each read, not a whole slow answer.

    One that is made only then, to the second of a host's addresses, is shut as well.
    """
    done = threading.Event()

    def cut() -> None:
        wait_s = after_s
        while not done.wait(wait_s):
            wait_s = AGAIN_S
            held = socket_of()
            if held is not None:
                with contextlib.suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=cut, name="deeplink-notify-cut", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """Return what certificates are checked by: the system's authorities, or those of a file alone.

    Raises:
        OSError: the file cannot be read, or holds none.
    """
    return ssl.create_default_context(cafile=ca_file)
