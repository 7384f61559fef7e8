from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deeplink.cache import membership
from deeplink.cache.errors import KeyMissingError, SampleUnavailableError
from deeplink.cache.format.block import SPAN
from deeplink.cache.packer import pack
from deeplink.cache.read.mapped import ShardFile
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.core.config import ConfigError
from deeplink.core.types import Member, NodeName, ShardId, format_members
from tests.cache.agents import Agents, config_below
from tests.pickled import pickled, unpickled
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkContext, SpawnContext

    from deeplink.core.config import Config


READ_WITHOUT_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from deeplink.cache.errors import SampleUnavailableError
from deeplink.cache.reader import Reader
from tests.cache.agents import config_below
reader = Reader.open("digits", config=config_below(Path(sys.argv[1])))
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    reader.read([0])
except SampleUnavailableError:
    pass  # the source cannot be opened either
else:
    sys.exit(3)
while taken:
    os.close(taken.pop())
reader._own.local.shards.vouch(0)
reader.read([0])
sys.exit(reader.stats().local_samples != 1)
"""


def read_all(reader: Reader, seed: int = 0) -> dict[str, bytes]:
    """Return every sample, read in random order in batches of 7."""
    rows = list(range(len(reader)))
    random.Random(seed).shuffle(rows)  # noqa: S311 - an order, no secret
    found: dict[str, bytes] = {}
    for start in range(0, len(rows), 7):
        batch = rows[start : start + 7]
        for row, view in zip(batch, reader.read(batch), strict=True):
            found[reader.index.key(row)] = bytes(view)
    return found


@pytest.fixture
def local(source: Path, config: Config) -> Iterator[Reader]:
    """A reader whose node holds every shard, and whose source is gone."""
    pack(str(source), "digits", config=config)
    with Reader.open("digits", config=config) as reader:
        yield reader


@pytest.fixture
def spread(source: Path, agents: Agents) -> Config:
    """The configuration of a node that is no member, with the shards on the agents."""
    config = agents.config()
    pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    source.rename(source.with_name("moved"))
    return config


def damage(store: Store, shard: ShardId, *, at: int) -> None:
    with store.path(shard).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


# Local reads.


def test_everything_is_read_from_the_own_store(local: Reader, files: dict[str, bytes]) -> None:
    assert read_all(local) == files
    stats = local.stats()
    assert (stats.local_samples, stats.local_bytes) == (len(files), sum(map(len, files.values())))
    assert (stats.peer_samples, stats.source_samples, stats.failures, stats.healed) == (0, 0, 0, 0)


def test_rows_come_in_the_order_asked_also_twice(local: Reader, files: dict[str, bytes]) -> None:
    rows = np.array([5, 3, 5, 0, 59, 3])
    assert [bytes(view) for view in local.read(rows)] == [files[local.index.key(int(row))] for row in rows]
    assert local.read([]) == []


@pytest.mark.parametrize("rows", [[-1], [0, 60], [2**62]])
def test_a_row_outside_is_refused(local: Reader, rows: list[int]) -> None:
    with pytest.raises(KeyMissingError, match="row"):
        local.read(rows)


def test_views_outlive_the_reader(local: Reader, files: dict[str, bytes]) -> None:
    views = local.read(range(60))
    local.close()
    assert {local.index.key(row): bytes(view) for row, view in enumerate(views)} == files
    assert read_all(local) == files  # and it opens again


def test_a_shard_not_verified_here_is_not_mapped(local: Reader, config: Config, files: dict[str, bytes]) -> None:
    store = Store(config.store)
    for shard in store.ids():
        (store.root / f"{shard}.verified").unlink()
    assert read_all(local) == files
    assert [bytes(view) for view in local.views(range(60))] == [files[key] for key in local.index.keys(range(60))]
    assert str(store.root) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_views_are_of_the_mapping_and_the_same_bytes(local: Reader, files: dict[str, bytes]) -> None:
    rows = list(range(60)) * 2
    for _ in range(2):  # first touch, and again
        views = local.views(rows)
        assert [bytes(view) for view in views] == [files[local.index.key(row)] for row in rows]
        assert all(view.readonly for view in views)
    assert local.stats().local_samples == 240


def test_views_of_a_shard_that_is_not_here_come_from_elsewhere(
    local: Reader, config: Config, files: dict[str, bytes]
) -> None:
    lost = local.index.shards[0]
    Store(config.store).remove(lost.id)
    assert [bytes(view) for view in local.views(range(60))] == [files[key] for key in local.index.keys(range(60))]
    assert local.stats().source_samples == lost.samples


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_views_do_not_show_damage(local: Reader, config: Config, files: dict[str, bytes], how: str) -> None:
    store, shard = Store(config.store), local.index.shards[0].id
    if how == "flipped":
        damage(store, shard, at=int(local.index.block_offsets(0)[0]) + 50)
    else:
        os.truncate(store.path(shard), 10_000)
    assert [bytes(view) for view in local.views(range(60))] == [files[key] for key in local.index.keys(range(60))]
    assert local.stats().failures == 1


def test_bytes_that_rot_after_the_first_read_are_noticed_where_that_was_asked_for(
    local: Reader, config: Config, files: dict[str, bytes]
) -> None:
    store, shard = Store(config.store), local.index.shards[0]
    with Reader.open("digits", config=dataclasses.replace(config, check_every_read=True)) as careful:
        assert read_all(careful) == read_all(local) == files
        damage(store, shard.id, at=int(local.index.block_offsets(0)[0]) + 50)
        assert read_all(careful) == files
        assert careful.stats().failures == 1


def test_a_store_on_a_slow_file_system_is_said(
    local: Reader, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    local.read([0])
    assert "may be read slower" not in caplog.text
    assert "may be read slower" in slowly_stored(config, caplog)


def slowly_stored(config: Config, caplog: pytest.LogCaptureFixture) -> str:
    """What is said when the source lies in memory and the store does not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "a").write_bytes(b"a")
        pack(folder, "in-memory", config=config)
        with Reader.open("in-memory", config=config) as reader:
            assert bytes(reader.read([0])[0]) == b"a"
    return caplog.text


