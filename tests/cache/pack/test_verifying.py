from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.pack.verifying import ReadBack, verified, verify_copies
from deeplink.cache.packer import PackResult, pack
from deeplink.cache.store.store import Store
from deeplink.core.types import NodeName
from deeplink.v1 import cache_pb2
from tests.cache.agents import Agents

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.core.config import Config


def read_back(config: Config, result: PackResult, agents: Agents | None = None) -> ReadBack:
    return verify_copies(
        Catalog(config.catalog).open("digits"),
        result.placed,
        store=Store(config.store),
        node=NodeName("head"),
        members=agents.members if agents else (),
        token=agents.token if agents else "",
    )


def flip(path: Path, at: int) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_what_was_packed_here_is_read_back(source: Path, config: Config) -> None:
    result = pack(str(source), "digits", config=config)
    found = read_back(config, result)
    assert (found.copies, found.problems) == (result.shards, ())
    assert found.bytes == sum(path.stat().st_size for path in config.store.glob("*.mdb"))


def test_every_copy_is_read_where_it_lies_and_what_is_wrong_is_said(source: Path, agents: Agents) -> None:
    config = agents.config()
    result = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    assert read_back(config, result, agents).copies == 2 * result.shards
    flipped, cut, gone, *_ = result.placed
    index = Catalog(config.catalog).open("digits")
    number = [entry.id for entry in index.shards].index(flipped)
    flip(agents.stores[result.placed[flipped][0]].path(flipped), int(index.block_offsets(number)[0]) + 7)
    os.truncate(agents.stores[result.placed[cut][1]].path(cut), 9000)
    agents.stores[result.placed[gone][0]].remove(gone)
    found = read_back(config, result, agents)
    assert found.copies == 2 * result.shards - 3
    assert sorted(problem.split(":")[1].split()[1] for problem in found.problems) == sorted([flipped, cut, gone])
    assert not agents.stores[result.placed[flipped][0]].has(flipped)


def test_a_good_copy_that_came_while_a_damaged_one_was_read_back_stays(
    source: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = next(iter(pack(str(source), "digits", config=config).placed))
    store = Store(config.store)
    good, path = store.path(shard).read_bytes(), store.path(shard)
    os.truncate(path, 9000)

    def replaced_meanwhile(*_: object, **_also: object) -> NoReturn:
        (config.store / "good").write_bytes(good)
        (config.store / "good").replace(path)
        raise ShardCorruptError(shard, "the file ends too soon")

    monkeypatch.setattr("deeplink.cache.store.described.describe", replaced_meanwhile)
    (said,) = verified(store, shard)
    assert said.status == cache_pb2.VERIFY_STATUS_DAMAGED
    assert path.read_bytes() == good


def test_a_copy_that_cannot_be_read_is_said_and_stays(source: Path, config: Config) -> None:
    shard = next(iter(pack(str(source), "digits", config=config).placed))
    store = Store(config.store)

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        (said,) = verified(store, shard)
    assert said.status == cache_pb2.VERIFY_STATUS_UNREADABLE
    assert "Input/output error" in said.problem
    (said,) = verified(store, shard)
    assert said.status == cache_pb2.VERIFY_STATUS_OK


def test_a_member_that_is_gone_is_said(source: Path, agents: Agents) -> None:
    config = agents.config()
    result = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    agents.stop("n1")
    found = read_back(config, result, agents)
    assert found.problems
    assert all("n1" in problem for problem in found.problems)
