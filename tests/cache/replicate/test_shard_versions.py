"""Which version a shard is found through."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.replicate.shard_recovery import KnownShards
from deeplink.core.clock import ManualClock, SystemClock
from tests.cache.agents import write_tree
from tests.deeplink.checkpoints.faults import refusing

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.core.config import Config
    from deeplink.core.types import ShardId, Version


@pytest.fixture
def shared(tmp_path: Path, config: Config) -> tuple[ShardId, Version, Version]:
    """Return a shard that two versions share, and both."""
    source = write_tree(tmp_path / "few", {"a": b"a" * 100})
    older = pack(str(source), "few", config=config)
    write_tree(source, {"b": b"b" * 100})
    newer = pack(str(source), "few", config=config, append=True)
    (shard,) = older.placed
    assert shard in newer.placed
    return shard, older.version, newer.version


def test_a_shard_whose_newest_version_was_removed_is_found_through_an_older_one(
    config: Config, shared: tuple[ShardId, Version, Version]
) -> None:
    shard, older, newer = shared
    catalog = Catalog(config.catalog)
    known = KnownShards(catalog, SystemClock())
    known._look()
    known._open.clear()  # as when eight others were opened since
    catalog.path("few", newer).unlink()
    found = known.find(shard)
    assert found is not None
    assert found.index is not None
    assert found.index.version == older


def test_a_damaged_version_hides_no_other(config: Config, shared: tuple[ShardId, Version, Version]) -> None:
    shard, older, newer = shared
    catalog = Catalog(config.catalog)
    catalog.path("few", older).write_bytes(b"")
    found = KnownShards(catalog, SystemClock()).find(shard)
    assert found is not None
    assert found.index is not None
    assert found.index.version == newer


@pytest.mark.parametrize("what", ["latest", "folder"])
def test_what_cannot_be_read_for_a_moment_stays_the_newest(
    config: Config, shared: tuple[ShardId, Version, Version], what: str
) -> None:
    clock = ManualClock()
    known = KnownShards(Catalog(config.catalog), clock)
    newest = known.in_newest()
    assert shared[0] in newest
    clock.sleep(60.0)
    hidden = str(config.catalog / "few" / "latest") if what == "latest" else str(config.catalog)
    with refusing(lambda _, path: path == hidden, code=errno.EIO):
        assert known.in_newest() == newest
