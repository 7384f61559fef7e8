"""Tokens: what every call carries, kept in a file that only its owner can read (0600).

A site hands one to a group in a file of root's that the group may read and nobody else (0640).

Apart from `deeplink.wire`, because training processes read a token and do not import grpc.
"""

from __future__ import annotations

import os
import secrets
import stat
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from pathlib import Path


_OTHERS = 0o077
_OTHERS_OF_ROOTS = 0o037
"""What nobody but the owner may do; with a file of root's, a group may read, which root has said."""


class TokenFileError(DeepLinkError):
    """A token file cannot be used: absent, unreadable, empty, or readable by others."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"token file {path}: {problem}",
            remedy="Inside a job `deeplink run` makes it; a standing agent's token is made by `deeplink node`.",
        )
        self.path, self.problem = path, problem


def new_token() -> str:
    """Return a token nobody can guess (256 bits)."""
    return secrets.token_urlsafe(32)


def write_token(path: Path, token: str) -> None:
    """Leave `token` in a file only this user can read, never readable by others even for a moment.

    Raises:
        OSError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)


def make_token(path: Path, token: str) -> None:
    """Leave `token` in a file only this user can read, unless one is there: of two that make it, the first wins.

    Raises:
        OSError: the file cannot be written.
    """
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


def read_token(path: Path) -> str:
    """Return the token a file holds.

    Raises:
        TokenFileError: the file is absent, unreadable, empty, or others may read it; one of root's, others
            than its group.
    """
    try:
        with path.open(encoding="ascii") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid not in {0, os.geteuid()}:
                raise TokenFileError(path, f"it belongs to user {found.st_uid}, who knows what it says")
            if mode & (_OTHERS_OF_ROOTS if found.st_uid == 0 else _OTHERS):
                must = "0600, or root's and 0640 for a group"
                raise TokenFileError(path, f"mode {mode:04o} lets others in; it must be {must}")
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise TokenFileError(path, str(problem)) from problem
    if not token:
        raise TokenFileError(path, "it is empty")
    return token