def test_a_file_cut_short_between_two_batches_kills_nobody(local: Reader, config: Config) -> None:
    """The mapping is there, the pages are gone: a load would be SIGBUS."""
    before = [bytes(view) for view in local.read(range(60))]
    for shard in local.index.shards:
        os.truncate(Store(config.store).path(shard.id), 0)
    assert [bytes(view) for view in local.read(range(60))] == before
    assert local.stats().local_samples == 60


def test_a_batch_is_one_arena_in_order(local: Reader, files: dict[str, bytes]) -> None:
    rows = [7, 3, 7, 0]
    batch = local.batch(rows)
    assert len(batch) == 4
    assert batch.data == b"".join(files[local.index.key(row)] for row in rows)
    assert [len(sample) for sample in batch] == batch.lengths.tolist()
    assert batch[1] == files[local.index.key(3)]
    with pytest.raises(IndexError):
        batch[4]
    assert len(local.batch([])) == 0


def test_a_file_cut_short_while_open_is_an_error_and_no_signal(local: Reader, config: Config) -> None:
    store = Store(config.store)
    for shard in store.ids():
        for mapped in (False, True):
            file = ShardFile(store.path(shard), shard, mapped=mapped)
            size = file.bytes
            assert len(file.read([8192], [100], cold=True)[0]) == 100
            os.truncate(store.path(shard), 4096)
            with pytest.raises(Exception, match="4,096 bytes"):
                file.read([8192], [100], cold=True)
            os.truncate(store.path(shard), size)


