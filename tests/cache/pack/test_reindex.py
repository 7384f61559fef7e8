from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import CatalogError, MemberError, ShardCorruptError, SourceError
from deeplink.cache.format import block
from deeplink.cache.pack.rebuild_index import (
    Rebuilt,
    ReindexRequest,
    ShardFinder,
    rebuild_index,
)
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.store.described import describe, described, tables
from deeplink.cache.store.store import Store
from deeplink.cache.transfer.client import MemberClient
from deeplink.core.clock import SystemClock
from deeplink.core.types import ShardId
from tests.cache.agents import Agents, write_tree

if TYPE_CHECKING:
    from deeplink.core.config import Config
    from deeplink.core.types import Version


@pytest.fixture
def version(source: Path, config: Config) -> Version:
    return pack(str(source), "digits", config=config).version


@pytest.fixture
def catalog(config: Config) -> Catalog:
    return Catalog(config.catalog)


def rebuilt(config: Config, wanted: ReindexRequest, *, dry_run: bool = False) -> Rebuilt:
    with ShardFinder([config.store]) as finder:
        return rebuild_index(Catalog(config.catalog), wanted, finder, SystemClock(), dry_run=dry_run)


@pytest.mark.parametrize("lost", ["removed", "cut short", "all over"])
def test_a_lost_index_is_made_anew_byte_for_byte(
    config: Config, catalog: Catalog, version: Version, lost: str
) -> None:
    path = catalog.path("digits", version)
    good = path.read_bytes()
    if lost == "removed":
        path.unlink()
    elif lost == "cut short":
        os.truncate(path, 1000)
    else:
        path.write_bytes(bytes(byte ^ 1 for byte in good))
    told: list[tuple[int, int]] = []
    with ShardFinder([config.store]) as finder:
        wanted = ReindexRequest(name="digits", version=version)
        done = rebuild_index(catalog, wanted, finder, SystemClock(), progress=lambda *at: told.append(at))
    assert done.restored
    assert done.version == version
    assert done.samples == 60
    assert path.read_bytes() == good
    shards = len(catalog.open("digits").shards)
    assert shards > 2
    assert told == [(number + 1, shards) for number in range(shards)]


def test_without_a_record_the_damaged_index_still_says_which_shards(
    config: Config, catalog: Catalog, version: Version
) -> None:
    path = catalog.path("digits", version)
    path.with_suffix(".json").unlink()
    good = path.read_bytes()
    damaged = bytearray(good)
    checksums = catalog.open("digits").checksums.tobytes()
    damaged[good.index(checksums)] ^= 1
    path.write_bytes(damaged)
    assert rebuilt(config, ReindexRequest(name="digits", version=version)).restored
    assert path.read_bytes() == good
    path.unlink()
    with pytest.raises(SourceError) as unsaid:
        rebuilt(config, ReindexRequest(name="digits", version=version))
    assert "--source" in unsaid.value.remedy
    with pytest.raises(CatalogError, match="was made is not on record"):
        rebuilt(config, ReindexRequest(name="digits", version=version, source="/x"))


def test_all_shards_there_are_make_the_index_of_the_only_version(
    config: Config, catalog: Catalog, version: Version, source: Path
) -> None:
    path = catalog.path("digits", version)
    good = path.read_bytes()
    path.unlink()
    wanted = ReindexRequest(name="digits", version=version, every=True, source=str(source))
    assert rebuilt(config, wanted, dry_run=True).version == version
    assert not path.exists()
    assert rebuilt(config, wanted).restored
    assert path.read_bytes() == good


def test_an_older_version_comes_back_and_the_name_points_where_it_did(
    config: Config, catalog: Catalog, version: Version, source: Path, files: dict[str, bytes]
) -> None:
    write_tree(source, {"train/d/new.bin": b"new"})
    newer = pack(str(source), "digits", config=config).version
    assert catalog.versions("digits") == [version, newer]
    catalog.path("digits", version).unlink()
    assert rebuilt(config, ReindexRequest(name="digits", version=version)).restored
    assert catalog.latest("digits") == newer
    assert catalog.versions("digits") == [version, newer]
    with Reader.open("digits", version=version, config=config) as reader:
        assert {
            key: bytes(view) for key, view in zip(reader.index.keys(), reader.read(range(60)), strict=True)
        } == files


def test_shards_of_two_versions_are_told_apart_by_who_names_them(
    config: Config, catalog: Catalog, version: Version, source: Path
) -> None:
    first = catalog.record("digits", version)
    assert first is not None
    (source / "train/b/00001.bin").write_bytes(b"changed")
    newer = pack(str(source), "digits", config=config).version
    assert newer != version
    with pytest.raises(CatalogError, match="keys are in two shards") as twice:
        rebuilt(config, ReindexRequest(name="digits", version=newer, every=True))
    assert "--shard" in twice.value.remedy
    shards = [ShardId(shard) for shard in first.shard_ids]
    with pytest.raises(CatalogError, match=f"make is version {version}, not {newer}"):
        rebuilt(config, ReindexRequest(name="digits", version=newer, shards=shards))
    assert catalog.latest("digits") == newer
    assert rebuilt(config, ReindexRequest(name="digits", version=version, shards=shards)).restored
    again = rebuilt(config, ReindexRequest(name="digits", version=newer, shards=shards, as_new=True))
    assert again.version == version == catalog.latest("digits")


