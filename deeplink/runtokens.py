"""The tokens of a run: each attempt has its own, made of a secret that the launcher gives to the run's agents.

A token names its attempt and carries a keyed digest of that (`7.0.2:...`). Ranks show their attempt's: who saw it
can make no other attempt's of it. An agent learns of a newer attempt by the first token of it that it is shown,
which proves itself, and takes no older one from then on. The secret goes to the agents' input, and into no call.
"""

from __future__ import annotations

import base64
import hmac
import logging
import threading
from hashlib import sha256
from typing import TYPE_CHECKING

from deeplink.tokens import TokenFileError, make_token, read_token
from deeplink.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

_FILE = "token-"
_LONGEST = 256


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
    except (TokenFileError, OSError) as problem:
        log.warning("%s", problem)
    return path


class RunTokens:
    """What an agent of a run is shown and shows. Thread-safe.

    Args:
        secret: the run's.
        folder: node-local, this user's alone: the newest attempt's token is left there, for the node's ranks and
            for an agent that comes after this one, which so takes no older one either.
    """

    def __init__(self, secret: str, folder: Path | None = None) -> None:
        self._secret, self._folder = secret, None
        self._lock = threading.Lock()
        self._newest: Attempt | None = None
        self._current = ""
        for path in folder.glob(f"{_FILE}*") if folder is not None else ():
            try:
                self.is_valid(read_token(path))
            except TokenFileError as problem:
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
        return attempt if hmac.compare_digest(token.encode(), token_of(self._secret, attempt).encode()) else None

    def _leave(self, attempt: Attempt, token: str) -> None:
        if self._folder is None:
            return
        try:
            path = self._folder / f"{_FILE}{attempt}"
            if not path.exists():
                make_token(path, token)
        except OSError as problem:
            log.warning("the token of attempt %s cannot be left for ranks: %s", attempt, problem)


def shown(token: str | RunTokens) -> str:
    """Return what a call carries now."""
    return token if isinstance(token, str) else token.current()


def accepted(token: str | RunTokens) -> str | Callable[[str], bool]:
    """Return what a server takes: this token, or what tells of one whether it is valid."""
    return token if isinstance(token, str) else token.is_valid
