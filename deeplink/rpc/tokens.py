"""Tokens: what every call carries, kept in a file that only its owner can read (0600).

Each attempt of a run has its own, made of a secret that the launcher gives to the run's agents (`RunTokens`).
A site hands one to a group in a file of root's that the group may read and no one else (0640).

Apart from `deeplink.rpc.channel`, because training processes read a token and do not import grpc.
"""

from __future__ import annotations

import base64
import hmac
import logging
import os
import secrets
import stat
import threading
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    Vouch: TypeAlias = Callable[[str], str]
    """Returns a credential of MUNGE's, proof of who says a statement. It may wait, and raise a DeepLinkError."""
    Credentials: TypeAlias = str | Vouch
    """What an agent is shown: its token, or who calls."""

_Shown = TypeVar("_Shown")

log = logging.getLogger(__name__)

TOKEN_HEADER = "deeplink-token"  # noqa: S105 - the name of the header, not a token
_FILE = "token-"
_LONGEST = 256
_OTHERS = 0o077
_OTHERS_OF_ROOTS = 0o037
"""Permissions that only the owner may have; with a file of root's, a group may read, which root has said."""


class TokenError(DeepLinkError):
    """A token cannot be had: its file is absent, unreadable, empty or readable by others, or none came."""


def only(token: str) -> Callable[[str], bool]:
    """Return what tells of a token whether it is this one."""
    return lambda given: hmac.compare_digest(given.encode(), token.encode())


def new_token() -> str:
    """Return a token that cannot be guessed (256 bits)."""
    return secrets.token_urlsafe(32)


def write_token(path: Path, token: str) -> None:
    """Leave `token` in a file only this user can read, never readable by others even for a moment."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)


def make_token(path: Path, token: str) -> None:
    """Leave `token` in a file only this user can read, unless one is there; the first writer wins."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        write_token(draft, token)
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not path.exists():
                draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _unusable(path: Path, problem: str) -> TokenError:
    return TokenError(
        f"token file {path}: {problem}",
        remedy="Inside a job `deeplink run` makes it; a standing agent's token is made by `deeplink node`.",
    )


def read_token(path: Path) -> str:
    """Return the token a file holds."""
    try:
        with path.open(encoding="ascii") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid not in {0, os.geteuid()}:
                raise _unusable(path, f"it belongs to user {found.st_uid}, who knows what it says")
            if mode & (_OTHERS_OF_ROOTS if found.st_uid == 0 else _OTHERS):
                must = "0600, or root's and 0640 for a group"
                raise _unusable(path, f"mode {mode:04o} lets others in; it must be {must}")
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise _unusable(path, str(problem)) from problem
    if not token:
        raise _unusable(path, "it is empty")
    return token


def token_of(secret: str, attempt: Attempt) -> str:
    """Return the token of an attempt.

    >>> token_of("s", Attempt(7, 0, 2))[:6]
    '7.0.2:'
    """
    digest = hmac.new(secret.encode(), f"deeplink attempt {attempt}".encode(), sha256).digest()
    return f"{attempt}:{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def token_file_of(secret_file: Path, attempt: Attempt) -> Path:
    """Return the file with an attempt's token, beside that with the run's secret; it is made if it is not there.

    While the secret cannot be read, as where an agent is being started again, that agent makes it as soon as it
    knows of the attempt.
    """
    path = secret_file.with_name(f"{_FILE}{attempt}")
    try:
        if not path.exists():
            make_token(path, token_of(read_token(secret_file), attempt))
    except (TokenError, OSError) as problem:
        log.warning("%s", problem)
    return path


class RunTokens:
    """The tokens that an agent of a run accepts and shows. Thread-safe."""

    def __init__(self, secret: str, folder: Path | None = None) -> None:
        self.secret, self._folder = secret, None
        self._lock = threading.Lock()
        self._newest: Attempt | None = None
        self._current = ""
        for path in folder.glob(f"{_FILE}*") if folder is not None else ():
            try:
                self.is_valid(read_token(path))
            except TokenError as problem:
                log.warning("%s", problem)
        self._folder = folder

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt that is known; None before any is."""
        return self._newest

    def current(self) -> str:
        """Return the token of the newest attempt; empty before any is known."""
        return self._current

    def is_valid(self, token: str) -> bool:
        """Return whether this is the token of the newest attempt; one of a newer attempt makes that the newest."""
        attempt = self._attempt_of(token)
        if attempt is None:
            return False
        with self._lock:
            if self._newest is None or attempt > self._newest:
                self._newest, self._current = attempt, token
                self._leave(attempt, token)
            return attempt == self._newest

    def named(self, name: str) -> str:
        """Return the token of the attempt of this name; empty where it is no attempt's."""
        try:
            return token_of(self.secret, Attempt.parse(name))
        except AttemptFormatError:
            return ""

    def has_ended(self, token: str) -> bool:
        """Return whether this is the token of an attempt that a newer one has followed."""
        attempt, newest = self._attempt_of(token), self._newest
        return attempt is not None and newest is not None and attempt < newest

    def _attempt_of(self, token: str) -> Attempt | None:
        if len(token) > _LONGEST:
            return None
        try:
            attempt = Attempt.parse(token.partition(":")[0])
        except AttemptFormatError:
            return None
        return attempt if only(token_of(self.secret, attempt))(token) else None

    def _leave(self, attempt: Attempt, token: str) -> None:
        if self._folder is None:
            return
        try:
            path = self._folder / f"{_FILE}{attempt}"
            if not path.exists():
                make_token(path, token)
        except OSError as problem:
            log.warning("the token of attempt %s cannot be left for ranks: %s", attempt, problem)


def shown(token: _Shown | RunTokens) -> _Shown | str:
    """Return what a call carries now."""
    return token.current() if isinstance(token, RunTokens) else token


def accepted(token: str | RunTokens) -> str | Callable[[str], bool]:
    """Return what a server takes: this token, or what tells of one whether it is valid."""
    return token if isinstance(token, str) else token.is_valid


def named(token: str | RunTokens) -> Callable[[str], str]:
    """Return what finds the token that a peer named (`plain.framing.name_of`); empty where there is none."""
    return (lambda _name: token) if isinstance(token, str) else token.named
