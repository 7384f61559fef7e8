"""Bits flip in an index while it is read: samples come right all the same, and no shard is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeplink.cache.errors import IndexFormatError
from deeplink.cache.format.index_format import Seal
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from tests.cache.agents import Agents
from tests.cache.format.test_index_damage import damage

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.core.config import Config

COLUMNS = ("shard", "block", "offset", "lengths", "checksums")


def damage_rows(reader: Reader, column: str, rows: range, byte: int) -> None:
    """Change a byte of some cells of a column in the index's file."""
    cells: np.ndarray = getattr(reader.index, column)
    path = reader.index.path
    start = path.read_bytes().index(cells.tobytes())
    damage(path, [start + row * cells.itemsize + byte for row in rows])


def as_views(reader: Reader, rows: range) -> list[bytes]:
    return [bytes(view) for view in reader.views(rows)]


def as_batch(reader: Reader, rows: range) -> list[bytes]:
    return [bytes(view) for view in reader.read(rows)]


@pytest.mark.parametrize("read", [as_batch, as_views])
@pytest.mark.parametrize("cell", [(column, byte) for column in COLUMNS for byte in (0, -1)])
def test_samples_of_this_node_come_right(
    config: Config,
    source: Path,
    files: dict[str, bytes],
    cell: tuple[str, int],
    read: Callable[[Reader, range], list[bytes]],
) -> None:
    column, byte = cell
    pack(str(source), "digits", config=config)
    shards = Store(config.store).ids()
    with Reader.open("digits", config=config) as reader:
        keys = reader.index.keys()
        damage_rows(reader, column, range(10, 20), byte % getattr(reader.index, column).itemsize)
        assert read(reader, range(60)) == [files[key] for key in keys]
        assert reader.stats().local_samples == 60
        assert reader.stats().source_samples == 0
    assert Store(config.store).ids() == shards
    assert all(Store(config.store).is_verified(shard) for shard in shards)


@pytest.mark.parametrize("column", COLUMNS)
def test_samples_of_other_nodes_come_right(
    agents: Agents, source: Path, files: dict[str, bytes], column: str
) -> None:
    config = agents.config()
    pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    for path in sorted(source.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with Reader.open("digits", config=config) as reader:
        keys = reader.index.keys()
        damage_rows(reader, column, range(0, 60, 7), 0)
        assert as_batch(reader, range(60)) == [files[key] for key in keys]


def test_an_index_damaged_beyond_repair_is_said(config: Config, source: Path) -> None:
    pack(str(source), "digits", config=config)
    with Reader.open("digits", config=config) as reader:
        checksums = reader.index.checksums.tobytes()
        path = reader.index.path
        good = path.read_bytes()
        seal = Seal.find(memoryview(good))
        assert seal is not None
        with path.open("r+b") as file:
            file.seek(good.index(checksums))
            file.write(bytes(8 * 60))
            file.seek(seal.covered)
            file.write(bytes(seal.parities * seal.chunk))
        with pytest.raises(IndexFormatError, match="more is damaged") as said:
            reader.read(range(60))
        assert "index rebuild" in said.value.remedy


@pytest.mark.parametrize("column", COLUMNS)
def test_asking_a_disk_ahead_ends_nothing(config: Config, source: Path, column: str) -> None:
    pack(str(source), "digits", config=config)
    with Reader.open("digits", config=config) as reader:
        reader.read([0])
        damage_rows(reader, column, range(10, 20), -1 % getattr(reader.index, column).itemsize)
        reader.will_need(range(60))
