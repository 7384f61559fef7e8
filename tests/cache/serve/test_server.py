"""The cache service over real gRPC, asked by the generated client, as any other program would."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deeplink.cache.errors import MemberError, MemberSilentError
from deeplink.cache.format.block import SPAN
from deeplink.cache.serve import server
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.client import MemberClient
from deeplink.cache.transfer.frames import Places, PlainTransport
from deeplink.core.clock import SystemClock
from deeplink.core.types import Member, NodeName, ShardId
from deeplink.rpc import channel as wire
from deeplink.v1 import cache_pb2, cache_pb2_grpc
from tests.cache.agents import Agents
from tests.cache.pack.test_shard import PAYLOADS, write
from tests.deeplink.checkpoints.faults import refusing
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.pack.building import SealedShard

MOST = 2**32 - 1


@pytest.fixture
def member(agents: Agents) -> Member:
    return agents.members[0]


@pytest.fixture
def stub(agents: Agents, member: Member) -> Iterator[cache_pb2_grpc.CacheStub]:
    with wire.open_channel(member.address, agents.token) as channel:
        yield cache_pb2_grpc.CacheStub(channel)


@pytest.fixture
def sealed(tmp_path: Path, agents: Agents) -> SealedShard:
    """A shard that n0 holds; its blocks are PAYLOADS."""
    sealed = write(tmp_path / "draft", PAYLOADS)
    agents.stores[NodeName("n0")].adopt(tmp_path / "draft", sealed.id)
    return sealed


def ask(
    stub: cache_pb2_grpc.CacheStub, shards: list[str], extents: list[tuple[int, int, int, int]]
) -> list[tuple[int, bytes]]:
    """Return status and bytes of each extent."""
    request = cache_pb2.ReadRequest(id=5, shards=shards, extents=np.array(extents, frames.EXTENT).tobytes())
    items: list[tuple[int, bytes]] = []
    for reply in stub.Read(iter([request]), timeout=LIMIT_S):
        assert reply.id == 5
        body, at = reply.body, 0
        for status, length in np.frombuffer(reply.head, frames.ITEM).tolist():
            items.append((status, body[at : at + length]))
            at += length
        assert at == len(body)
    return items


def test_a_generated_client_reads_extents_in_order(stub: cache_pb2_grpc.CacheStub, sealed: SealedShard) -> None:
    extents = [(0, number, 0, len(payload)) for number, payload in enumerate(PAYLOADS)] + [
        (0, 5, 77, 1000),
        (0, 2, 1, 0),
    ]
    wanted = [*PAYLOADS, PAYLOADS[5][77:1077], b""]
    assert ask(stub, [sealed.id], extents) == [(0, data) for data in wanted]
    assert ask(stub, [sealed.id], extents[::-1]) == [(0, data) for data in wanted[::-1]]
    assert ask(stub, [sealed.id], []) == []


def test_a_doubted_shard_is_unverified_and_served_on(
    agents: Agents, stub: cache_pb2_grpc.CacheStub, sealed: SealedShard
) -> None:
    store = agents.stores[NodeName("n0")]
    names = [sealed.id, "0" * 40, "../" * 20, "nonsense"]
    assert store.is_verified(sealed.id)
    assert [r.id for r in stub.Read(iter([cache_pb2.ReadRequest(id=1, doubted=names)]), timeout=LIMIT_S)] == [1]
    assert not store.is_verified(sealed.id)
    assert ask(stub, [sealed.id], [(0, 0, 0, len(PAYLOADS[0]))]) == [(0, PAYLOADS[0])]
    assert store.verify(sealed.id)


def test_reads_that_stay_open_leave_room_for_other_calls(
    agents: Agents, member: Member, sealed: SealedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_READS", 2)
    agents.stop("n0")
    member = agents.start("n0")
    enough = threading.Event()
    message = cache_pb2.ReadRequest(id=5)

    def asking() -> Iterator[cache_pb2.ReadRequest]:
        yield message
        enough.wait(LIMIT_S)

    with wire.open_channel(member.address, agents.token) as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        streams = [stub.Read(asking(), timeout=LIMIT_S) for _ in range(2)]
        assert [next(stream).id for stream in streams] == [5, 5]
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            list(stub.Read(iter([message]), timeout=LIMIT_S))
        transport = PlainTransport(agents.token, SystemClock())
        request = frames.ExtentsRequest(0, [], np.empty(0, frames.EXTENT))
        # Our own clients have places of their own, whatever clients of gRPC hold.
        assert transport.start(member, request, 10, Places.alone(request)).result().status.tolist() == []
        assert stub.Stat(cache_pb2.StatRequest(), timeout=LIMIT_S).shards[0].id == sealed.id
        enough.set()
        assert [list(stream) for stream in streams] == [[], []]
        assert transport.start(member, request, 10, Places.alone(request)).result().status.tolist() == []
        transport.close()


def test_several_requests_on_one_stream_are_answered_in_order(
    stub: cache_pb2_grpc.CacheStub, sealed: SealedShard
) -> None:
    extents = np.array([(0, 5, 0, 10)], frames.EXTENT).tobytes()
    requests = [cache_pb2.ReadRequest(id=i, shards=[sealed.id], extents=extents) for i in range(20)]
    assert [reply.id for reply in stub.Read(iter(requests), timeout=LIMIT_S)] == list(range(20))


def test_a_large_answer_comes_in_several_messages(stub: cache_pb2_grpc.CacheStub, sealed: SealedShard) -> None:
    items = ask(stub, [sealed.id], [(0, 5, 0, len(PAYLOADS[5]))] * 600)  # 60 MB
    assert len(items) == 600
    assert all(item == (0, PAYLOADS[5]) for item in items)


@pytest.mark.parametrize(
    "extent",
    [
        (0, 6, 0, 1),
        (0, MOST, 0, 1),
        (0, 5, len(PAYLOADS[5]), 1),
        (0, 5, 0, len(PAYLOADS[5]) + 1),
        (0, 5, MOST, MOST),
        (0, 5, 0, MOST),
        (0, 5, 0, SPAN + 1),
        (1, 0, 0, 1),
        (MOST, 0, 0, 0),
    ],
)
def test_a_hostile_extent_is_refused_alone(
    stub: cache_pb2_grpc.CacheStub, sealed: SealedShard, extent: tuple[int, int, int, int]
) -> None:
    items = ask(stub, [sealed.id], [(0, 1, 0, 1), extent, (0, 1, 0, 1)])
    assert items == [(0, PAYLOADS[1]), (cache_pb2.READ_STATUS_BAD_EXTENT, b""), (0, PAYLOADS[1])]


@pytest.mark.parametrize("name", ["", "0" * 40, "../../../etc/passwd", "/etc/passwd", "x\0y", "é" * 40])
def test_an_unknown_or_tricky_shard_is_refused_alone(
    stub: cache_pb2_grpc.CacheStub, sealed: SealedShard, name: str
) -> None:
    items = ask(stub, [name, sealed.id], [(0, 0, 0, 1), (1, 1, 0, 1)])
    assert items == [(cache_pb2.READ_STATUS_NO_SHARD, b""), (0, PAYLOADS[1])]


@pytest.mark.parametrize("message", [b"\xff\xff\xff", cache_pb2.ReadRequest(extents=b"123").SerializeToString()])
def test_a_malformed_request_ends_the_call_and_not_the_agent(
    agents: Agents, member: Member, sealed: SealedShard, message: bytes
) -> None:
    with wire.open_channel(member.address, agents.token) as channel:
        read: Any = channel.stream_stream("/deeplink.v1.Cache/Read")
        with pytest.raises(grpc.RpcError) as refused:
            list(read(iter([message]), timeout=LIMIT_S))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ask(cache_pb2_grpc.CacheStub(channel), [sealed.id], [(0, 1, 0, 1)]) == [(0, PAYLOADS[1])]


def test_a_shard_cut_short_while_served_is_refused_set_aside_and_the_agent_lives(
    agents: Agents, stub: cache_pb2_grpc.CacheStub, sealed: SealedShard
) -> None:
    assert ask(stub, [sealed.id], [(0, 5, 0, 10)])[0][0] == 0
    os.truncate(agents.stores[NodeName("n0")].path(sealed.id), 8192)
    assert ask(stub, [sealed.id], [(0, 5, 0, 10)]) == [(cache_pb2.READ_STATUS_DAMAGED, b"")]
    assert ask(stub, [sealed.id], [(0, 5, 0, 10)]) == [(cache_pb2.READ_STATUS_NO_SHARD, b"")]


def test_a_shard_that_cannot_be_read_for_a_moment_stays_and_is_served_then(
    agents: Agents, stub: cache_pb2_grpc.CacheStub, sealed: SealedShard
) -> None:
    store = agents.stores[NodeName("n0")]
    path, extents = str(store.path(sealed.id)), [(0, 0, 0, len(PAYLOADS[0]))]
    with refusing(lambda event, opened: event == "open" and opened == path, code=errno.EIO):
        assert [status for status, _ in ask(stub, [sealed.id], extents)] != [0]
    assert store.has(sealed.id)
    assert not store.is_verified(sealed.id)
    assert ask(stub, [sealed.id], extents) == [(0, PAYLOADS[0])]


def test_a_shard_that_is_no_shard_is_refused(agents: Agents, stub: cache_pb2_grpc.CacheStub) -> None:
    name = ShardId("ab" * 20)
    agents.stores[NodeName("n0")].path(name).write_bytes(os.urandom(10_000))
    assert ask(stub, [name], [(0, 0, 0, 1)]) == [(cache_pb2.READ_STATUS_DAMAGED, b"")]


def test_an_unverified_shard_is_served_by_system_calls(
    agents: Agents, stub: cache_pb2_grpc.CacheStub, sealed: SealedShard
) -> None:
    store = agents.stores[NodeName("n0")]
    (store.root / f"{sealed.id}.verified").unlink()
    extents = [(0, number, 0, len(payload)) for number, payload in enumerate(PAYLOADS)]
    assert ask(stub, [sealed.id], extents) == [(0, payload) for payload in PAYLOADS]
    assert not stub.Stat(cache_pb2.StatRequest()).shards[0].verified


def test_many_clients_at_once_get_their_own_answers(agents: Agents, member: Member, sealed: SealedShard) -> None:
    def client(number: int) -> bool:
        with wire.open_channel(member.address, agents.token) as channel:
            stub = cache_pb2_grpc.CacheStub(channel)
            return all(
                ask(stub, [sealed.id], [(0, 5, at, 50)]) == [(0, PAYLOADS[5][at : at + 50])]
                for at in range(number, number + 10)
            )

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(client, range(12)))


def test_stat_says_what_is_held(agents: Agents, stub: cache_pb2_grpc.CacheStub, sealed: SealedShard) -> None:
    reply = stub.Stat(cache_pb2.StatRequest(), timeout=LIMIT_S)
    assert reply.node == "n0"
    assert [(shard.id, shard.bytes, shard.verified) for shard in reply.shards] == [(sealed.id, sealed.bytes, True)]
    assert reply.free_bytes > 0


def test_a_shard_moves_from_member_to_member(agents: Agents, sealed: SealedShard, tmp_path: Path) -> None:
    one, two, _ = agents.members
    with MemberClient(one, agents.token) as source, MemberClient(two, agents.token) as target:
        (tmp_path / "copy").write_bytes(b"".join(source.get(sealed.id, sealed.bytes)))
        assert target.put(sealed.id, tmp_path / "copy")
        assert not target.put(sealed.id, tmp_path / "copy")
        assert target.held() == source.held() == {sealed.id: sealed.bytes}
    assert agents.stores[NodeName("n1")].is_verified(sealed.id)


def test_what_is_not_the_shard_is_not_taken(agents: Agents, tmp_path: Path, sealed: SealedShard) -> None:
    (tmp_path / "wrong").write_bytes(os.urandom(50_000))
    with MemberClient(agents.members[1], agents.token) as target:
        for name in (sealed.id, "../../tmp/evil", ""):
            with pytest.raises(MemberError):
                target.put(ShardId(name), tmp_path / "wrong")
    store = agents.stores[NodeName("n1")]
    assert not list(store.root.iterdir())


def test_an_announced_size_beyond_the_disk_is_refused(stub: cache_pb2_grpc.CacheStub) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Put(iter([cache_pb2.PutRequest(id="ab" * 20, total_bytes=2**63)]), timeout=LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_put_of_nothing_is_refused(stub: cache_pb2_grpc.CacheStub) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Put(iter([]), timeout=LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["ab" * 20, "../n0/x", ""])
def test_a_shard_that_is_not_held_cannot_be_got(agents: Agents, member: Member, name: str) -> None:
    with MemberClient(member, agents.token) as client, pytest.raises(MemberError):
        list(client.get(ShardId(name), 100))


@pytest.mark.parametrize("token", ["", "wrong"])
def test_every_call_without_the_token_is_refused(
    agents: Agents, member: Member, token: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with MemberClient(member, token) as client:
        with pytest.raises(MemberError, match="refuses our token"):
            client.held()
        with pytest.raises(MemberError, match="refuses our token"):
            client.put(ShardId("ab" * 20), tmp_path / "file")
        with pytest.raises(MemberError, match="refuses our token"):
            list(client.get(ShardId("ab" * 20), 1))
    with wire.open_channel(member.address, token) as channel, pytest.raises(grpc.RpcError) as refused:
        ask(cache_pb2_grpc.CacheStub(channel), ["ab" * 20], [(0, 0, 0, 1)])
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_member_that_is_not_there_is_silent(agents: Agents) -> None:
    agents.stop("n2")
    gone = next(member for member in agents.members if member.name == "n2")
    with MemberClient(gone, agents.token) as client, pytest.raises(MemberSilentError):
        client.held()


def test_health_knows_the_service_by_name(agents: Agents, member: Member) -> None:
    with wire.open_channel(member.address, agents.token) as channel:
        request = health_pb2.HealthCheckRequest(service="deeplink.v1.Cache")
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
