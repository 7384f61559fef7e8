"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """Return how many of a thing there are, in words that agree.

    >>> counted(1, "shard"), counted(0, "rank"), counted(12_000, "file")
    ('1 shard', '0 ranks', '12,000 files')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
