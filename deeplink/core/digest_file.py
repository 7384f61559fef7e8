"""Texts too long for an environment variable, in files named by their digest; so a list of members: `@FILE`.

Linux bounds a variable to 128 KiB. Who has a file's name knows its content by it: another content, another name.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.publish import file_trouble, published_file
from deeplink.core.types import parse_members

if TYPE_CHECKING:
    from deeplink.core.types import Member

BY_FILE = "@"
"""Before the path of a file, in the place of a list of members."""
_NAMED = re.compile(r".*\.[0-9a-f]{32}")


def leave(folder: Path, kind: str, content: bytes) -> Path:
    """Publish `content` in `folder` as `KIND.DIGEST`, unless it is there; return where. OSError: it cannot be."""
    path = folder / f"{kind}.{_digest(content)}"
    if not path.exists() or path.stat().st_size != len(content):  # cut short where a node died
        with published_file(path, mode=0o600, durable=False) as draft:
            draft.write_bytes(content)
    return path


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def leave_members(folder: Path, text: str) -> str:
    """Publish a list of members and return what stands for it, `@FILE`. OSError: it cannot be."""
    return f"{BY_FILE}{leave(folder, 'members', text.encode())}"


def read_members(value: str) -> tuple[Member, ...]:
    """Return the members that a value of `members` names: the list itself, or `@FILE`, which holds it.

    ValueError: it is no list; DeepLinkError: its file cannot be read.
    """
    if not value.startswith(BY_FILE):
        return parse_members(value)
    path = Path(value.removeprefix(BY_FILE)).expanduser()
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise file_trouble("read", path, problem) from problem
    if _NAMED.fullmatch(path.name) and not path.name.endswith(_digest(content)):
        raise ValueError(f"{path}: it is not what its name says: cut short, or changed")
    try:
        return parse_members(content.decode())
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
