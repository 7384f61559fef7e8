"""Numbers and names in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

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

    >>> printable("a b/ü.png"), printable("a\n\x1b[31m")
    ('a b/ü.png', 'a\\n\\x1b[31m')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
