"""Which paths may be a sample's key: POSIX paths below the source's root, in UTF-8. Pure."""

from __future__ import annotations

from deeplink.cache.errors import BadKeyError
from deeplink.types import SampleKey

MOST_KEY_BYTES = 4096
MOST_NAME_BYTES = 255
"""What Linux file systems allow, so that every key can be a file again."""


def checked_key(path: str) -> SampleKey:
    """Return `path` as a key.

    >>> checked_key("train/3/00001.png")
    'train/3/00001.png'

    Raises:
        BadKeyError: it is empty, absolute, has `.`, `..` or empty parts, a NUL, is too long, or not UTF-8.
    """
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise BadKeyError(path, "the name is not UTF-8") from None
    if not raw:
        raise BadKeyError(path, "the name is empty")
    if b"\0" in raw:
        raise BadKeyError(path, "the name holds a NUL character")
    if raw.startswith(b"/"):
        raise BadKeyError(path, "the path is absolute")
    if len(raw) > MOST_KEY_BYTES:
        raise BadKeyError(path, f"the path is longer than {MOST_KEY_BYTES} bytes")
    for part in raw.split(b"/"):
        if part in {b"", b".", b".."}:
            raise BadKeyError(path, f"a part of the path is {part.decode()!r}")
        if len(part) > MOST_NAME_BYTES:
            raise BadKeyError(path, f"a part of the path is longer than {MOST_NAME_BYTES} bytes")
    return SampleKey(path)
