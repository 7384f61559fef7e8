"""A copy counts only if it may be the shard."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from deeplink.cache import membership
from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.source.home import open_home
from deeplink.cache.store.store import Store
from deeplink.core.types import Member, NodeName
from tests.cache.pack.test_verifying import flip

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.core.config import Config
    from tests.cache.agents import Agents


def test_a_shard_that_was_cut_off_here_is_packed_again(source: Path, config: Config) -> None:
    shard = min(pack(str(source), "digits", config=config).placed)
    store = Store(config.store)
    good = store.path(shard).read_bytes()
    os.truncate(store.path(shard), len(good) - 4096)
    again = pack(str(source), "digits", config=config)
    assert (again.short, again.unchanged) == (0, True)
    assert again.read_files > 0
    assert store.path(shard).read_bytes() == good


def test_a_shard_that_was_cut_off_at_a_member_is_brought_there_again(source: Path, agents: Agents) -> None:
    config = agents.config()
    result = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    shard, (first, second) = next(iter(result.placed.items()))
    path = agents.stores[first].path(shard)
    os.truncate(path, 9000)
    again = pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    assert (again.short, again.read_files) == (0, 0)
    assert path.read_bytes() == agents.stores[second].path(shard).read_bytes()


def test_a_damaged_shard_is_not_copied_and_gives_way(source: Path, config: Config, tmp_path: Path) -> None:
    shard = min(pack(str(source), "digits", config=config).placed)
    path = Store(config.store).path(shard)
    good = path.read_bytes()
    index = Catalog(config.catalog).open("digits")
    number = [entry.id for entry in index.shards].index(shard)
    flip(path, int(index.block_offsets(number)[0]) + 7)
    home = tmp_path / "home"
    home.mkdir()
    # The home lacks all shards, so each is read before it is copied there.
    again = pack(str(source), "digits", config=config, home=str(home))
    assert again.short == 0
    assert again.read_files == index.shards[number].samples
    assert path.read_bytes() == good
    assert b"".join(open_home(str(home)).fetch(shard, len(good))) == good


def test_an_owner_that_is_gone_is_replaced_by_one_that_fails_apart_from_the_other(
    source: Path, agents: Agents
) -> None:
    agents.start("n3")
    members = tuple(
        dataclasses.replace(member, domain=domain) for member, domain in zip(agents.members, "aaab", strict=True)
    )
    agents.stop("n3")
    agents.members = (*members[:3], Member(NodeName("n4"), agents.start("n4").address, domain="b"), members[3])
    known = membership.standing(agents.members)
    result = pack(str(source), "digits", config=agents.config(), members=agents.members, token=agents.token)
    assert result.short == 0
    owned = {shard: membership.ranked(shard, known.weight, known)[:2] for shard in result.placed}
    assert any("n3" in names for names in owned.values())
    for holders in result.placed.values():
        assert "n4" in holders  # of its domain nobody else is left
        assert len(holders) == 2
