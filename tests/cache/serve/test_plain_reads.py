"""Reads by our own clients, and by any of gRPC, from real agents."""

from __future__ import annotations

import dataclasses
import os
import socket
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from torch.utils.data import DataLoader

import deeplink
from deeplink.cache.errors import MemberError
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.serve.server import CacheServicer, plain_clients, register
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import Places, PlainTransport
from deeplink.core.clock import SystemClock
from deeplink.core.types import Member, NodeName, ShardId, format_members
from deeplink.rpc.channel import open_channel
from deeplink.rpc.grpc_server import bound_server
from deeplink.rpc.plain.serving import ServerLimits
from deeplink.v1 import cache_pb2, cache_pb2_grpc
from tests.cache.pack.test_shard import PAYLOADS, write
from tests.cache.test_reader import read_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.pack.building import SealedShard
    from deeplink.core.config import Config
    from tests.cache.agents import Agents

MOST = 2**32 - 1
N0 = NodeName("n0")


@pytest.fixture
def spread(source: Path, agents: Agents) -> Config:
    """The configuration of a node that is no member, with the shards on the agents, and their source gone."""
    config = agents.config(read_deadline_ms=20_000)
    pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    source.rename(source.with_name("moved"))
    return config


@pytest.fixture
def sealed(tmp_path: Path, agents: Agents) -> SealedShard:
    """A shard that n0 holds; its blocks are PAYLOADS."""
    sealed = write(tmp_path / "draft", PAYLOADS)
    agents.stores[N0].adopt(tmp_path / "draft", sealed.id)
    return sealed


@pytest.fixture
def data(agents: Agents) -> Iterator[PlainTransport]:
    """What asks members for extents."""
    made = PlainTransport(agents.token, SystemClock())
    yield made
    made.close()


def data_member(agents: Agents) -> Member:
    return next(member for member in agents.members if member.name == N0)


def asked(
    data: PlainTransport, member: Member, shards: list[str], extents: list[tuple[int, int, int, int]]
) -> list[tuple[int, bytes]]:
    """Return status and bytes of each extent."""
    array = np.array(extents, frames.EXTENT)
    request = frames.ExtentsRequest(0, [ShardId(name) for name in shards], array)
    lengths = np.minimum(array["length"].astype(np.int64), 1 << 20)
    places = Places(memoryview(bytearray(int(lengths.sum()))), np.cumsum(lengths) - lengths)
    status = data.start(member, request, 20.0, places).result().status.tolist()
    return [
        (code, bytes(places.arena[start : start + length]) if code == 0 else b"")
        for code, start, length in zip(status, places.starts.tolist(), lengths.tolist(), strict=True)
    ]


def connections(agents: Agents) -> int:
    return sum(one.server.open_connections() for one in agents.servers.values())


def test_extents_come_in_order_and_merged_where_they_lie_together(
    agents: Agents, data: PlainTransport, sealed: SealedShard
) -> None:
    whole = [(0, number, 0, len(payload)) for number, payload in enumerate(PAYLOADS)]
    together = [(0, 5, at, 100) for at in range(0, 1000, 100)]
    apart = [(0, 5, 77, 1000), (0, 2, 1, 0), (0, 5, 0, 10)]
    extents = whole + together + apart + whole[::-1]
    found = asked(data, data_member(agents), [sealed.id], extents)
    assert found == [(0, PAYLOADS[block][at : at + length]) for _, block, at, length in extents]
    assert asked(data, data_member(agents), [sealed.id], []) == []
    assert asked(data, data_member(agents), [], []) == []


