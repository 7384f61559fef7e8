"""Members that look after their stores: real servers, real shards, real sources."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import grpc
import pytest

from deeplink.cache import membership
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import MemberError
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.fetching import rows_of
from deeplink.cache.replicate.fill import ask_to_evict, fill
from deeplink.cache.replicate.keeper import DAY_S
from deeplink.cache.replicate.warming import warm
from deeplink.cache.store.pins import Pin
from deeplink.core.clock import SystemClock
from deeplink.core.publish import leave_members
from deeplink.core.types import Attempt, NodeName, ShardId, format_members
from deeplink.rpc.channel import open_channel
from deeplink.rpc.tokens import RunTokens, token_of
from deeplink.v1 import cache_pb2, cache_pb2_grpc
from tests.cache.keepers import QUICK, Keepers
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from tests.cache.agents import Agents

OUTCOME = cache_pb2.FillOutcome
EVICTED = cache_pb2.EvictOutcome


@pytest.fixture
def index(source: Path, keepers: Keepers) -> Index:
    """A version that nobody holds: only its source is left."""
    config = keepers.config(store=keepers.root / "packed", shard_bytes=50_000)
    pack(str(source), "digits", config=config)
    index = Catalog(config.catalog).open("digits")
    for path in config.store.glob("*.mdb"):
        path.unlink()
    assert len(index.shards) > 3
    return index


def warmed(keepers: Keepers, index: Index, replicas: int = 2) -> None:
    keepers.introduce()
    result = warm(index, "digits", keepers.members, keepers.token, replicas=replicas, clock=SystemClock())
    assert result.is_whole, result.problems


def test_a_launchers_list_of_members_is_read_from_the_file_it_names_once_it_is_there(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deeplink.cache.replicate.keeper._LIST_AGAIN_S", 0.02)
    for name in ("n0", "n1", "n2"):
        keepers.start(name)
    told = keepers.running["n0"].keeper
    text = format_members(keepers.members)
    missing = keepers.root / "members.0"

    def heard(value: str) -> bool:
        told.use_member_list(value)
        return told._upkeep.everyone == keepers.members

    assert not any(heard(f"@{missing}") for _ in range(3))
    missing.write_text(text)
    until(lambda: heard(f"@{missing}"), LIMIT_S)
    missing.unlink()
    assert heard(f"@{missing}"), "one that is known is not read again"
    until(lambda: not heard(format_members(keepers.members[:1])), LIMIT_S)
    until(lambda: told._upkeep.everyone == keepers.members[:1], LIMIT_S)
    until(lambda: heard(leave_members(keepers.root, text)), LIMIT_S)


def test_warming_makes_shards_anew_from_the_source_and_copies_them(
    keepers: Keepers, index: Index, files: dict[str, bytes]
) -> None:
    for name in ("n0", "n1", "n2"):
        keepers.start(name)
    keepers.introduce()
    seen: list[int] = []
    result = warm(
        index,
        "digits",
        keepers.members,
        keepers.token,
        replicas=2,
        clock=SystemClock(),
        progress=lambda now: seen.append(now.copies),
    )
    assert result.is_whole
    assert (result.residency.percent, result.residency.copies) == (100.0, 2)
    # Each was made once; the second copies came from members (some while nobody asked for them yet).
    assert result.brought["source"] == sum(entry.bytes for entry in index.shards)
    assert sum(result.brought.values()) <= 2 * result.brought["source"]
    assert seen[-1] == 2 * len(index.shards)
    for entry in index.shards:
        holders = {name for name, kept in keepers.running.items() if kept.store.is_verified(entry.id)}
        assert holders == set(membership.ranked(entry.id, list(keepers.running))[:2])  # type: ignore[arg-type]
    config = keepers.config(members=format_members(keepers.members), token_file=token_file(keepers))
    with Reader.open("digits", config=config) as reader:
        views = reader.read(range(len(reader)))
        assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
        assert reader.stats().source_samples == 0
    again = warm(index, "digits", keepers.members, keepers.token, replicas=2, clock=SystemClock())
    assert again.is_whole
    assert not again.brought


def token_file(keepers: Keepers) -> Path:
    path = keepers.root / "keepers-token"
    if not path.exists():
        path.write_text(keepers.token)
        path.chmod(0o600)
    return path


def test_members_in_domains_bring_and_count_what_the_domains_say(keepers: Keepers, index: Index) -> None:
    domains = {"n0": "leaf0", "n1": "leaf0", "n2": "leaf0", "n3": "leaf1"}
    for name in domains:
        keepers.start(name)
    members = tuple(dataclasses.replace(member, domain=domains[member.name]) for member in keepers.members)
    known = membership.standing(members)
    result = warm(index, "digits", members, keepers.token, replicas=2, clock=SystemClock())
    assert result.is_whole, result.problems
    (apart,) = (node for node in result.residency.nodes if node.node == "n3")
    assert apart.owned == apart.owned_verified == len(index.shards)
    for entry in index.shards:
        holders = {name for name, kept in keepers.running.items() if kept.store.is_verified(entry.id)}
        assert holders == set(membership.ranked(entry.id, known.weight, known)[:2])


def test_a_lost_copy_comes_from_the_other_owner_before_others(keepers: Keepers, index: Index) -> None:
    names = [NodeName(name) for name in ("n0", "n1", "n2")]
    # By score the second fails together with the first: the third is the other owner.
    first, second, third = membership.ranked(index.shards[0].id, names)
    for name in names:
        keepers.start(name)
    members = tuple(
        dataclasses.replace(member, domain="b" if member.name == third else "a") for member in keepers.members
    )
    for name in (second, third):
        list(fill(keepers.running[name].member, keepers.token, "digits", index, [0], members=()))
    (reply,) = fill(keepers.running[first].member, keepers.token, "digits", index, [0], members=members)
    assert reply.origin == third


def test_a_changed_source_is_refused_and_said(keepers: Keepers, index: Index, source: Path) -> None:
    kept = keepers.start("n0")
    row = next(row for row in range(len(index)) if index.lengths[row] == 4096)
    (source / index.key(row)).write_bytes(b"x" * 4096)
    number = int(index.shard[row])
    replies = list(fill(kept.member, keepers.token, "digits", index, [number], members=()))
    assert [reply.outcome for reply in replies] == [OUTCOME.FILL_OUTCOME_CHANGED]
    assert repr(index.key(row)) in replies[0].problem
    assert kept.store.ids() == []
    assert not list(kept.store.root.glob(".draft-*.mdb*"))
    others = [n for n in range(len(index.shards)) if n != number]
    replies = list(fill(kept.member, keepers.token, "digits", index, others, members=()))
    assert {reply.outcome for reply in replies} == {OUTCOME.FILL_OUTCOME_FETCHED}


def test_a_shard_is_brought_from_a_member_before_the_source_is_asked(keepers: Keepers, index: Index) -> None:
    first, second = keepers.start("n0"), keepers.start("n1")
    every = range(len(index.shards))
    list(fill(first.member, keepers.token, "digits", index, every, members=()))
    replies = list(fill(second.member, keepers.token, "digits", index, every, members=keepers.members))
    assert {reply.origin for reply in replies} == {"n0"}


def test_what_a_reader_misses_its_owner_brings(keepers: Keepers, index: Index, files: dict[str, bytes]) -> None:
    for name in ("n0", "n1"):
        keepers.start(name)
    keepers.introduce()
    config = keepers.config(members=format_members(keepers.members), token_file=token_file(keepers))
    with Reader.open("digits", config=config) as reader:
        views = reader.read(range(len(reader)))
        assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
        assert reader.stats().source_samples == len(files)

    def all_held() -> bool:
        return all(
            keepers.running[membership.ranked(entry.id, [m.name for m in keepers.members])[0]].store.is_verified(
                entry.id
            )
            for entry in index.shards
        )

    until(all_held)


@pytest.mark.parametrize("everyone", [("n0",), ("n0", "n1", "n2")])
def test_what_a_node_of_a_job_misses_its_own_agent_brings(
    keepers: Keepers, index: Index, files: dict[str, bytes], everyone: tuple[str, ...]
) -> None:
    for name in everyone:
        keepers.start(name)
    keepers.introduce()
    own = keepers.running["n0"].store
    settings = {"members": format_members(keepers.members), "token_file": token_file(keepers)}
    config = keepers.config(node="n0", store=own.root, **settings)
    with Reader.open("digits", config=config) as reader:
        rows = range(len(reader))
        reader.read(rows)
        assert reader.stats().source_samples == len(files)
        first = [
            entry.id
            for entry in index.shards
            if membership.ranked(entry.id, list(map(NodeName, everyone)))[0] == "n0"
        ]
        assert first
        until(lambda: all(map(own.is_verified, first)))

    def nothing_comes_from_the_source() -> bool:
        with Reader.open("digits", config=config) as again:
            views = again.read(rows)
            assert {again.index.key(row): bytes(view) for row, view in enumerate(views)} == files
            return again.stats().source_samples == 0

    until(nothing_comes_from_the_source)


@pytest.mark.parametrize("has_standing", [False, True])
def test_a_jobs_agent_takes_what_the_standing_cache_holds_unless_its_node_has_a_standing_one(
    keepers: Keepers, agents: Agents, source: Path, files: dict[str, bytes], *, has_standing: bool
) -> None:
    everywhere = keepers.config(store=keepers.root / "packed")
    pack(str(source), "digits", config=everywhere, members=agents.members, token=agents.token)
    source.rename(source.with_name("moved"))
    attempt = Attempt(job=7, restart=0, relaunch=0)
    token_file(keepers).write_text(token_of(keepers.token, attempt))
    site = {"members": format_members(agents.members), "token_file": agents.token_file}
    jobs = Keepers(keepers.root / "job", token=keepers.token)
    name = "n0" if has_standing else "job0"
    own = jobs.start(name, token=RunTokens(keepers.token), catalog=everywhere.catalog, **site)
    jobs.introduce()
    config = keepers.config(
        members=format_members(jobs.members),
        token_file=token_file(keepers),
        site_members=site["members"],
        site_token_file=agents.token_file,
        node=own.member.name,
        store=own.store.root,
    )
    with Reader.open("digits", config=config) as reader:

        def epoch() -> int:
            before = reader.stats().local_samples
            views = reader.read(range(len(reader)))
            assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
            return reader.stats().local_samples - before

        empty = next(row for row in range(len(reader)) if not files[reader.index.key(row)])
        assert [bytes(view) for view in reader.batch([empty]).views()] == [b""]
        assert (reader.stats().peer_samples, reader.stats().failures) == (1, 0)
        if has_standing:
            assert [epoch(), epoch()] == [0, 0]
        else:
            until(lambda: epoch() == len(files))
        assert not reader.stats().source_samples
    assert bool(own.store.ids()) is not has_standing
    jobs.stop_all()


def test_a_reader_without_an_agent_fills_its_store_with_what_members_hold(
    keepers: Keepers, agents: Agents, source: Path, files: dict[str, bytes]
) -> None:
    pack(str(source), "digits", config=keepers.config(), members=agents.members, token=agents.token)
    source.rename(source.with_name("moved"))
    config = agents.config(catalog=keepers.config().catalog, fill_on_miss=True, node="login")
    with Reader.open("digits", config=config) as reader:
        assert len(reader.read(range(len(reader)))) == len(files)
        assert (reader.stats().peer_samples, reader.stats().source_samples) == (len(files), 0)
        until(lambda: len(list(config.store.glob("*.mdb"))) == len(reader.index.shards))
        until(lambda: reader.read([0]) and reader.stats().local_samples)
        assert reader.stats().source_samples == 0


@pytest.mark.parametrize("members", ["n0=127.0.0.1:1", "n0:7411"])
def test_a_standing_cache_that_cannot_be_asked_ends_no_training(
    keepers: Keepers, index: Index, files: dict[str, bytes], caplog: pytest.LogCaptureFixture, members: str
) -> None:
    config = keepers.config(site_members=members, site_token_file=keepers.root / "nowhere")
    with Reader.open("digits", config=config) as reader:
        assert len(reader.read(range(len(reader)))) == len(files)
    assert "the standing cache is not asked" in caplog.text


def test_what_was_put_into_quarantine_comes_back(keepers: Keepers, index: Index) -> None:
    for name in ("n0", "n1"):
        keepers.start(name)
    warmed(keepers, index)
    kept = keepers.running["n0"]
    shard = index.shards[0].id
    path = kept.store.path(shard)
    with path.open("r+b") as file:
        file.seek(int(index.block_offsets(0)[0]) + 10)
        file.write(b"damaged bytes")
    assert kept.store.doubt(shard)
    until(lambda: any((kept.store.root / "quarantine").glob(f"{shard}*")) and kept.store.is_verified(shard))
    until(lambda: kept.store.lost() == [])


def test_a_member_that_joins_takes_its_share_from_the_others(keepers: Keepers, index: Index) -> None:
    for name in ("n0", "n1"):
        keepers.start(name)
    warmed(keepers, index, replicas=1)
    joining = keepers.start("n2", replicas=1)
    keepers.introduce()
    names = [member.name for member in keepers.members]
    mine = {entry.id for entry in index.shards if membership.ranked(entry.id, names)[0] == "n2"}
    assert mine
    until(lambda: set(joining.store.ids()) == mine and all(joining.store.is_verified(shard) for shard in mine))


def test_a_full_store_drops_what_others_hold_and_then_refuses(keepers: Keepers, index: Index) -> None:
    largest = max(entry.bytes for entry in index.shards)
    keepers.start("n0")
    small = keepers.start("n1", store_bytes=2 * largest)
    every = list(range(len(index.shards)))
    keepers.introduce()
    list(fill(keepers.running["n0"].member, keepers.token, "digits", index, every, members=keepers.members))
    replies = list(fill(small.member, keepers.token, "digits", index, every, members=keepers.members))
    # The source has every file still, so whatever is here may leave. Some it may have taken on its own account.
    here = {OUTCOME.FILL_OUTCOME_FETCHED, OUTCOME.FILL_OUTCOME_HELD}
    assert {reply.outcome for reply in replies} <= here
    assert small.store.status().bytes <= 2 * largest
    for shard in small.store.ids():
        small.store.remove(shard)
    pin = Pin(small.store.root, index, SystemClock())
    replies = list(fill(small.member, keepers.token, "digits", index, every, members=keepers.members))
    outcomes = {reply.outcome for reply in replies}
    assert OUTCOME.FILL_OUTCOME_NO_ROOM in outcomes <= {*here, OUTCOME.FILL_OUTCOME_NO_ROOM}
    held = set(small.store.ids())
    pin.release()
    assert held
    assert small.store.status().bytes <= 2 * largest
    assert keepers.running["n0"].store.status().shards == len(index.shards)


def test_the_last_copy_stays_and_force_drops_it(keepers: Keepers, index: Index, source: Path) -> None:
    for name in ("n0", "n1"):
        keepers.start(name)
    warmed(keepers, index)
    source.rename(source.with_name("moved"))
    shards = [entry.id for entry in index.shards]
    dry = ask_to_evict(keepers.members[0], keepers.token, shards, force=False, dry_run=True)
    assert all(kept.store.status().shards == len(shards) for kept in keepers.running.values())
    for member in keepers.members:
        ask_to_evict(member, keepers.token, shards, force=False, dry_run=False)
    left = [set(kept.store.ids()) for kept in keepers.running.values()]
    # Each relied only on who comes before it: one copy of each is left, whoever was asked first.
    assert left[0] | left[1] == set(shards)
    assert not left[0] & left[1]
    assert {one.id for one in dry if one.outcome == EVICTED.EVICT_OUTCOME_ONLY} == left[0]
    for member in keepers.members:
        again = ask_to_evict(member, keepers.token, shards, force=False, dry_run=False)
        assert EVICTED.EVICT_OUTCOME_GONE not in {one.outcome for one in again}
        ask_to_evict(member, keepers.token, shards, force=True, dry_run=False)
    assert all(kept.store.ids() == [] for kept in keepers.running.values())


def test_what_a_job_has_pinned_stays(keepers: Keepers, index: Index) -> None:
    kept = keepers.start("n0")
    list(fill(kept.member, keepers.token, "digits", index, range(len(index.shards)), members=()))
    pin = Pin(kept.store.root, index, SystemClock())
    shards = [entry.id for entry in index.shards]
    pin.announce(shards, 2)
    told = ask_to_evict(kept.member, keepers.token, shards, force=False, dry_run=False)
    assert [one.outcome for one in told[:2]] == [EVICTED.EVICT_OUTCOME_NEEDED] * 2
    assert {one.outcome for one in told[2:]} == {EVICTED.EVICT_OUTCOME_GONE}
    pin.release()
    told = ask_to_evict(kept.member, keepers.token, shards[:2], force=False, dry_run=False)
    assert [one.outcome for one in told] == [EVICTED.EVICT_OUTCOME_GONE] * 2


def test_shards_that_nobody_read_for_long_are_dropped_where_they_can_be_had_again(
    keepers: Keepers, index: Index, source: Path
) -> None:
    kept = keepers.start("n0")
    list(fill(kept.member, keepers.token, "digits", index, range(len(index.shards)), members=()))
    keepers.stop("n0")
    old, lost, *others = [entry.id for entry in index.shards]
    long_ago = SystemClock().unix() - 2 * DAY_S
    for shard in (old, lost):
        os.utime(kept.store.path(shard), (long_ago, long_ago))
    (source / index.key(int(rows_of(index, 1)[0]))).unlink()
    keepers.pace = dataclasses.replace(QUICK, unused_after_s=DAY_S)
    again = keepers.start("n0")
    until(lambda: not again.store.has(old))
    assert set(again.store.ids()) == {lost, *others}


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (cache_pb2.FillRequest(name="nothing"), "no dataset"),
        (cache_pb2.FillRequest(name="../digits"), "cannot be a dataset's name"),
        (cache_pb2.FillRequest(name="digits", version="../../x"), "no version"),
        (cache_pb2.FillRequest(name="digits", shards=[1_000_000]), "1000000"),
        (cache_pb2.FillRequest(name="digits", members="nonsense"), "is not NAME=HOST:PORT"),
    ],
)
def test_a_request_for_what_is_not_there_is_refused(
    keepers: Keepers, index: Index, request_: cache_pb2.FillRequest, says: str
) -> None:
    kept = keepers.start("n0")
    with open_channel(kept.member.address, keepers.token) as channel, pytest.raises(grpc.RpcError) as refused:
        list(cache_pb2_grpc.CacheStub(channel).Fill(request_, timeout=LIMIT_S))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in (refused.value.details() or "")
    with pytest.raises(MemberError, match="not a shard's name"):
        ask_to_evict(kept.member, keepers.token, [ShardId("../../etc/passwd")], force=True, dry_run=False)
