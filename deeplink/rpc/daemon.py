"""The start and end of every daemon of ours: name, address, token, folder, notice to systemd."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import select
import shutil
import signal
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder, runtime_base
from deeplink.core.types import NodeName
from deeplink.rpc.tokens import TokenError, make_token, new_token, read_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

TOKEN_WAIT_S = 20.0
LONGEST_TOKEN = 1024


def split_bind(bind: str) -> tuple[str, int]:
    """Return host and port of `host:port` (`[v6]:port` for IPv6).

    >>> split_bind("0.0.0.0:0")
    ('0.0.0.0', 0)
    """
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:  # noqa: PLR2004
        raise DeepLinkError(
            f"cannot listen on {bind}: not HOST:PORT",
            remedy="Give HOST:PORT; port 0 picks a free one.",
            exit_code=2,
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches `host`; a name other than localhost counts as wide.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "n0")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def runtime_folder(
    node: str, env: Mapping[str, str] | None = None, *, again: Path | None = None
) -> Iterator[Path]:
    """Give a node-local folder that only this user can enter; it is removed at the end."""
    env = os.environ if env is None else env
    if again is not None and _is_ours_alone(again):
        folder = again
    else:
        prefix = f"deeplink-{os.getuid()}-{env.get('SLURM_JOB_ID', 'nojob')}-{node}-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=runtime_base(env)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_ours_alone(folder: Path) -> bool:
    try:
        private_folder(folder, parents=False)
    except OSError:
        return False
    return True


def standing_token(given: Path | None, default: Path) -> tuple[str, Path]:
    """Return the token of a daemon, and where it lies; the file is made with a new token when it is not there."""
    path = (given or default).absolute()
    try:
        if not path.exists():
            if given is None:
                private_folder(path.parent, group_reads=True)
            make_token(path, new_token())
    except OSError as problem:
        raise DeepLinkError(
            f"token file {path} is not there and cannot be made: {problem.strerror or problem}",
            remedy="Make its folder first, or name a file in a folder that you may write to.",
            exit_code=2,
        ) from problem
    return read_token(path), path


def _no_secret(problem: str) -> TokenError:
    return TokenError(
        f"no secret on standard input: {problem}",
        remedy="`deeplink run` starts the agents of a job; one that stands is started without --job.",
    )


def read_token_line(descriptor: int, clock: Clock | None = None) -> str:
    """Return the first line that can be read from `descriptor`, without reading past a pipe's first line's end."""
    clock = clock or SystemClock()
    deadline = clock.monotonic() + TOKEN_WAIT_S
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - clock.monotonic()))
        if not ready:
            raise _no_secret(f"nothing came within {TOKEN_WAIT_S:g} s")
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
        if len(line) > LONGEST_TOKEN:
            raise _no_secret(f"the line is longer than {LONGEST_TOKEN} bytes")
    try:
        token = line.decode("ascii").strip()
    except UnicodeDecodeError:
        raise _no_secret("the line is not plain ASCII") from None
    if not token:
        raise _no_secret("the line is empty")
    return token


def member_name(given: str, env: Mapping[str, str] | None = None) -> NodeName:
    """Return `given`, or this node's name in Slurm, or the host name."""
    name = given or (os.environ if env is None else env).get("SLURMD_NODENAME", "") or socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise DeepLinkError(
            f"{name!r} cannot be a member's name",
            remedy="Give --name NODE: letters, digits, dots, hyphens, underscores.",
            exit_code=2,
        )
    return NodeName(name)


def ending_signals(*more: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return what ends a daemon: of SIGINT and `more` what its caller does not ignore, and SIGTERM at last.

    nohup ignores SIGHUP, a shell ignores SIGINT for its background jobs: POSIX has a program go on ignoring it.
    """
    offered = (signal.SIGINT, *more)
    return (*(one for one in offered if signal.getsignal(one) is not signal.SIG_IGN), signal.SIGTERM)


def notify_systemd(state: str) -> None:
    """Tell systemd (Type=notify, sd_notify(3)); nothing happens where it did not ask."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        try:
            notifier.sendto(state.encode(), "\0" + where[1:] if where.startswith("@") else where)
        except OSError as problem:
            log.warning("systemd could not be notified of %s: %s", state, problem)