def test_threads_share_a_reader(local: Reader, files: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(found == files for found in pool.map(lambda seed: read_all(local, seed), range(16)))
    assert local.stats().local_samples == 16 * len(files)


# A damaged store.


@pytest.mark.parametrize("how", ["flipped", "truncated", "emptied", "header"])
def test_a_damaged_shard_is_read_from_the_source_set_aside_and_made_anew(
    local: Reader, config: Config, files: dict[str, bytes], how: str
) -> None:
    store = Store(config.store)
    shard = local.index.shards[0].id
    if how == "flipped":
        damage(store, shard, at=int(local.index.block_offsets(0)[0]) + 50)
    elif how == "header":
        damage(store, shard, at=int(local.index.block_offsets(0)[-1]) - 100)
    else:
        os.truncate(store.path(shard), 0 if how == "emptied" else 10_000)
    assert read_all(local) == files
    stats = local.stats()
    assert stats.failures == 1
    assert stats.healed > 0
    # What was read before the damage was met had its own checksum.
    assert 0 < stats.source_samples <= local.index.shards[0].samples
    # It is read whole in the background, put aside, and made again from the source.
    until(lambda: store.is_verified(shard) and any((store.root / "quarantine").iterdir()))


def test_a_shard_cut_short_while_mapped_is_healed(local: Reader, config: Config, files: dict[str, bytes]) -> None:
    assert read_all(local) == files
    os.truncate(Store(config.store).path(local.index.shards[1].id), 4096)
    assert read_all(local) == files
    # It is brought back beside the reading, and what is read after that is read from it again.
    assert 0 < local.stats().source_samples <= local.index.shards[1].samples


def test_what_cannot_be_had_anywhere_is_said_by_name(local: Reader, config: Config, source: Path) -> None:
    lost = local.index.shards[0].id
    Store(config.store).remove(lost)
    source.rename(source.with_name("moved"))
    with pytest.raises(SampleUnavailableError) as refused:
        local.read([0])
    assert (refused.value.key, refused.value.shard) == (local.index.key(0), lost)
    assert refused.value.tried


def test_a_source_that_changed_since_is_not_served(local: Reader, config: Config, source: Path) -> None:
    row = next(row for row in range(60) if local.index.lengths[row] == 4096)
    shard = local.index.shards[int(local.index.shard[row])].id
    Store(config.store).remove(shard)
    (source / local.index.key(row)).write_bytes(b"x" * 4096)
    with pytest.raises(SampleUnavailableError, match="not those that were packed"):
        local.read([row])


# Reads from members.


def test_everything_is_read_from_members(spread: Config, files: dict[str, bytes]) -> None:
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files
        stats = reader.stats()
    assert (stats.peer_samples, stats.peer_bytes) == (len(files), sum(map(len, files.values())))
    assert (stats.local_samples, stats.source_samples, stats.failures) == (0, 0, 0)


def test_one_batch_larger_than_a_request_may_be(spread: Config, files: dict[str, bytes]) -> None:
    with Reader.open("digits", config=spread) as reader:
        rows = [row % 60 for row in range(5000)]
        views = reader.read(rows)
        assert all(
            bytes(view) == files[reader.index.key(row)] for row, view in zip(rows[:200], views[:200], strict=True)
        )
        assert len(views) == 5000


def test_a_member_that_dies_is_replaced_by_the_next_replica(
    spread: Config, agents: Agents, files: dict[str, bytes]
) -> None:
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files
        agents.stop("n1")
        assert read_all(reader) == files
        stats = reader.stats()
    assert stats.source_samples == 0
    assert stats.failures == stats.healed


def test_a_member_that_was_started_anew_is_used_again(
    spread: Config, agents: Agents, files: dict[str, bytes]
) -> None:
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files
        for member in agents.members:
            agents.restart(member)
        assert read_all(reader) == files
        stats = reader.stats()
    assert (stats.failures, stats.source_samples) == (0, 0)


class Misbehaving:
    """A member that takes connections and then does what `act` does with each."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._act = act
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                with contextlib.suppress(OSError):
                    self._act(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT_S)
        for connection in self._open:
            connection.close()


def settings_then(rest: bytes) -> Callable[[socket.socket], None]:
    def act(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"\0\0\0\x04\0\0\0\0\0" + rest)

    return act


ACTS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda connection: None,
    "hanging up": lambda connection: connection.close(),
    "greeting and silent": settings_then(b""),
    "no HTTP/2": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20),
    "going away": settings_then(b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)),
    "resetting": settings_then(b"\0\0\x04\x03\0\0\0\0\x01" + bytes(4)),
    "endless head": settings_then(b"\xff\xff\xff\x01\x04\0\0\0\x01"),
    "huge message": settings_then(b"\0\0\x05\0\0\0\0\0\x01" + b"\0\xff\xff\xff\xff"),
    "half a message": settings_then(b"\0\0\x07\0\0\0\0\0\x01" + b"\0\0\0\0\x64ab"),
    "garbage as message": settings_then(b"\0\0\x09\0\0\0\0\0\x01" + b"\0\0\0\0\x04\xff\xff\xff\xff"),
    "end without status": settings_then(b"\0\0\0\0\x01\0\0\0\x01"),
    "malformed head": settings_then(b"\0\0\x02\x01\x05\0\0\0\x01" + b"\x00\x7f"),
    "unknown status": settings_then(b"\0\0\x0f\x01\x05\0\0\0\x01" + b"\x00\x0bgrpc-status\x0299"[:15]),
}


@pytest.fixture(params=ACTS)
def misbehaving(request: pytest.FixtureRequest) -> Iterator[Misbehaving]:
    member = Misbehaving(ACTS[request.param])
    yield member
    member.close()


def test_a_member_that_misbehaves_costs_no_sample(
    spread: Config, agents: Agents, files: dict[str, bytes], misbehaving: Misbehaving
) -> None:
    members = [
        Member(member.name, misbehaving.address if member.name == "n0" else member.address)
        for member in agents.members
    ]
    config = dataclasses.replace(spread, members=format_members(tuple(members)), read_deadline_ms=300)
    with Reader.open("digits", config=config) as reader:
        assert read_all(reader) == files
        stats = reader.stats()
    assert stats.peer_samples == len(files)
    assert stats.source_samples == 0
    assert stats.failures + stats.overtaken > 0
    assert stats.failures == stats.healed


def relay(address: str, answer: Callable[[socket.socket, bytes], None]) -> Callable[[socket.socket], None]:
    """Return an act that lets the member at `address` answer, and hands its bytes on with `answer`."""
    host, _, port = address.rpartition(":")

    def pump(origin: socket.socket, hand_on: Callable[[bytes], None], target: socket.socket) -> None:
        with contextlib.suppress(OSError), target:
            while data := origin.recv(1 << 16):
                hand_on(data)

    def act(connection: socket.socket) -> None:
        member = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        for pumped in ((connection, member.sendall, member), (member, partial(answer, connection), connection)):
            threading.Thread(target=pump, args=pumped, daemon=True).start()

    return act


DEADLINE_MS = 1000


def late(connection: socket.socket, data: bytes) -> None:
    threading.Event().wait(2 * DEADLINE_MS / 1000)
    connection.sendall(data)


def dripping(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.sendall(bytes([byte]))
        threading.Event().wait(DEADLINE_MS / 1000 / 20)


@pytest.mark.parametrize("answer", [late, dripping], ids=["after the deadline", "piece by piece"])
def test_a_member_whose_right_answer_comes_too_slowly_costs_no_sample(
    spread: Config, agents: Agents, files: dict[str, bytes], answer: Callable[[socket.socket, bytes], None]
) -> None:
    slow = Misbehaving(relay(agents.members[0].address, answer))
    members = (Member(agents.members[0].name, slow.address), *agents.members[1:])
    config = dataclasses.replace(spread, members=format_members(members), read_deadline_ms=DEADLINE_MS)
    with Reader.open("digits", config=config) as reader:
        assert read_all(reader) == files
        assert read_all(reader, seed=1) == files  # what came late is nobody else's answer
        stats = reader.stats()
    slow.close()
    assert stats.peer_samples == 2 * len(files)
    assert stats.source_samples == 0
    assert stats.failures + stats.overtaken > 0
    assert stats.failures == stats.healed


def test_nobody_answers_and_the_source_serves(
    spread: Config, agents: Agents, source: Path, files: dict[str, bytes]
) -> None:
    source.with_name("moved").rename(source)
    agents.stop_all()
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files
        assert reader.stats().source_samples == len(files)


def test_wrong_bytes_from_a_member_are_healed_from_the_next(
    spread: Config, agents: Agents, files: dict[str, bytes]
) -> None:
    with Reader.open("digits", config=spread) as reader:
        store = agents.stores[NodeName("n0")]
        for number, entry in enumerate(reader.index.shards):
            if store.has(entry.id):
                damage(store, entry.id, at=int(reader.index.block_offsets(number)[0]) + 10)
        assert read_all(reader) == files
        stats = reader.stats()
    assert 0 < stats.failures == stats.healed
    assert stats.source_samples == 0


def test_a_member_is_told_that_its_shard_is_doubted_and_not_asked_for_it_at_once(
    spread: Config, agents: Agents, files: dict[str, bytes]
) -> None:
    store = agents.stores[NodeName("n0")]
    with Reader.open("digits", config=spread) as reader:
        owned = [n for n, shard in enumerate(reader.index.shards) if store.has(shard.id)]
        number = next(n for n in owned if membership.ranked(reader.index.shards[n].id, agents.stores)[0] == "n0")
        shard = reader.index.shards[number].id
        before = store.path(shard).stat()
        damage(store, shard, at=int(reader.index.block_offsets(number)[0]) + 10)
        # As a disk does it: nothing tells of it.
        os.utime(store.path(shard), ns=(before.st_atime_ns, before.st_mtime_ns))
        assert store.is_verified(shard)
        assert read_all(reader) == files
        failures = reader.stats().failures
        assert failures == 1
        assert not store.is_verified(shard)
        assert read_all(reader) == files
        assert reader.stats().failures == failures
    assert [n for n in owned if not store.is_verified(reader.index.shards[n].id)] == [number]
    assert not store.verify(shard)  # as the agent does with all that are not verified
    assert not store.has(shard)


def test_a_wrong_token_is_no_way_in_and_the_source_serves(
    spread: Config, source: Path, tmp_path: Path, files: dict[str, bytes]
) -> None:
    source.with_name("moved").rename(source)
    (tmp_path / "wrong").write_text("wrong")
    (tmp_path / "wrong").chmod(0o600)
    with Reader.open("digits", config=dataclasses.replace(spread, token_file=tmp_path / "wrong")) as reader:
        assert read_all(reader) == files
        stats = reader.stats()
    assert (stats.peer_samples, stats.source_samples) == (0, len(files))


def test_members_without_a_token_are_an_error(spread: Config) -> None:
    reader = Reader.open("digits", config=dataclasses.replace(spread, token_file=None))
    with pytest.raises(ConfigError, match="token_file"):
        reader.read([0])


def test_a_damaged_local_shard_is_brought_back_from_a_member(
    spread: Config, agents: Agents, files: dict[str, bytes]
) -> None:
    config = dataclasses.replace(spread, node="n0", store=agents.stores[NodeName("n0")].root)
    store = agents.stores[NodeName("n0")]
    with Reader.open("digits", config=config) as reader:
        mine = [number for number, entry in enumerate(reader.index.shards) if store.has(entry.id)]
        damaged = reader.index.shards[mine[0]].id
        damage(store, damaged, at=int(reader.index.block_offsets(mine[0])[0]) + 10)
        assert read_all(reader) == files
        assert reader.stats().healed > 0
        until(lambda: store.is_verified(damaged))
        before = reader.stats().local_samples
        until(lambda: len(reader.read(reader.index.rows_below(""))) == len(files) and store.has(damaged))
        assert read_all(reader) == files
        assert reader.stats().local_samples > before


def test_without_an_agent_what_came_from_the_source_lies_here_afterwards(
    local: Reader, config: Config, files: dict[str, bytes]
) -> None:
    shutil.rmtree(config.store)
    with Reader.open("digits", config=config) as reader:
        views = reader.read(range(len(reader)))
        assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
        assert reader.stats().source_samples == len(files)
        store = Store(config.store, make=False)
        until(lambda: all(store.is_verified(entry.id) for entry in reader.index.shards))
        until(lambda: reader.read(range(len(reader))) and reader.stats().local_samples >= len(files))
        before = reader.stats().source_samples
        assert read_all(reader) == files
        assert reader.stats().source_samples == before


def test_a_node_whose_own_agent_alone_is_configured_reads_without_its_token(
    local: Reader, config: Config, files: dict[str, bytes]
) -> None:
    alone = dataclasses.replace(config, node="n0", members="n0=127.0.0.1:1", token_file=None)
    with Reader.open("digits", config=alone) as reader:
        assert read_all(reader) == files
        assert reader.stats().failures == 0
    gone = dataclasses.replace(alone, token_file=config.store / "nowhere")
    with Reader.open("digits", config=gone) as reader:
        assert read_all(reader) == files


def test_a_shard_that_does_not_fit_is_not_tried_at_each_read(
    local: Reader, config: Config, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(config.store)
    with Reader.open("digits", config=dataclasses.replace(config, store_bytes=1000)) as reader:
        for _ in range(5):
            assert read_all(reader) == files
        until(lambda: "cannot be brought here" in caplog.text)
        assert read_all(reader) == files
        assert caplog.text.count("cannot be brought here") == 1
        assert reader.stats().source_samples == 6 * len(files)


def test_a_closed_reader_brings_nothing_more(local: Reader, config: Config, files: dict[str, bytes]) -> None:
    shutil.rmtree(config.store)
    with Reader.open("digits", config=config) as reader:
        healer = reader._process().healer
        assert len(reader.read(range(len(reader)))) == len(files)
    until(lambda: not healer._running)
    assert len(Store(config.store, make=False).ids()) < len(reader.index.shards)


def test_one_process_of_a_node_brings_at_a_time(local: Reader, config: Config) -> None:
    shutil.rmtree(config.store)
    Store(config.store)
    with Reader.open("digits", config=config) as reader, (config.store / ".bringing").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        reader.read(range(len(reader)))
        healer = reader._process().healer
        until(lambda: not healer._running)
        assert not Store(config.store).ids()


def test_what_a_killed_process_left_of_a_shard_is_taken_away(local: Reader, config: Config) -> None:
    shutil.rmtree(config.store)
    store = Store(config.store)
    left = [store.root / f".draft-{entry.id}.mdb-rebuilt" for entry in local.index.shards]
    for path in left:
        path.write_bytes(b"half of it")
    with Reader.open("digits", config=config) as reader:
        reader.read(range(len(reader)))
        until(lambda: all(store.is_verified(entry.id) for entry in reader.index.shards))
    assert not [path for path in left if path.exists()]


def test_a_store_that_cannot_be_made_does_not_end_the_run(
    spread: Config, tmp_path: Path, files: dict[str, bytes]
) -> None:
    (tmp_path / "file").write_text("x")
    with Reader.open("digits", config=dataclasses.replace(spread, store=tmp_path / "file" / "store")) as reader:
        assert read_all(reader) == files


@pytest.mark.slow
def test_running_out_of_descriptors_puts_no_shard_aside(source: Path, tmp_path: Path, config: Config) -> None:
    pack(str(source), "digits", config=config)
    ended = subprocess.run(
        [sys.executable, "-c", READ_WITHOUT_DESCRIPTORS, str(tmp_path)],
        check=False,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert not (config.store / "quarantine").exists()


# Processes.


def _read_in_child(reader: Reader, results: Any) -> None:
    results.put((read_all(reader), reader.stats().peer_samples))


@pytest.mark.slow
@pytest.mark.parametrize("start", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")])
def test_child_processes_read_on_their_own(
    spread: Config, files: dict[str, bytes], start: ForkContext | SpawnContext
) -> None:
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files  # connections are open when the children come
        results = start.Queue()
        children = [start.Process(target=_read_in_child, args=(reader, results)) for _ in range(2)]
        for child in children:
            child.start()
        found = [results.get(timeout=LIMIT_S) for _ in children]
        for child in children:
            child.join(LIMIT_S)
        assert found == [(files, len(files))] * 2
        assert read_all(reader) == files
        assert reader.stats().failures == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 and later: that is what is tested
def test_forking_while_threads_read(spread: Config, files: dict[str, bytes]) -> None:
    context = multiprocessing.get_context("fork")
    stop = threading.Event()
    with Reader.open("digits", config=spread) as reader:

        def busy() -> None:
            while not stop.is_set():
                read_all(reader)

        with ThreadPoolExecutor(2) as pool:
            workers = [pool.submit(busy) for _ in range(2)]
            try:
                for _ in range(5):
                    results = context.Queue()
                    child = context.Process(target=_read_in_child, args=(reader, results))
                    child.start()
                    assert results.get(timeout=LIMIT_S) == (files, len(files))
                    child.join(LIMIT_S)
            finally:
                stop.set()
            for worker in workers:
                worker.result()


def test_a_pickled_reader_reads_the_same_version(
    local: Reader, source: Path, config: Config, files: dict[str, bytes]
) -> None:
    kept = pickled(local)
    (source / "new").write_bytes(b"new")
    pack(str(source), "digits", config=config)
    with unpickled(kept) as again:
        assert again.version == local.version != Reader.open("digits", config=config).version
        assert read_all(again) == files


def test_a_long_sample_comes_from_members_too(tmp_path: Path, agents: Agents) -> None:
    data = {"big": os.urandom(SPAN + 1000), "small": b"s"}
    (tmp_path / "long").mkdir()
    for name, content in data.items():
        (tmp_path / "long" / name).write_bytes(content)
    config = agents.config()
    pack(str(tmp_path / "long"), "digits", config=config, members=agents.members, token=agents.token)
    with Reader.open("digits", config=config) as reader:
        assert read_all(reader) == data
        assert reader.stats().peer_samples == 2


def test_a_store_of_another_folder_is_not_looked_into(
    local: Reader, tmp_path: Path, files: dict[str, bytes]
) -> None:
    other = config_below(tmp_path / "other", catalog=tmp_path / "catalog")
    with Reader.open("digits", config=other) as reader:
        views = reader.read(range(len(reader)))  # in one batch: what comes in the background comes too late for it
        assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
        assert reader.stats().source_samples == len(files)


def test_a_shard_that_has_come_back_is_found_before_a_read_fails(
    local: Reader, config: Config, source: Path, files: dict[str, bytes]
) -> None:
    source.rename(source.with_name("moved"))
    store, shard = Store(config.store), local.index.shards[0].id
    data = store.path(shard).read_bytes()
    store.remove(shard)
    with pytest.raises(SampleUnavailableError):
        local.read([0])
    store.add(shard, [data], len(data))
    assert read_all(local) == files


def test_another_users_store_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / str(number)).write_bytes(bytes(4096))
    config = dataclasses.replace(config_below(tmp_path), shard_bytes=8192, fill_on_miss=False)
    pack(str(source), "it", config=config)

    def shut(*_: object, **__: object) -> ShardFile:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("deeplink.cache.read.mapped.ShardFile", shut)
    with Reader.open("it", config=config) as reader:
        assert len(read_all(reader)) == 8
        assert (reader.stats().source_samples, reader.stats().failures) == (8, 0)
    assert [record.levelname for record in caplog.records if "Permission denied" in record.message] == ["WARNING"]
