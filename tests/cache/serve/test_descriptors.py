"""A lack of descriptors: a member that has none left is busy, none of its shards is damaged."""

from __future__ import annotations

import errno
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deeplink.cache.errors import MemberBusyError
from deeplink.cache.read.mapped import ShardFile
from deeplink.cache.serve import served
from deeplink.cache.serve.server import own_limits
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import Places, PlainTransport
from deeplink.core.clock import SystemClock
from deeplink.core.types import NodeName
from deeplink.rpc.plain import CallRefusedError
from tests.cache.pack.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cache.agents import Agents

N0 = NodeName("n0")


def test_a_member_without_descriptors_is_busy_and_its_shard_stays(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = write(tmp_path / "draft", PAYLOADS)
    agents.stores[N0].adopt(tmp_path / "draft", sealed.id)
    extents = np.array([(0, n, 0, len(payload)) for n, payload in enumerate(PAYLOADS)], frames.EXTENT)
    request = frames.ExtentsRequest(0, [sealed.id], extents)
    member = agents.members[0]
    transport = PlainTransport(agents.token, SystemClock())

    def asked() -> list[int]:
        found: list[int] = transport.start(member, request, 20.0, Places.alone(request)).result().status.tolist()
        return found

    def none_left(*_: Any, **__: Any) -> ShardFile:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(served, "ShardFile", none_left)
        with pytest.raises(MemberBusyError):
            asked()
    assert asked() == [0] * len(PAYLOADS)
    assert agents.stores[N0].has(sealed.id)
    transport.close()


def test_who_has_no_descriptors_left_closes_shards_that_were_not_read_for_long(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, shards = agents.stores[N0], []
    for number in range(4):
        sealed = write(tmp_path / "draft", [*PAYLOADS, b"%d" % number])
        store.adopt(tmp_path / "draft", sealed.id)
        shards.append(sealed.id)
    opened = served.ServedShards(store, SystemClock())
    opened.locate(shards[:3])
    may_open, left = ShardFile, 0

    def one_when_some_were_closed(*args: Any, **options: Any) -> ShardFile:
        if len(opened._open) > left:
            raise OSError(errno.EMFILE, "Too many open files")
        return may_open(*args, **options)

    monkeypatch.setattr(served, "ShardFile", one_when_some_were_closed)
    left = 1
    with pytest.raises(CallRefusedError, match="cannot be opened now"):
        opened.get(shards[3])
    assert opened.get(shards[3])[1] == 0
    assert opened.get(shards[2])[0] is not None  # the last that was read stayed


def test_connections_take_a_quarter_of_the_descriptors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, connections in ((1024, 256), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert own_limits().connections == connections
