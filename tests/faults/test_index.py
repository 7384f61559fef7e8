"""Bits of the index flip: it restores itself, and what is read is right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.core.config import Config
from tests.cache.agents import config_below, small_files, write_tree
from tests.faults.disks import flip
from tests.faults.processes import Nodes, Record, reading, survived, task_of

pytestmark = [pytest.mark.slow]
FLIPS = 100


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Config, dict[str, bytes]]:
    files = small_files(60)
    config = config_below(tmp_path)
    pack(str(write_tree(tmp_path / "source", files)), "digits", config=config)
    return config, files


@pytest.mark.parametrize("views", [False, True], ids=["batches", "views"])
def test_whatever_bit_of_the_index_has_flipped_all_is_read(
    packed: tuple[Config, dict[str, bytes]], *, views: bool
) -> None:
    config, files = packed
    (path,) = config.catalog.glob("digits/*.arrow")
    whole = path.read_bytes()
    rng = random.Random(7)  # noqa: S311 - places, no secret
    for _ in range(FLIPS):
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        broken = bytearray(whole)
        broken[at] ^= 1 << bit
        path.write_bytes(broken)
        with Reader.open("digits", config=config) as reader:
            rows = [reader.index.row(key) for key in files]
            found = reader.views(rows) if views else reader.read(rows)
            wrong = [key for key, sample in zip(files, found, strict=True) if sample != files[key]]
        assert not wrong, f"bit {bit} of byte {at} of {len(whole):,}"


@pytest.mark.parametrize("own", [{}, {"fill_on_miss": True, "check_every_read": True}], ids=["peers", "own store"])
def test_bits_of_the_index_flip_while_it_is_read_by(
    nodes: Nodes, record: Record, tmp_path: Path, own: dict[str, bool]
) -> None:
    # What peers send is always compared. What is in the node's own store is compared when it is first read; where
    # a later flip is to be noticed, too, at every read.
    config = nodes.config(store=tmp_path / "store", **own)
    (path,) = config.catalog.glob("digits/*.arrow")
    size = path.stat().st_size
    rng = random.Random(3)  # noqa: S311 - places, no secret
    with reading(task_of(config, nodes.files), tmp_path) as loop:
        for _ in range(20):
            at = rng.randrange(size)
            with loop.held():
                flip(path, at)
            loop.await_epochs(1)
            with loop.held():
                flip(path, at)
        survived(loop, record)
