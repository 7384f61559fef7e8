"""What a shard's file is going to take is known before it is written: room is kept for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeplink.cache.format import block
from deeplink.cache.format.names import Names
from deeplink.cache.pack.building import FileReader, ShardBuilder, build_shard
from deeplink.cache.source.opening import open_source
from deeplink.core.clock import SystemClock
from deeplink.core.types import SampleKey
from tests.cache.agents import write_tree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("sizes", [[0], [1] * 3000, [5000, 70_000, 3_000_000, 9]])
def test_the_size_of_a_file_is_known_before(tmp_path: Path, sizes: list[int]) -> None:
    files = {f"{number:05d}": b"x" * size for number, size in enumerate(sizes)}
    source = open_source(str(write_tree(tmp_path / "source", files)))
    names = Names.of([SampleKey(name) for name in files])
    with FileReader(source, SystemClock()) as reader:
        builder = ShardBuilder(source, reader, names, np.array(sizes, np.int64), lambda _files, _bytes: None)
        said = builder.file_bytes()
        built = build_shard(builder, tmp_path / "draft")
    assert said - 10 * block.PAGE < built.bytes <= said
