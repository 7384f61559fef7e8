"""`deeplink prefetch` on real members: their own bytes come to the nodes that will need them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deeplink.cache import membership
from deeplink.cache.catalog import Catalog
from deeplink.cache.format.index import Index
from deeplink.cache.packer import pack
from deeplink.cli import cli
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName, format_members
from deeplink.scheduler.placement.hint import decision as record
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why
from tests.cache.agents import config_below, small_files, write_tree
from tests.cache.keepers import Keepers

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    config = config_below(tmp_path, shard_bytes=100_000)
    for key in ("catalog", "store", "node"):
        monkeypatch.setenv(f"DEEPLINK_{key.upper()}", str(getattr(config, key)))
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm: the record tells the nodes
    write_tree(tmp_path / "source", small_files())
    pack(str(tmp_path / "source"), "digits", config=config)
    return config


@pytest.fixture
def index(config: Config) -> Index:
    return Catalog(config.catalog).open("digits")


@pytest.fixture
def agents(keepers: Keepers, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> Keepers:
    keepers.pace = replace(keepers.pace, share_s=3600.0)  # or they would bring their share by themselves
    for name in ("n0", "n1", "n2"):
        keepers.start(name)
    token = tmp_path / "token"
    token.write_text(keepers.token)
    token.chmod(0o600)
    monkeypatch.setenv("DEEPLINK_MEMBERS", format_members(keepers.members))
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", str(token))
    return keepers


def said(*words: str, code: int = 0) -> list[dict[str, Any]]:
    done = CliRunner().invoke(cli, ["prefetch", *words, "--json"])
    assert done.exit_code == code, done.output
    return [dict(json.loads(line)) for line in done.stdout.splitlines()]


def hinted(config: Config, tmp_path: Path, *nodes: str) -> None:
    decision = Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=tuple(map(NodeName, nodes)))
    line = Recorded(unix=1.0, by="plan", ask=Ask(nodes=len(nodes), data=("digits",)), decision=decision)
    record.append(record.job_folder(tmp_path / "state", 7), line)


def test_the_hinted_nodes_bring_what_they_will_own_and_only_what_they_lack(
    agents: Keepers, index: Index, config: Config, tmp_path: Path
) -> None:
    hinted(config, tmp_path, "n0", "n1")
    (dry,) = said("7", "--replicas", "1", "--dry-run")
    assert dry["copies"] == sum(dry["to_bring"].values()) == len(index.shards)
    (done,) = said("7", "--replicas", "1")
    assert done["came"] == len(index.shards)
    assert 0 < sum(done["brought"].values()) <= done["bytes"]
    for entry in index.shards:
        (owner,) = membership.ranked(entry.id, [NodeName("n0"), NodeName("n1")])[:1]
        store = agents.running[owner].store
        assert store.is_verified(entry.id)
    (again,) = said("7", "digits", "--replicas", "1")
    assert (again["bytes"], again["brought"]) == (0, {})


def test_the_copies_lie_on_leaves_apart_as_the_jobs_own_list_will_have_it(
    agents: Keepers, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = tmp_path / "topology.conf"
    fabric.write_text("SwitchName=a Nodes=n[0-1]\nSwitchName=b Nodes=n2\nSwitchName=core Switches=a,b\n")
    monkeypatch.setenv("DEEPLINK_TOPOLOGY", str(fabric))
    (dry,) = said("--nodes", "n[0-2]", "digits", "--replicas", "2", "--dry-run")
    assert dry["copies"] == sum(dry["to_bring"].values()) == 2 * len(index.shards)
    assert dry["to_bring"]["n2"] == len(index.shards)


def test_ahead_of_a_drain_what_a_node_alone_holds_is_copied_away_bit_by_bit(
    agents: Keepers, index: Index, tmp_path: Path
) -> None:
    said("--nodes", "n2", "digits", "--replicas", "1")
    (tmp_path / "source").rename(tmp_path / "away")  # it must come from n2
    alone = agents.running["n2"].store.ids()
    assert len(alone) == len(index.shards)
    (done,) = said("--drain", "n2")
    assert done["came"] == done["copies"] == len(alone)
    assert set(done["brought"]) <= {"n0", "n1", "n2"}
    text = CliRunner().invoke(cli, ["prefetch", "--drain", "n2", "digits"]).stdout
    assert "to bring: 0" in text
    for shard in alone:
        copies = [agents.running[name].store for name in ("n0", "n1")]
        there = [store for store in copies if store.is_verified(shard)]
        assert there  # told of each other, they may already have made their second copies
        for store in there:
            assert store.path(shard).read_bytes() == agents.running["n2"].store.path(shard).read_bytes()


def test_a_silent_member_is_named_and_the_others_are_warmed(agents: Keepers, index: Index) -> None:
    agents.stop("n1")
    (done,) = said("--nodes", "n[0-1]", "digits", "--replicas", "1", code=1)
    assert done["silent"] == ["n1"]
    assert done["came"] == sum(done["to_bring"].values()) > 0


def test_without_standing_agents_it_says_so(config: Config, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["prefetch", "--nodes", "n0", "digits"])
    assert isinstance(done.exception, DeepLinkError)
    assert "nothing can be warmed before the job starts" in str(done.exception)


@pytest.mark.parametrize(
    "words",
    [["7"], ["x", "digits"], ["--nodes", "n0"], ["--drain", "n9"], ["--drain", "n0", "--nodes", "n1", "digits"]],
    ids=" ".join,
)
def test_what_cannot_be_done_is_said(agents: Keepers, words: list[str]) -> None:
    done = CliRunner().invoke(cli, ["prefetch", *words])
    assert done.exit_code != 0
    assert done.exception is not None
