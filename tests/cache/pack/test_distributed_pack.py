"""Members that pack their share themselves: real calls, real shards; processes where something is to be killed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import DatasetMissingError, SourceError
from deeplink.cache.pack import distributed_pack
from deeplink.cache.packer import PackProgress, PackResult, pack
from deeplink.cache.reader import Reader
from deeplink.cache.source.home import open_home
from deeplink.cache.source.opening import open_source
from deeplink.cache.store.store import Store
from deeplink.core.types import NodeName
from deeplink.rpc.channel import open_channel
from deeplink.v1 import cache_pb2, cache_pb2_grpc
from tests.cache.agents import Agents
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.core.config import Config

ROOT = Path(__file__).parents[3]
PACK_AND_DIE = """
import os, signal, sys
from pathlib import Path
from deeplink.cache.packer import pack
from deeplink.core.types import parse_members
from tests.cache.agents import config_below
def die(progress):
    if progress.shards >= 2:
        os.kill(os.getpid(), signal.SIGKILL)
source, root, members, token = sys.argv[1:]
pack(source, "digits", config=config_below(Path(root)), members=parse_members(members), token=token, progress=die)
"""


def spread(source: Path, agents: Agents, config: Config, **options: object) -> PackResult:
    return pack(
        str(source),
        "digits",
        config=config,
        members=agents.members,
        token=agents.token,
        **options,  # type: ignore[arg-type]
    )


def contents(config: Config) -> dict[str, bytes]:
    with Reader.open("digits", config=config) as reader:
        found = [bytes(view) for view in reader.read(range(len(reader)))]
        assert reader.stats().source_samples == 0
        return dict(zip(reader.index.keys(), found, strict=True))


def leftovers(agents: Agents) -> list[str]:
    return [path.name for store in agents.stores.values() for path in store.root.glob(".packing-*")]


def test_members_pack_what_one_process_would_have_packed(
    source: Path, agents: Agents, config: Config, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[PackProgress] = []
    result = spread(source, agents, agents.config(), progress=told.append)
    assert not [record for record in caplog.records if "spreading" in record.name]  # nobody gave up
    assert contents(agents.config()) == files
    assert (result.read_files, result.short) == (len(files), 0)
    assert (told[-1].files, told[-1].bytes) == (len(files), sum(map(len, files.values())))
    assert not Store(agents.config().store).ids()
    assert not leftovers(agents)
    alone = pack(str(source), "digits", config=dataclasses.replace(config, shard_bytes=1 << 16))
    assert result.placed.keys() == alone.placed.keys()


def test_each_copy_lies_with_its_owners_and_with_nobody_else(source: Path, agents: Agents) -> None:
    result = spread(source, agents, agents.config(replicas=1))
    held = {node: set(store.ids()) for node, store in agents.stores.items()}
    assert sum(map(len, held.values())) == result.shards
    assert all(shard in held[nodes[0]] for shard, nodes in result.placed.items())


def test_members_that_do_not_reach_the_source_leave_it_to_the_packer(
    source: Path, agents: Agents, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on nodes where another tree lies at the same path: same names and sizes, other times.
    other = shutil.copytree(source, source.parent / "other", copy_function=shutil.copyfile)
    for name in files:
        os.utime(other / name, ns=(1, 1))
    monkeypatch.setattr(distributed_pack, "open_source", lambda _: open_source(str(other)))
    result = spread(source, agents, agents.config())
    assert contents(agents.config()) == files
    assert result.short == 0


def test_a_file_that_nobody_can_read_ends_it_by_name(
    source: Path, agents: Agents, files: dict[str, bytes]
) -> None:
    last = max(files)

    def remove(progress: PackProgress) -> None:
        (source / last).unlink(missing_ok=True)

    with pytest.raises(SourceError, match="cannot be read") as ended:
        spread(source, agents, agents.config(), progress=remove)
    assert ended.value.key == last
    with pytest.raises(DatasetMissingError):
        Catalog(agents.config().catalog).latest("digits")


def test_a_busy_member_is_left_out_and_the_others_pack(
    source: Path, agents: Agents, files: dict[str, bytes]
) -> None:
    hold = threading.Event()

    def asked() -> Iterator[cache_pb2.PackRequest]:
        yield cache_pb2.PackRequest(
            task=cache_pb2.PackTask(source=str(source), plan="0" * 40, members="n0=127.0.0.1:1", replicas=1)
        )
        hold.wait(LIMIT_S)

    with open_channel(agents.members[0].address, agents.token) as channel:
        call = cache_pb2_grpc.CacheStub(channel).Pack(asked())
        assert next(call).WhichOneof("what") == "advance"  # it is at work
        result = spread(source, agents, agents.config())
        hold.set()
        call.cancel()
    assert contents(agents.config()) == files
    assert result.short == 0


@pytest.mark.parametrize(
    "share",
    [
        cache_pb2.PackShard(keys=b"../../etc/passwd", key_lengths=b"\x10\0", sizes=bytes(8)),
        cache_pb2.PackShard(keys=b"ab", key_lengths=b"\x01\0", sizes=bytes(8)),
        cache_pb2.PackShard(keys=b"a", key_lengths=b"\x01\0", sizes=b"\xff" * 8),
        cache_pb2.PackShard(keys=b"a", key_lengths=b"\x01\0", sizes=b""),
        cache_pb2.PackShard(),
    ],
)
def test_a_hostile_request_is_refused(source: Path, agents: Agents, share: cache_pb2.PackShard) -> None:
    task = cache_pb2.PackTask(source=str(source), plan="0" * 40, members="n0=127.0.0.1:1", replicas=1)
    requests = iter([cache_pb2.PackRequest(task=task), cache_pb2.PackRequest(shard=share)])
    with open_channel(agents.members[0].address, agents.token) as channel:
        replies = list(cache_pb2_grpc.CacheStub(channel).Pack(requests))
    assert [reply.failed.problem for reply in replies if reply.WhichOneof("what") == "failed"] == [
        cache_pb2.PACK_PROBLEM_SOURCE
    ]
    assert not agents.stores[NodeName("n0")].ids()


def test_a_packer_that_was_killed_goes_on_where_it_was(
    source: Path, agents: Agents, files: dict[str, bytes], tmp_path: Path
) -> None:
    members = ",".join(f"{member.name}={member.address}" for member in agents.members)
    died = subprocess.run(
        [sys.executable, "-c", PACK_AND_DIE, str(source), str(tmp_path / "head"), members, agents.token],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    with pytest.raises(DatasetMissingError):
        Catalog(agents.config().catalog).latest("digits")
    result = spread(source, agents, agents.config())
    assert result.read_files < len(files)
    assert contents(agents.config()) == files


def test_each_member_keeps_its_shards_at_home_too(source: Path, agents: Agents, tmp_path: Path) -> None:
    spread(source, agents, agents.config(), home=str(tmp_path / "home"))
    index = Catalog(agents.config().catalog).open("digits")
    assert all(open_home(index.home).has(entry.id, entry.bytes) for entry in index.shards)


def test_what_a_member_had_not_finished_when_it_died_others_make(
    source: Path, agents: Agents, files: dict[str, bytes]
) -> None:
    def stop(progress: PackProgress) -> None:
        if "n1" in agents.servers:
            agents.stop("n1")

    result = spread(source, agents, agents.config(), progress=stop)
    assert all(set(nodes) == {"n0", "n2"} for nodes in result.placed.values())
    with Reader.open("digits", config=agents.config()) as reader:
        assert {key: bytes(reader.read([reader.index.row(key)])[0]) for key in files} == files


def test_with_no_member_left_the_packer_does_it_alone(
    source: Path, agents: Agents, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_pack, "open_source", lambda _: open_source(str(source / "nothing")))
    result = spread(source, agents, agents.config())
    assert (result.read_files, result.short) == (len(files), 0)
    assert contents(agents.config()) == files


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_member_whose_ssd_is_full_is_left_out(source: Path, tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "n0").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60k,mode=700", "none", str(tmp_path / "n0")],
        check=True,
        timeout=LIMIT_S,
    )
    agents = Agents(tmp_path)
    try:
        for name in ("n0", "n1", "n2"):
            agents.start(name)
        result = spread(source, agents, agents.config())
        assert contents(agents.config()) == files
        assert result.short == 0
        assert not any("n0" in nodes for nodes in result.placed.values())
    finally:
        agents.stop_all()
        subprocess.run(["umount", "-l", str(tmp_path / "n0")], check=True, timeout=LIMIT_S)