def test_several_shards_in_one_batch(agents: Agents, data: PlainTransport, tmp_path: Path) -> None:
    sealed = []
    for number in range(3):
        payloads = [bytes([number]) * 9000, bytes([100 + number]) * 100]
        sealed.append(write(tmp_path / "draft", payloads).id)
        agents.stores[N0].adopt(tmp_path / "draft", sealed[-1])
    extents = [(n % 3, n // 3 % 2, n, 50) for n in range(40)]
    found = asked(data, data_member(agents), list(sealed), extents)
    assert found == [(0, bytes([shard + 100 * block]) * 50) for shard, block, _, _ in extents]


@pytest.mark.parametrize(
    "extent",
    [
        (0, 6, 0, 1),
        (0, MOST, 0, 1),
        (0, 5, len(PAYLOADS[5]), 1),
        (0, 5, MOST, MOST),
        (0, 5, 0, MOST),
        (1, 0, 0, 1),
        (MOST, 0, 0, 0),
    ],
)
def test_a_hostile_extent_is_refused_alone(
    agents: Agents, data: PlainTransport, sealed: SealedShard, extent: tuple[int, int, int, int]
) -> None:
    found = asked(data, data_member(agents), [sealed.id], [(0, 1, 0, 1), extent, (0, 1, 0, 1)])
    assert found == [(0, PAYLOADS[1]), (cache_pb2.READ_STATUS_BAD_EXTENT, b""), (0, PAYLOADS[1])]


@pytest.mark.parametrize("name", ["", "0" * 40, "../../../etc/passwd", "/etc/passwd", "x\0y", "é" * 40])
def test_an_unknown_or_tricky_shard_is_refused_alone(
    agents: Agents, data: PlainTransport, sealed: SealedShard, name: str
) -> None:
    found = asked(data, data_member(agents), [name, sealed.id], [(0, 0, 0, 1), (1, 1, 0, 1)])
    assert found == [(cache_pb2.READ_STATUS_NO_SHARD, b""), (0, PAYLOADS[1])]


def test_more_shards_than_anybody_needs_are_refused(agents: Agents, data: PlainTransport) -> None:
    request = frames.ExtentsRequest(0, [ShardId("x")] * 5000, np.empty(0, frames.EXTENT))
    with pytest.raises(MemberError, match="more than 4096 shards"):
        data.start(data_member(agents), request, 20.0, Places.alone(request)).result()


def test_a_shard_cut_short_while_it_is_sent_is_a_status_and_is_put_aside(
    agents: Agents, data: PlainTransport, sealed: SealedShard
) -> None:
    member, store = data_member(agents), agents.stores[N0]
    assert asked(data, member, [sealed.id], [(0, 5, 0, 10)])[0][0] == 0
    os.truncate(store.path(sealed.id), 8192)
    # It was looked at a moment ago: the kernel finds that it is gone, or the next look does.
    try:
        assert asked(data, member, [sealed.id], [(0, 5, 0, 10)])[0][0] != 0
    except MemberError as lost:
        assert lost.is_well  # noqa: PT017 - either
        assert sealed.id in str(lost)  # noqa: PT017
    assert asked(data, member, [sealed.id], [(0, 5, 0, 10)])[0][0] == cache_pb2.READ_STATUS_NO_SHARD
    assert not store.has(sealed.id)


def test_an_unverified_shard_is_sent_all_the_same(
    agents: Agents, data: PlainTransport, sealed: SealedShard
) -> None:
    store = agents.stores[N0]
    store.doubt(sealed.id)
    assert not store.is_verified(sealed.id)
    extents = [(0, number, 0, len(payload)) for number, payload in enumerate(PAYLOADS)]
    assert asked(data, data_member(agents), [sealed.id], extents) == [(0, payload) for payload in PAYLOADS]


def test_a_reader_keeps_one_connection_to_each_member(
    agents: Agents, spread: Config, files: dict[str, bytes]
) -> None:
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files
        assert read_all(reader, seed=1) == files
        assert connections(agents) == 3
        assert reader.stats().failures == 0
        assert reader.stats().requests >= 6


def test_members_that_came_back_are_read_on(agents: Agents, spread: Config, files: dict[str, bytes]) -> None:
    with Reader.open("digits", config=spread) as reader:
        assert read_all(reader) == files
        for member in agents.members:
            agents.restart(member)
            assert read_all(reader, seed=2) == files
        assert reader.stats().failures == 0


@pytest.mark.slow
def test_workers_of_a_dataloader_forked_beside_an_open_connection_read_for_themselves(
    spread: Config, files: dict[str, bytes]
) -> None:
    dataset = deeplink.Dataset("digits", labels=False, config=spread)
    dataset[0]  # the connections of this process are open when the workers come
    for _ in range(2):
        loader = DataLoader(dataset, batch_size=7, num_workers=2, collate_fn=list, multiprocessing_context="fork")
        assert sorted(item for batch in loader for item in batch) == sorted(files.values())
    assert dataset[0] in files.values()
    dataset.close()


def test_the_agent_of_another_node_is_not_taken_for_the_member(
    agents: Agents, data: PlainTransport, sealed: SealedShard
) -> None:
    """It may pass on what it hears: the proof holds for the node that makes it."""
    other = Member(NodeName("n7"), agents.members[0].address)
    with pytest.raises(MemberError, match="the agent of node n0, not of n7"):
        asked(data, other, [sealed.id], [(0, 0, 0, 1)])


def test_any_client_of_grpc_reads_the_same(agents: Agents, sealed: SealedShard) -> None:
    extents = np.array([(0, n, 0, len(payload)) for n, payload in enumerate(PAYLOADS)], frames.EXTENT)
    request = cache_pb2.ReadRequest(id=7, shards=[sealed.id], extents=extents.tobytes())
    with open_channel(agents.members[0].address, agents.token) as channel:
        replies = list(cache_pb2_grpc.CacheStub(channel).Read(iter([request, request]), timeout=20.0))
    assert [reply.id for reply in replies] == [7, 7]
    assert [reply.body for reply in replies] == [b"".join(PAYLOADS)] * 2
    assert np.frombuffer(replies[0].head, frames.ITEM)["length"].tolist() == list(map(len, PAYLOADS))


def test_a_member_that_says_nothing_is_overtaken_before_its_deadline(
    agents: Agents, spread: Config, files: dict[str, bytes]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and no more
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        members = tuple(
            Member(member.name, address) if member.name == "n1" else member for member in agents.members
        )
        config = dataclasses.replace(spread, members=format_members(members))
        with Reader.open("digits", config=config) as reader:
            assert read_all(reader) == files
            stats = reader.stats()
    assert stats.second_requests >= 3
    # From then on it is left alone. Nothing waits for the deadline: its connection fails at most, on a machine so
    # busy that five seconds pass meanwhile.
    assert stats.overtaken >= 3


def test_a_busy_member_is_asked_again_and_the_source_serves_in_the_end(
    tmp_path: Path, source: Path, agents: Agents, files: dict[str, bytes]
) -> None:
    config = agents.config(replicas=1)
    pack(str(source), "digits", config=config, members=agents.members[:1], token=agents.token)
    servicer = CacheServicer(agents.stores[N0], N0)
    plain = plain_clients(servicer, agents.token, ServerLimits(answers=0, retry_after_ms=10))
    busy = bound_server("127.0.0.1:0", agents.token, partial(register, calls=servicer.calls), plain=plain)
    busy.server.start()
    try:
        only = format_members((Member(N0, f"127.0.0.1:{busy.port}"),))
        with Reader.open("digits", config=dataclasses.replace(config, members=only)) as reader:
            rows = list(range(len(reader)))
            found = {reader.index.key(row): bytes(view) for row, view in zip(rows, reader.read(rows), strict=True)}
            assert found == files
            assert reader.stats().source_samples == len(files)
            assert reader.stats().busy >= 4  # at once, and three times more when it said
    finally:
        busy.server.stop(None).wait()
