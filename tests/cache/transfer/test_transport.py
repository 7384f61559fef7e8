"""Batches from members: what one of them does is not held against another."""

from __future__ import annotations

import gc
import socket
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeplink.cache.errors import MemberError, MemberSilentError
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import Places, PlainTransport
from deeplink.core.clock import SystemClock
from deeplink.core.types import Member, NodeName, ShardId
from deeplink.rpc.plain import framing
from deeplink.v1 import cache_pb2
from tests.cache.pack.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cache.agents import Agents


@pytest.fixture
def transport(agents: Agents) -> Iterator[PlainTransport]:
    made = PlainTransport(agents.token, SystemClock())
    yield made
    made.close()


@pytest.fixture
def request_of_all(tmp_path: Path, agents: Agents) -> frames.ExtentsRequest:
    """Ask for every block of a shard that n0 holds."""
    sealed = write(tmp_path / "draft", PAYLOADS)
    agents.stores[NodeName("n0")].adopt(tmp_path / "draft", sealed.id)
    extents = np.array([(0, n, 0, len(payload)) for n, payload in enumerate(PAYLOADS)], frames.EXTENT)
    return frames.ExtentsRequest(0, [sealed.id], extents)


@pytest.mark.parametrize("idle", [False, True], ids=["fresh connection", "idle connection"])
def test_waiting_in_vain_for_one_member_is_not_held_against_another(
    agents: Agents, transport: PlainTransport, request_of_all: frames.ExtentsRequest, idle: bool
) -> None:
    good = agents.members[0]
    if idle:
        transport.start(good, request_of_all, 10.0, Places.alone(request_of_all)).result()
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = Member(NodeName("silent"), f"127.0.0.1:{server.getsockname()[1]}")
        places = Places.alone(request_of_all)
        answered = transport.start(good, request_of_all, 0.3, places)
        unanswered = transport.start(silent, request_of_all, 0.3, Places.alone(request_of_all))
        with pytest.raises(MemberSilentError):
            unanswered.result()
        assert answered.result().status.tolist() == [0] * len(PAYLOADS)
    assert bytes(places.arena) == b"".join(PAYLOADS)


def test_more_than_was_asked_for_is_an_error(
    agents: Agents,
    transport: PlainTransport,
    request_of_all: frames.ExtentsRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = frames.encode_request
    monkeypatch.setattr(frames, "encode_request", lambda asked: encode(replace(request_of_all, id=asked.id)))
    fewer = frames.ExtentsRequest(0, request_of_all.shards, request_of_all.extents[:1])
    with pytest.raises(MemberError, match="more items"):
        transport.start(agents.members[0], fewer, 5.0, Places.alone(fewer)).result()


def test_a_member_that_only_greets_has_not_begun_to_answer(
    agents: Agents, transport: PlainTransport, request_of_all: frames.ExtentsRequest
) -> None:
    """Else it would be waited for instead of asking another copy, and each such member in turn."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = Member(NodeName("greeting"), f"127.0.0.1:{server.getsockname()[1]}")
        places = [Places.alone(request_of_all), Places.alone(request_of_all)]
        pending = transport.start(greeting, request_of_all, 20.0, places[0])
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(framing.HEAD.pack(framing.FrameKind.CHALLENGE, 0, 0, 70, 0))  # and no more
            good = transport.start(agents.members[0], request_of_all, 20.0, places[1])
            assert transport.answering([pending], 0.05) == []
            assert transport.answering([pending, good], 20.0) == [1]
            assert transport.answering([pending, good], 20.0) == [1]  # although its first bytes are read
            assert good.result().status.tolist() == [0] * len(PAYLOADS)
            pending.cancel()
    assert bytes(places[1].arena) == b"".join(PAYLOADS)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:1"])
def test_a_member_that_is_not_there_keeps_no_batch_s_memory(transport: PlainTransport, address: str) -> None:
    arena = np.zeros(10, np.uint8)
    places = Places(arena.data, np.zeros(1, np.int64))
    extents = np.array([(0, 0, 0, 10)], frames.EXTENT)
    request = frames.ExtentsRequest(0, [ShardId("0" * 40)], extents)
    gc.disable()
    try:
        pending = transport.start(Member(NodeName("gone"), address), request, 2.0, places)
        with suppress(MemberSilentError):
            pending.result()
            pytest.fail("it answered")
        memory = weakref.ref(arena)
        del places, pending, arena
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_named_so", [True, False])
def test_a_whole_shard_is_asked_of_the_member_that_was_meant(
    agents: Agents, request_of_all: frames.ExtentsRequest, is_named_so: bool
) -> None:
    """Else an agent could hand on who asks it, and get a shard as that user."""
    there = agents.members[0]
    meant = there if is_named_so else replace(there, name=NodeName("n7"))
    request = cache_pb2.GetRequest(id=request_of_all.shards[0]).SerializeToString()
    answers = frames.call_member(meant, agents.token, SystemClock(), "Get", request, deadline_s=10.0)
    if is_named_so:
        assert list(answers)
    else:
        with pytest.raises(MemberError, match="not of n7"):
            list(answers)
