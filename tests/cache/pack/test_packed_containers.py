"""Tars and tables are packed by members, read again from where they are, and shards are made of them again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.fetching import is_unchanged, rebuild_shard
from deeplink.cache.source.opening import open_source
from deeplink.core.clock import SystemClock
from deeplink.core.config import Config
from tests.cache.agents import Agents, make_tar

Files = dict[str, bytes]


def in_tars(root: Path) -> tuple[str, Files]:
    rng, found = random.Random(1), {}  # noqa: S311 - test data
    for number in range(4):
        files = {f"{sample:04d}.jpg": rng.randbytes(rng.choice([0, 300, 30_000])) for sample in range(40)}
        make_tar(root / "tars" / f"t-{number}.tar", files)
        found.update({f"t-{number}/{name}": data for name, data in files.items()})
    return f"{root}/tars/t-{{0..3}}.tar", found


def in_tables(root: Path) -> tuple[str, Files]:
    rng, found = random.Random(2), {}  # noqa: S311 - test data
    for number in range(3):
        keys = rng.sample(range(1000), 50)
        values = [rng.randbytes(10_000) for _ in keys]
        table = pa.table({"id": keys, "image": values, "not": keys})
        pq.write_table(table, root / f"p-{number}.parquet", row_group_size=20)
        found.update({f"p-{number}/{key}.image": data for key, data in zip(keys, values, strict=True)})
    return f"{root}/p-*.parquet#key=id&columns=image", found


@pytest.fixture(params=[in_tars, in_tables])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Files]:
    made: tuple[str, Files] = request.param(tmp_path)
    return made


def contents(config: Config) -> tuple[Files, int]:
    with Reader.open("it", config=config) as reader:
        data = [bytes(view) for view in reader.read(range(len(reader)))]
        return dict(zip(reader.index.keys(), data, strict=True)), reader.stats().source_samples


def test_members_pack_them_as_one_process_does(
    packed: tuple[str, Files], agents: Agents, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    url, files = packed
    result = pack(url, "it", config=agents.config(), members=agents.members, token=agents.token)
    assert (result.files, result.read_files) == (len(files), len(files))
    assert contents(agents.config()) == (files, 0)
    assert "packing goes on without" not in caplog.text
    pack(url, "it", config=config)
    again = pack(url, "it", config=config)
    assert (again.unchanged, again.read_files) == (True, 0)
    assert contents(config) == (files, 0)


def test_what_no_node_holds_any_more_is_read_and_made_again_from_them(
    packed: tuple[str, Files], config: Config, tmp_path: Path
) -> None:
    url, files = packed
    result = pack(url, "it", config=config)
    shutil.rmtree(config.store)
    assert contents(config) == (files, len(files))
    index = Catalog(config.catalog).open("it")
    for number in range(len(index.shards)):
        rebuild_shard(index, number, open_source(index.source), tmp_path / f"{number}.mdb", SystemClock())
        assert is_unchanged(index, number, open_source(index.source))
    assert len(result.placed) == len(index.shards) > 2


def test_a_tar_that_changed_is_seen(config: Config, tmp_path: Path) -> None:
    url, _ = in_tars(tmp_path)
    pack(url, "it", config=config)
    index = Catalog(config.catalog).open("it")
    make_tar(tmp_path / "tars" / "t-0.tar", {"0000.jpg": b"other"})
    assert not is_unchanged(index, 0, open_source(url))
    (tmp_path / "tars" / "t-0.tar").unlink()
    assert not is_unchanged(index, 0, open_source(url))


def test_appending_keeps_the_shards_of_tars_that_stayed(config: Config, tmp_path: Path) -> None:
    _, files = in_tars(tmp_path)
    before = pack(f"{tmp_path}/tars/t-*.tar", "it", config=config)
    make_tar(tmp_path / "tars" / "t-9.tar", {"new.jpg": b"new"})
    after = pack(f"{tmp_path}/tars/t-*.tar", "it", config=config, append=True)
    assert after.read_files == 1
    assert set(before.placed) < set(after.placed)
    assert contents(config)[0] == {**files, "t-9/new.jpg": b"new"}