def test_a_part_of_the_shards_is_a_version_of_its_own(config: Config, catalog: Catalog, version: Version) -> None:
    shards = [entry.id for entry in catalog.open("digits").shards]
    done = rebuilt(config, ReindexRequest(name="part", version=None, shards=shards[:1], source="/data"))
    assert not done.restored
    index = catalog.open("part")
    assert (index.source, len(index)) == ("/data", done.samples)
    assert index.keys() == catalog.open("digits", version).keys(range(done.samples))
    reverse = rebuilt(config, ReindexRequest(name="back", version=None, shards=shards[::-1], source="/data"))
    assert catalog.open("back", reverse.version).keys() == catalog.open("digits").keys()
    with Reader.open("back", config=config) as back, Reader.open("digits", config=config) as reader:
        assert [bytes(view) for view in back.read(range(60))] == [bytes(view) for view in reader.read(range(60))]


def test_shards_that_are_not_there_or_damaged_are_named(
    config: Config, catalog: Catalog, version: Version
) -> None:
    store = Store(config.store)
    gone, bad, *_ = [entry.id for entry in catalog.open("digits").shards]
    store.remove(gone)
    with store.path(bad).open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(CatalogError, match=r"2 of \d+ shards were not found") as missing:
        rebuilt(config, ReindexRequest(name="digits", version=version))
    assert f"({gone}, {bad})" in str(missing.value)
    assert str(config.store) in str(missing.value)
    with pytest.raises(CatalogError, match="no shard was found"), ShardFinder([store.root / "x"]) as finder:
        rebuild_index(
            catalog, ReindexRequest(name="d", version=None, every=True, source="/x"), finder, SystemClock()
        )


def test_an_index_is_made_anew_of_what_members_say(source: Path, agents: Agents, tmp_path: Path) -> None:
    config = agents.config()
    version = pack(str(source), "digits", config=config, members=agents.members, token=agents.token).version
    catalog = Catalog(config.catalog)
    good = catalog.path("digits", version).read_bytes()
    catalog.path("digits", version).unlink()
    agents.stop("n1")
    with ShardFinder([tmp_path / "nothing"], agents.members, agents.token) as finder:
        assert rebuild_index(
            catalog, ReindexRequest(name="digits", version=version), finder, SystemClock()
        ).restored
    assert catalog.path("digits", version).read_bytes() == good
    with ShardFinder([], agents.members, "wrong") as finder, pytest.raises(CatalogError, match="token"):
        rebuild_index(catalog, ReindexRequest(name="digits", version=version), finder, SystemClock())


def test_a_member_describes_only_what_it_holds(agents: Agents, source: Path) -> None:
    config = agents.config(replicas=3)
    result = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    shard = next(iter(result.placed))
    with MemberClient(agents.members[0], agents.token) as client:
        here, there = describe(agents.stores[agents.members[0].name].path(shard), shard), client.describe(shard)
        assert there.keys.equals(here.keys)
        assert (there.id, there.bytes, there.block_offsets.tolist()) == (
            shard,
            here.bytes,
            here.block_offsets.tolist(),
        )
        assert all((there.columns[name] == here.columns[name]).all() for name in here.columns)
        for other in ("0" * 40, "../x", ""):
            with pytest.raises(MemberError):
                client.describe(ShardId(other))


def test_a_description_that_does_not_fit_together_is_refused(config: Config, version: Version) -> None:
    shard = Store(config.store).ids()[0]
    descriptor = os.open(Store(config.store).path(shard), os.O_RDONLY)
    found = block.scan_shard(descriptor)
    records = list(tables(descriptor, found, shard))
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    assert len(described(shard, size, found.offsets, found.payloads, records)) > 0
    huge = np.full(len(found.offsets), 1 << 63, np.uint64)
    for bad in (
        (10, found.offsets, found.payloads, records),
        (size, huge, found.payloads, records),
        (size, found.offsets, huge, records),
        (size, found.offsets[:0], found.payloads[:0], records),
        (size, found.offsets[:-1], found.payloads, records),
        (size, found.offsets, found.payloads // np.uint64(2), records),
        (size, found.offsets, found.payloads, []),
        (size, found.offsets, found.payloads, [records[0][:-1]]),
    ):
        with pytest.raises(ShardCorruptError):
            described(shard, *bad)
    key = block.decode_table(records[0])[0][0]
    with pytest.raises(ShardCorruptError, match="UTF-8"):
        described(shard, size, found.offsets, found.payloads, [records[0].replace(key, b"\xff" * len(key))])


def test_the_record_of_a_version_names_its_shards_and_others_records_are_read(
    catalog: Catalog, version: Version
) -> None:
    record = catalog.record("digits", version)
    assert record is not None
    assert list(record.shard_ids) == [entry.id for entry in catalog.open("digits").shards]
    path = catalog.path("digits", version).with_suffix(".json")
    path.write_text(path.read_text().replace("{", '{"later": [1, 2],', 1))
    assert catalog.record("digits", version) == record
    old = dataclasses.asdict(record)
    del old["shard_ids"], old["home"]
    path.write_text(str(old).replace("'", '"'))
    assert catalog.record("digits", version) == dataclasses.replace(record, shard_ids=())
