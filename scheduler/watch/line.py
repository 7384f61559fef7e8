"""The way from who tells the site's watchdog something to the watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from deeplink.tokens import read_token
from deeplink.v1 import watch_pb2_grpc
from deeplink.wire import open_channel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Line:
    """A connection that is opened when it is needed, and anew after each failure, with the token as it is then.

    Who tells lives for weeks: the watchdog may come up after it, or get another token meanwhile.
    """

    def __init__(self, address: str, token_file: Path) -> None:
        self._address, self._token_file = address, token_file
        self._channel: grpc.Channel | None = None

    def call(self, say: Callable[[Any], Any]) -> Any:
        """Return what `say` returns, which is given a stub of the watchdog's service and bounds the call itself.

        Raises:
            grpc.RpcError: the watchdog was not reached, or refused.
            TokenFileError: the token cannot be read.
        """
        channel = self._channel
        if channel is None:
            channel = self._channel = open_channel(self._address, read_token(self._token_file))
        try:
            return say(watch_pb2_grpc.WatchStub(channel))
        except grpc.RpcError:
            self.close()
            raise

    def close(self) -> None:
        """Give up a call under way; the next one connects anew."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
