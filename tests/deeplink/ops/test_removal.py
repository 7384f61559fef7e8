"""What goes with a dataset that is removed, and what stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.store.pins import Pin
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.fs.library import DatasetPath
from deeplink.ops import inventory
from deeplink.ops.inventory import PackTarget, remove_dataset
from tests.cache.agents import small_files, write_tree

if TYPE_CHECKING:
    from deeplink.ops.inventory import Dropped
    from tests.cache.keepers import Keepers

DIGITS = DatasetPath("digits")


@pytest.fixture
def packed(keepers: Keepers) -> PackTarget:
    """Two members have each shard, and nothing else has: the source is gone."""
    for name in ("n0", "n1"):
        keepers.start(name)
    keepers.introduce()
    source = write_tree(keepers.root / "source", small_files())
    config = keepers.config(store=keepers.root / "packed", shard_bytes=50_000, replicas=2)
    pack(str(source), "digits", config=config, members=keepers.members, token=keepers.token)
    source.rename(source.with_name("moved"))
    return PackTarget(config, keepers.members, keepers.token, "members")


def test_each_copy_that_goes_counts_once_and_so_it_was_said_before(keepers: Keepers, packed: PackTarget) -> None:
    catalog = Catalog(packed.config.catalog)
    total = sum(entry.bytes for entry in catalog.open("digits").shards)
    shards = len(catalog.open("digits").shards)
    planned = remove_dataset(catalog, DIGITS, packed, dry_run=True)
    assert (planned.shards, planned.bytes, planned.kept) == (2 * shards, 2 * total, {})
    assert all(kept.store.status().shards == shards for kept in keepers.running.values())
    done = remove_dataset(catalog, DIGITS, packed, dry_run=False)
    assert done == planned
    assert all(kept.store.ids() == [] for kept in keepers.running.values())
    assert catalog.names(lost=True) == []


def test_what_a_job_has_begun_to_read_since_stays(
    keepers: Keepers, packed: PackTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(packed.config.catalog)
    index, store = catalog.open("digits"), keepers.running["n0"].store
    pins: list[Pin] = []
    planned = inventory._refused_if_read

    def planned_then_read(*asked: object) -> Dropped:
        found = planned(*asked)  # type: ignore[arg-type]
        pins.append(Pin(store.root, index, SystemClock()))
        return found

    monkeypatch.setattr(inventory, "_refused_if_read", planned_then_read)
    done = remove_dataset(catalog, DIGITS, packed, dry_run=False)
    assert done.shards == len(index.shards)  # those on the other member
    assert set(done.kept.values()) == {"a running job needs it"}
    assert store.status().shards == len(index.shards)


def test_nothing_is_removed_while_a_job_reads_it(keepers: Keepers, packed: PackTarget) -> None:
    catalog = Catalog(packed.config.catalog)
    pin = Pin(keepers.running["n1"].store.root, catalog.open("digits"), SystemClock())
    with pytest.raises(DeepLinkError, match="a running job reads"):
        remove_dataset(catalog, DIGITS, packed, dry_run=False)
    pin.release()
    assert catalog.names() == ["digits"]
