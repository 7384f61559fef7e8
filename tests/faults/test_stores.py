"""An agent whose disk is full, takes no writes, or fails: it stays up, says so, and serves what can be read."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.replicate.fill import fill
from deeplink.cache.replicate.shard_recovery import stat_member
from deeplink.core.clock import SystemClock
from deeplink.v1 import cache_pb2
from tests.cache.agents import small_files, write_tree
from tests.cache.keepers import Keepers
from tests.faults.disks import disk_in_memory, disk_on_loop
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.format.index import Index

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


@pytest.fixture
def index(tmp_path: Path, keepers: Keepers) -> Index:
    source = write_tree(tmp_path / "source", small_files(200))
    config = keepers.config(store=tmp_path / "packed", shard_bytes=100_000)
    pack(str(source), "digits", config=config)
    return Catalog(config.catalog).open("digits")


def outcomes(keepers: Keepers, index: Index) -> set[str]:
    member, numbers = keepers.running["n0"].member, range(len(index.shards))
    replies = fill(member, keepers.token, "digits", index, numbers, members=())
    return {cache_pb2.FillOutcome.Name(reply.outcome).removeprefix("FILL_OUTCOME_") for reply in replies}


def test_a_disk_smaller_than_the_data_takes_what_fits(keepers: Keepers, index: Index, tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "n0", 1 << 20) as disk:
        kept = keepers.start("n0", store_bytes=1 << 40)
        try:
            assert sum(entry.bytes for entry in index.shards) > 1 << 20
            # What came earlier leaves for what comes: the source has all of it.
            assert outcomes(keepers, index) == {"FETCHED"}
            assert kept.store.free_bytes() >= int((1 << 20) * 0.02)
            disk.fill()
            assert outcomes(keepers, index) <= {"HELD", "FETCHED", "NO_ROOM"}
            assert stat_member(kept.member, keepers.token, SystemClock()).node == "n0"
        finally:
            keepers.stop_all()


def test_a_disk_that_takes_no_writes_is_said_and_read_from(keepers: Keepers, index: Index, tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "n0", 8 << 20) as disk:
        kept = keepers.start("n0")
        try:
            assert outcomes(keepers, index) == {"FETCHED"}
            gone = index.shards[0].id
            kept.store.remove(gone)
            disk.refuse_writes()
            until(lambda: "Read-only file system" in kept.keeper.status().problem)
            assert outcomes(keepers, index) == {"HELD", "FAILED"}
            reply = stat_member(kept.member, keepers.token, SystemClock())
            assert {shard.id for shard in reply.shards} == {entry.id for entry in index.shards} - {gone}
            assert all(shard.verified for shard in reply.shards)
        finally:
            keepers.stop_all()


def test_a_disk_that_fails_does_not_end_the_agent(keepers: Keepers, index: Index, tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "n0", 16 << 20) as disk:
        kept = keepers.start("n0")
        try:
            assert outcomes(keepers, index) == {"FETCHED"}
            disk.fail()

            def meets_it() -> bool:
                # Again and again: what was verified again before the disk failed is not looked at for a week.
                for entry in index.shards:
                    with suppress(OSError):
                        kept.store.doubt(entry.id)
                return kept.keeper.status().problem != "" or kept.keeper.status().verified_shards == 0

            until(meets_it)
            assert stat_member(kept.member, keepers.token, SystemClock()).node == "n0"
            assert outcomes(keepers, index) <= {"HELD", "FAILED", "NO_ROOM", "FETCHED"}
            assert stat_member(kept.member, keepers.token, SystemClock()).node == "n0"
        finally:
            keepers.stop_all()
