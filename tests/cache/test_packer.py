from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import (
    CatalogError,
    DatasetMissingError,
    PlacementError,
    SourceChangedError,
    SourceError,
    StoreFullError,
)
from deeplink.cache.format.block import SPAN
from deeplink.cache.pack.shard_pipeline import staging
from deeplink.cache.packer import PackProgress, PackResult, pack, plan_pack
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.core.descriptors import LockHeldError
from deeplink.core.types import Member, NodeName
from tests.cache.agents import Agents, config_below, small_files, write_tree
from tests.cache.records import records
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from deeplink.core.config import Config

PACK_AND_DIE = """
import os, signal, sys
from pathlib import Path
from deeplink.cache.packer import pack
from tests.cache.agents import config_below
def die(progress):
    if progress.shards == 2:
        os.kill(os.getpid(), signal.SIGKILL)
pack(sys.argv[1], "digits", config=config_below(Path(sys.argv[2]), shard_bytes=int(sys.argv[3])), progress=die)
"""
PACK_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from deeplink.cache.errors import StoreFullError
from deeplink.cache.packer import pack
from tests.cache.agents import config_below
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    pack(sys.argv[1], "digits", config=config_below(Path(sys.argv[2])))
except StoreFullError as full:
    print(full.remedy)
    sys.exit(7)
