"""Datasets warmed and evicted for an operator: by real agents, through the commands that know the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.core.types import format_members
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.journal.operations import OperationRecord
from deeplink.scheduler.watch.operator_requests import OperatorRequest
from tests.cache.agents import config_below, small_files, write_tree
from tests.cache.keepers import Keepers
from tests.scheduler.watch.operator_desk import Desk
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow


@pytest.fixture
def agents(keepers: Keepers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keepers:
    config = config_below(tmp_path, shard_bytes=100_000)
    for key in ("catalog", "store", "node"):
        monkeypatch.setenv(f"DEEPLINK_{key.upper()}", str(getattr(config, key)))
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "state"))
    write_tree(tmp_path / "source", small_files())
    pack(str(tmp_path / "source"), "digits", config=config)
    keepers.pace = replace(keepers.pace, share_s=3600.0)  # or they would bring their share by themselves
    for name in ("n0", "n1"):
        keepers.start(name)
    token = tmp_path / "token"
    token.write_text(keepers.token)
    token.chmod(0o600)
    monkeypatch.setenv("DEEPLINK_MEMBERS", format_members(keepers.members))
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", str(token))
    return keepers


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Journal(tmp_path / "watch.sqlite") as opened:
        yield Desk(opened)


def moved(desk: Desk, name: str) -> OperationRecord:
    assert not desk.actor.work(), "the loop is not kept busy meanwhile"
    mover = desk.actor._mover
    assert mover is not None
    mover.join(6 * LIMIT_S)
    return desk.record(name)


def test_a_dataset_is_brought_onto_nodes_and_given_up_again(agents: Keepers, desk: Desk, tmp_path: Path) -> None:
    count = len(Catalog(tmp_path / "catalog").open("digits").shards)
    stores = [agents.running[node].store for node in ("n0", "n1")]
    request = OperatorRequest.of("warm", "digits", nodes="n[0-1]", why="tonight's run")
    plan = desk.actor.planner.plan(request, "ada")
    assert f"{2 * count} shards to bring onto n[0-1]" in plan.remarks[0]
    assert not any(store.ids() for store in stores), "asking moves nothing"
    done = moved(desk, desk.submit(plan))
    assert done.outcome == "done", done
    assert [len(store.ids()) for store in stores] == [count, count]
    plan = desk.plan("evict", "digits", why="room")
    assert [f"{count} shards would go" in remark for remark in plan.remarks] == [True, True]
    stale = desk.submit(
        desk.plan("evict", "digits", why="room"), saw=plan.saw.replace('"shards": "', '"shards": "x')
    )
    assert moved(desk, stale).outcome == "refused"
    assert moved(desk, desk.submit(plan)).outcome == "done"
    assert not any(store.ids() for store in stores)


def test_where_one_member_is_down_the_others_give_a_dataset_up(
    agents: Keepers, desk: Desk, tmp_path: Path
) -> None:
    count = len(Catalog(tmp_path / "catalog").open("digits").shards)
    store = agents.running["n0"].store
    request = OperatorRequest.of("warm", "digits", nodes="n[0-1]", why="tonight's run")
    assert moved(desk, desk.submit(desk.actor.planner.plan(request, "ada"))).outcome == "done"
    agents.stop("n1")
    plan = desk.plan("evict", "digits", why="room")
    assert not plan.refused, plan
    assert any(f"n0: {count} shards would go" in remark for remark in plan.remarks)
    assert any("n1" in remark for remark in plan.remarks), "who does not answer is said"
    done = moved(desk, desk.submit(plan))
    assert not store.ids()
    assert (done.outcome, "n0: dropped" in done.result, "n1" in done.result) == ("failed", True, True)
    agents.stop("n0")
    plan = desk.plan("evict", "digits", why="room")
    assert "n0" in plan.refused
    assert "dataset" not in plan.remedy, "not its name is wrong"


def test_a_dataset_that_there_is_none_of_is_said(agents: Keepers, desk: Desk) -> None:
    plan = desk.plan("evict", "digit")
    assert "digit" in plan.refused
