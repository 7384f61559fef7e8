"""Reads a shard as LMDB does: what any other tool would see."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import lmdb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NUMBER = struct.Struct(">Q")


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and value of each record."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True, max_dbs=0) as environment,
        environment.begin() as transaction,
    ):
        for key, value in transaction.cursor():
            yield _NUMBER.unpack(key)[0], value