"""
ROOT = Path(__file__).parents[2]


def contents(config: Config) -> dict[str, bytes]:
    with Reader.open("digits", config=config) as reader:
        data = [bytes(view) for view in reader.read(range(len(reader)))]
        stats = reader.stats()
        assert stats.source_samples == 0
        return dict(zip(reader.index.keys(), data, strict=True))


def leftovers(config: Config) -> list[str]:
    return [path.name for path in config.store.iterdir() if path.name.startswith((".packing-", ".draft-"))]


def run(script: str, source: Path, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(source), str(root), *words],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_every_file_comes_back_byte_for_byte(source: Path, config: Config, files: dict[str, bytes]) -> None:
    told: list[PackProgress] = []
    result = pack(str(source), "digits", config=config, progress=told.append)
    assert contents(config) == files
    assert (result.files, result.read_files, result.unchanged, result.short) == (len(files), len(files), False, 0)
    assert result.bytes == sum(map(len, files.values()))
    assert result.shards == len(result.placed) > 2
    assert all(nodes == (NodeName("head"),) for nodes in result.placed.values())
    assert (told[-1].files, told[-1].bytes, told[-1].shards) == (result.files, result.bytes, result.shards)
    assert sorted(told, key=lambda progress: progress.files) == told
    assert not leftovers(config)


def test_any_fsspec_url_is_packed_alike(
    source: Path, config: Config, files: dict[str, bytes], tmp_path: Path
) -> None:
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe_file(f"/packed/{name}", data)
    other = config_below(tmp_path / "other")
    placed = pack("memory://packed", "digits", config=other).placed
    memory.rm("/packed", recursive=True)
    assert contents(other) == files
    assert placed.keys() == pack(str(source), "digits", config=config).placed.keys()


def test_a_sample_longer_than_a_span_is_packed_in_pieces(tmp_path: Path, config: Config) -> None:
    files = {"a": b"a" * 10, "big": os.urandom(SPAN + 12_345), "c": b"c" * 10}
    pack(str(write_tree(tmp_path / "source", files)), "digits", config=config)
    assert contents(config) == files


def test_lmdb_holds_the_samples_too(tmp_path: Path, config: Config) -> None:
    pack(str(write_tree(tmp_path / "source", {"a": b"first", "b": b"second"})), "digits", config=config)
    store = Store(config.store)
    found = dict(records(store.path(store.ids()[0])))
    assert found[0].endswith(b"firstsecond")
    assert len(found) == 2


def test_packing_again_reads_nothing_and_says_so(source: Path, config: Config) -> None:
    first = pack(str(source), "digits", config=config)
    again = pack(str(source), "digits", config=config)
    assert again.unchanged
    assert (again.version, again.read_files, again.placed) == (first.version, 0, first.placed)


def test_a_shard_that_was_lost_is_packed_again(source: Path, config: Config, files: dict[str, bytes]) -> None:
    first = pack(str(source), "digits", config=config)
    store = Store(config.store)
    lost = store.ids()[0]
    store.remove(lost)
    again = pack(str(source), "digits", config=config)
    assert again.version == first.version
    assert 0 < again.read_files < len(files)
    assert store.has(lost)


def test_a_changed_file_makes_a_new_version_that_shares_the_other_shards(
    source: Path, config: Config, files: dict[str, bytes]
) -> None:
    first = pack(str(source), "digits", config=config)
    changed = min(files)
    (source / changed).write_bytes(b"other" + files[changed])
    second = pack(str(source), "digits", config=config)
    assert second.version != first.version
    assert len(first.placed.keys() & second.placed.keys()) >= first.shards - 2
    assert contents(config) == files | {changed: b"other" + files[changed]}
    with Reader.open("digits", version=first.version, config=config) as pinned:
        assert bytes(pinned.read([pinned.index.row(changed)])[0]) == files[changed]


@pytest.mark.slow
def test_a_killed_packer_leaves_nothing_visible_and_its_rerun_goes_on(
    source: Path, tmp_path: Path, config: Config, files: dict[str, bytes]
) -> None:
    config = dataclasses.replace(config, shard_bytes=60_000)  # more shards than are on their way when killed
    ended = run(PACK_AND_DIE, source, tmp_path, str(config.shard_bytes))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with pytest.raises(DatasetMissingError):
        Catalog(config.catalog).latest("digits")
    sealed = set(Store(config.store).ids())
    assert len(sealed) >= 2
    result = pack(str(source), "digits", config=config)
    assert 0 < result.read_files < len(files)
    assert sealed <= result.placed.keys()
    assert contents(config) == files
    # Shards are placed beside the thread that was killed: one may just have been marked as verified.
    assert all(".verified-" in name for name in leftovers(config))
    Store(config.store).sweep(time.time() + 4000)
    assert not leftovers(config)


@pytest.mark.slow
def test_a_full_disk_is_said_and_nothing_is_published(source: Path, tmp_path: Path, config: Config) -> None:
    ended = run(PACK_WITHOUT_ROOM, source, tmp_path)
    assert ended.returncode == 7, ended.stderr
    assert "DEEPLINK_STORE" in ended.stdout
    assert not Store(config.store).ids()
    assert not config.catalog.exists()
    assert not pack(str(source), "digits", config=config).unchanged  # and with room it works


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_ssd_is_said_and_nothing_is_published(source: Path, tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(ssd)], check=True, timeout=LIMIT_S)
    try:
        config = config_below(tmp_path, store=ssd / "store")
        with pytest.raises(StoreFullError):
            pack(str(source), "digits", config=config)
        assert not list(config.store.glob("*/*.mdb"))
    finally:
        subprocess.run(["umount", str(ssd)], check=True, timeout=LIMIT_S)
    assert not config.catalog.exists()


def test_an_unreadable_file_ends_it_and_a_rerun_goes_on(
    source: Path, config: Config, files: dict[str, bytes]
) -> None:
    last = max(files)

    def remove(progress: PackProgress) -> None:
        if progress.shards == 1:
            (source / last).unlink(missing_ok=True)

    with pytest.raises(SourceError, match="cannot be read") as ended:
        pack(str(source), "digits", config=config, progress=remove)
    assert ended.value.key == last
    assert not config.catalog.exists()
    stat = (source / min(files)).stat()
    (source / last).write_bytes(files[last])
    assert (source / min(files)).stat() == stat
    result = pack(str(source), "digits", config=config)
    assert contents(config) == files
    # The file that came back has another time: another plan, whose shards are built again but kept once.
    assert result.shards == len(Store(config.store).ids())


def test_a_file_that_changes_size_meanwhile_ends_it(source: Path, config: Config, files: dict[str, bytes]) -> None:
    last = max(files)

    def grow(progress: PackProgress) -> None:
        (source / last).write_bytes(files[last] + b"more")

    with pytest.raises(SourceChangedError) as ended:
        pack(str(source), "digits", config=config, progress=grow)
    assert ended.value.key == last
    assert not config.catalog.exists()


def test_a_second_packer_of_the_same_is_turned_away(source: Path, config: Config) -> None:
    _, plan, _ = plan_pack(str(source), "digits", config=config)
    Store(config.store)
    with (
        staging(config.store, plan.digest, 0.0),
        pytest.raises(LockHeldError, match="another `deeplink pack` of this source"),
    ):
        pack(str(source), "digits", config=config)
    pack(str(source), "digits", config=config)


def test_a_bad_name_is_refused_before_anything_is_read(config: Config) -> None:
    with pytest.raises(DatasetMissingError, match="cannot be a dataset's name"):
        pack("/nowhere", "../digits", config=config)
    assert not config.store.exists()


def placed_twice(result: PackResult, agents: Agents) -> bool:
    return all(
        len(nodes) == 2 and all(agents.stores[node].is_verified(shard) for node in nodes)
        for shard, nodes in result.placed.items()
    )


def test_each_shard_has_its_copies_on_members(source: Path, agents: Agents, files: dict[str, bytes]) -> None:
    config = agents.config()
    result = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    assert placed_twice(result, agents)
    assert not Store(config.store).ids()
    assert contents(config) == files
    again = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    assert (again.unchanged, again.read_files) == (True, 0)
    # A member that a busy machine kept silent in the first pack gets what it owns in the second.
    assert again.placed.keys() == result.placed.keys()
    for shard, nodes in again.placed.items():
        assert set(result.placed[shard]) <= set(nodes), shard
        assert all(agents.stores[node].is_verified(shard) for node in nodes), shard


def test_a_small_dataset_lies_on_all_members_and_stays_while_no_file_changes(
    source: Path, agents: Agents, files: dict[str, bytes]
) -> None:
    def packed(count: int, shard_bytes: int = 256 << 20) -> PackResult:
        config = dataclasses.replace(agents.config(), shard_bytes=shard_bytes)
        _, plan, _ = plan_pack(str(source), "digits", config=config, members=count)
        result = pack(str(source), "digits", config=config, members=agents.members[:count], token=agents.token)
        assert len(plan.shards) == result.shards
        return result

    assert packed(1).shards == 1
    spread = packed(3)
    assert spread.shards >= sum(map(len, files.values())) // (64 << 10) > 3
    assert {node for nodes in spread.placed.values() for node in nodes} == {"n0", "n1", "n2"}
    again = packed(3)
    assert (again.unchanged, again.read_files) == (True, 0)
    assert packed(1).version == spread.version
    assert packed(3, 30_000).shards > spread.shards  # what is asked for is the bound


def test_a_member_packs_into_its_own_store_without_the_network(source: Path, agents: Agents) -> None:
    own = Member(NodeName("n0"), "127.0.0.1:1")  # nobody listens there
    members = [own, agents.members[1]]
    config = agents.config(node="n0", store=agents.stores[NodeName("n0")].root)
    result = pack(str(source), "digits", config=config, members=members, token=agents.token)
    assert placed_twice(result, agents)


def test_the_next_owner_takes_what_a_dead_one_cannot(source: Path, agents: Agents) -> None:
    agents.stop("n1")
    result = pack(str(source), "digits", config=agents.config(), members=agents.members, token=agents.token)
    assert placed_twice(result, agents)
    assert not any("n1" in nodes for nodes in result.placed.values())


def test_copies_that_went_missing_are_placed_again_from_another_member(source: Path, agents: Agents) -> None:
    config = agents.config()
    result = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    shard, (owner, _) = next(iter(result.placed.items()))
    agents.stores[owner].remove(shard)
    again = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    assert (again.read_files, again.placed) == (0, result.placed)
    assert agents.stores[owner].is_verified(shard)


def test_fewer_copies_than_wanted_are_counted(source: Path, agents: Agents) -> None:
    for name in ("n1", "n2"):
        agents.stop(name)
    result = pack(str(source), "digits", config=agents.config(), members=agents.members, token=agents.token)
    assert result.short == result.shards
    assert all(nodes == ("n0",) for nodes in result.placed.values())


def test_a_catalog_that_cannot_be_written_is_said_before_anything_is_read(source: Path, tmp_path: Path) -> None:
    config = config_below(tmp_path)
    config.catalog.parent.mkdir(parents=True, exist_ok=True)
    config.catalog.write_text("a file, so that it holds for root too")
    seen: list[PackProgress] = []
    with pytest.raises(CatalogError):
        pack(str(source), "digits", config=config, progress=seen.append)
    assert not seen


def test_no_member_at_all_is_an_error_and_nothing_is_published(source: Path, agents: Agents) -> None:
    agents.stop_all()
    config = agents.config()
    with pytest.raises(PlacementError) as refused:
        pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    assert len(refused.value.problems) == 3
    assert not config.catalog.exists()


def test_a_wrong_token_is_refused_by_every_member(source: Path, agents: Agents) -> None:
    with pytest.raises(PlacementError, match="refuses our token"):
        pack(str(source), "digits", config=agents.config(), members=agents.members, token="wrong")  # noqa: S106
    assert not any(store.ids() for store in agents.stores.values())


def test_the_record_of_a_version_says_how_it_was_packed(source: Path, config: Config) -> None:
    result = pack(str(source), "digits", config=config)
    said = json.loads((config.catalog / "digits" / f"{result.version}.json").read_text())
    assert (said["files"], said["bytes"], said["source"]) == (result.files, result.bytes, str(source))


def test_many_files_in_one_block_and_table(tmp_path: Path, config: Config) -> None:
    files = {f"{i:05d}": b"%d" % i for i in range(5000)} | small_files(10)
    pack(str(write_tree(tmp_path / "source", files)), "digits", config=config)
    assert contents(config) == files


def test_append_shares_what_did_not_change_and_a_running_job_keeps_its_version(
    source: Path, config: Config, files: dict[str, bytes]
) -> None:
    first = pack(str(source), "digits", config=config)
    with Reader.open("digits", config=config) as pinned:
        new = {"zebra/1.bin": b"new", "zebra/2.bin": b"newer"}
        write_tree(source, new)
        second = pack(str(source), "digits", config=config, append=True)
        assert first.placed.keys() < second.placed.keys()
        assert (second.read_files, len(second.placed)) == (2, first.shards + 1)
        assert contents(config) == files | new
        assert (pinned.version, len(pinned)) == (first.version, len(files))
        gone = max(files)
        (source / gone).unlink()
        third = pack(str(source), "digits", config=config, append=True)
        assert 0 < third.read_files < len(files) // 2
        assert contents(config) == {key: data for key, data in (files | new).items() if key != gone}
        assert bytes(pinned.read([pinned.index.row(gone)])[0]) == files[gone]
    again = pack(str(source), "digits", config=config, append=True)
    assert (again.unchanged, again.read_files) == (True, 0)


def test_append_needs_a_version_of_the_same_source(source: Path, config: Config, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no version"):
        pack(str(source), "digits", config=config, append=True)
    pack(str(source), "digits", config=config)
    with pytest.raises(CatalogError, match="not of"):
        pack(str(write_tree(tmp_path / "other", {"a": b"1"})), "digits", config=config, append=True)


def test_append_without_kept_marks_reads_all_and_comes_to_the_same_shards(source: Path, config: Config) -> None:
    first = pack(str(source), "digits", config=config)
    (config.catalog / "digits" / f"{first.version}.marks").unlink()
    again = pack(str(source), "digits", config=config, append=True)
    assert (again.read_files, again.placed.keys()) == (first.files, first.placed.keys())


def test_two_packers_of_one_name_publish_one_whole_version_each(config: Config, tmp_path: Path) -> None:
    trees = [
        write_tree(tmp_path / name, small_files(40, seed=seed)) for seed, name in enumerate(("left", "right"))
    ]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda tree: pack(str(tree), "digits", config=config), trees))
    assert Catalog(config.catalog).latest("digits") in {result.version for result in done}
    for seed, result in enumerate(done):
        with Reader.open("digits", version=result.version, config=config) as reader:
            found = [bytes(view) for view in reader.read(range(len(reader)))]
            assert dict(zip(reader.index.keys(), found, strict=True)) == small_files(40, seed=seed)


def test_empty_files_and_links_and_long_names_are_packed(tmp_path: Path, config: Config) -> None:
    deep = "/".join(["d" * 200] * 15) + "/" + "n" * 255  # longer than LMDB's 511 bytes for a key
    files = {"empty": b"", "one/empty": b"", "one/full": b"x", deep: b"deep"}
    source = write_tree(tmp_path / "source", files)
    (source / "link").symlink_to("one/full")
    pack(str(source), "digits", config=config)
    assert contents(config) == files | {"link": b"x"}
