"""Formats numbers and names for sentences."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_PLURALS = {"leaf": "leaves", "switch": "switches", "process": "processes"}


def counted(count: int, thing: str) -> str:
    """Return how many of a thing there are, in words that agree.

    >>> counted(1, "shard"), counted(0, "rank"), counted(12_000, "file"), counted(3, "leaf")
    ('1 shard', '0 ranks', '12,000 files', '3 leaves')
    """
    return f"{count:,} {thing if count == 1 else _PLURALS.get(thing, f'{thing}s')}"


def listed(names: Collection[object], most: int = 8) -> str:
    """Return the first of these names, and whether there are more.

    >>> listed(["n1", "n2"]), listed([1, 2, 3], most=2)
    ('n1, n2', '1, 2, ...')
    """
    return ", ".join(str(name) for name in list(names)[:most]) + (", ..." if len(names) > most else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return which known word is probably meant, upper and lower case alike; empty where none is like it.

    >>> nearest("Imagnet", ["mnist", "imagenet"]), nearest("xyz", ["mnist"])
    ('imagenet', '')
    """
    words = {one.lower(): one for one in known}
    return next((words[one] for one in difflib.get_close_matches(word.lower(), words, 1)), "")


def sized(count: float) -> str:
    """Return a number of bytes as people read it.

    >>> sized(0), sized(1536), sized(3 << 40)
    ('0 B', '1.5 KiB', '3.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count:,.0f} B"
        count /= 1024
    return f"{count:,.1f} TiB"


def printable(text: str) -> str:
    r"""Return a text that can be shown on a terminal and in one line, whatever somebody named a file.

    >>> printable("a b/ü.png"), printable("a\n\x1b[31m"), printable("caf\udce9")
    ('a b/ü.png', 'a\\n\\x1b[31m', 'caf\\xe9')
    """
    return text if text.isprintable() else "".join(map(_shown, text))


_NOT_ASCII = range(0x80, 0x100)


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    byte = ord(letter) - 0xDC00  # a byte that was no UTF-8, as `os.fsdecode` keeps it
    return f"\\x{byte:02x}" if byte in _NOT_ASCII else letter.encode("unicode_escape", "surrogatepass").decode()


def printable_lines(text: str) -> str:
    r"""Return a text of several lines that can be shown on a terminal.

    >>> printable_lines("a\n\tb\x1b[2J\n")
    'a\n    b\\x1b[2J\n'
    """
    return "\n".join(map(printable, text.expandtabs(4).split("\n")))
