"""Calls of other users of this node, on a Unix socket that all may connect to: the kernel says who calls.

The frames and the handshake are those of every connection (`framing`), with a token that is no secret.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING

from deeplink.rpc.listeners import ListenError, refused

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.rpc.plain.serving import PlainServer

UNIX = "unix:"
"""How the address of a Unix socket begins; its path follows."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_BACKLOG = 256
_END_S = 1.0
_AGAIN_S = 0.1
"""Nothing is accepted for so long where no descriptor is left."""


def caller_of(connection: socket.socket) -> int | None:
    """Return the number of the user who connected, by the kernel's word; None where it is no Unix socket."""
    if connection.family != socket.AF_UNIX:
        return None
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(said)[1])


class LocalListener:
    """Listens at `path` for all users of this node, and hands connections to a server, from `start` to `close`."""

    def __init__(self, path: Path, server: PlainServer) -> None:
        """Bind the socket; its folder must be there, and nobody else's to write to.

        Raises:
            ListenError: the socket cannot be made, or another process answers there.
        """
        self._path, self._server = path, server
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            _check_free(path)
            draft.unlink(missing_ok=True)
            self._listener.bind(os.fspath(draft))
            draft.chmod(0o666)
            self._listener.listen(_BACKLOG)
            draft.replace(path)  # in place of what a killed agent left
        except OSError as problem:
            self._listener.close()
            draft.unlink(missing_ok=True)
            raise refused(f"{UNIX}{path}", problem) from problem
        except ListenError:
            self._listener.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="deeplink-local", daemon=True)

    def start(self) -> None:
        """Accept from now on."""
        self._server.start()
        self._thread.start()

    def close(self) -> None:
        """Return once nothing is accepted and nothing served any more."""
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._listener.close()
        self._server.stop()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._wake not in dict(poll.poll()):
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                select.select([self._wake], [], [], _AGAIN_S)
                continue
            try:
                self._server.take_in(accepted, f"user {caller_of(accepted)}")
            except OSError:
                accepted.close()


def _check_free(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # noqa: FBT003 - the standard library's
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its queue is full: it lives
            pass
        except OSError:
            return
    remedy = "Stop that one, or set DEEPLINK_NODE_SOCKET= (nothing) for this one."
    raise ListenError(f"{UNIX}{path}", "another agent answers there", remedy)
