"""`deeplink warm`, `evict` and `rm`: here, and on members."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.store.pins import Pin
from deeplink.cache.store.store import Store
from deeplink.cli import cli
from deeplink.cli.options import PlaceType
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import format_members
from tests.cache.agents import config_below, small_files, write_tree
from tests.cache.keepers import Keepers

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.core.config import Config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    config = config_below(tmp_path, shard_bytes=100_000)
    for key in ("catalog", "store", "node"):
        monkeypatch.setenv(f"DEEPLINK_{key.upper()}", str(getattr(config, key)))
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    write_tree(tmp_path / "source", small_files())
    pack(str(tmp_path / "source"), "digits", config=config)
    return config


@pytest.fixture
def index(config: Config) -> Index:
    return Catalog(config.catalog).open("digits")


def said(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == code, done.output
    return dict(json.loads(done.stdout))


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli, [*words])
    assert isinstance(done.exception, DeepLinkError), done.output
    return str(done.exception)


def test_what_was_dropped_here_is_made_again_from_the_source(config: Config, index: Index) -> None:
    count, store = len(index.shards), Store(config.store)
    dry = said("evict", "digits", "--dry-run")
    assert [one["outcome"] for one in dry["nodes"]["head"]] == ["would go"] * count
    assert store.status().shards == count
    said("evict", "digits")
    assert store.ids() == []
    now = said("warm", "digits", "--dry-run")
    assert (now["percent"], now["cached_shards"], now["nodes"][0]["verified"]) == (0.0, 0, 0)
    done = said("warm", f"digits@{index.version[:8]}")
    assert (done["percent"], done["whole_shards"], done["problems"]) == (100.0, count, [])
    assert done["brought"] == {"source": sum(entry.bytes for entry in index.shards)}
    assert all(store.is_verified(entry.id) for entry in index.shards)


def test_what_cannot_be_had_again_stays_unless_forced(config: Config, index: Index, tmp_path: Path) -> None:
    (tmp_path / "source").rename(tmp_path / "moved")
    kept = said("evict", "digits")["nodes"]["head"]
    assert {one["outcome"] for one in kept} == {"only"}
    text = CliRunner().invoke(cli, ["evict", "digits"]).stdout
    assert f"kept {len(index.shards)} shards: it is not known that it can be had again" in text
    said("evict", "digits", "--force")
    assert Store(config.store).ids() == []
    failed = said("warm", "digits", code=1)
    assert failed["percent"] == 0.0
    again = CliRunner().invoke(cli, ["warm", "digits"])
    assert again.stdout.endswith("s: nothing\n")
    assert f"run `deeplink warm digits@{index.version[:12]}` again" in again.stderr
    assert "there is no such folder" in failed["problems"][0] or "No such file" in failed["problems"][0]


def test_what_another_dataset_has_too_stays_unless_forced(config: Config, index: Index, tmp_path: Path) -> None:
    more = write_tree(tmp_path / "more", small_files())
    (more / "zzz.bin").write_bytes(b"new")
    pack(str(more), "twin", config=config)
    shared = {entry.id for entry in index.shards} & {
        entry.id for entry in Catalog(config.catalog).open("twin").shards
    }
    assert shared
    text = CliRunner().invoke(cli, ["evict", "digits", "--dry-run"]).stdout
    assert f"kept {len(shared)} shard" in text
    assert "that twin has too" in text
    assert said("evict", "digits")["shared"] == {"twin": len(shared)}
    (config.catalog / "twin" / "latest").unlink()  # which is the newest can be found out again
    assert said("evict", "digits")["shared"] == {"twin": len(shared)}
    assert shared <= set(Store(config.store).ids())
    assert said("evict", "digits", "--force")["shared"] == {}
    assert not shared & set(Store(config.store).ids())


def test_what_a_job_reads_stays(config: Config, index: Index) -> None:
    pin = Pin(config.store, index, SystemClock())
    assert {one["outcome"] for one in said("evict", "digits")["nodes"]["head"]} == {"needed"}
    pin.release()
    assert {one["outcome"] for one in said("evict", "digits")["nodes"]["head"]} == {"gone"}


def test_of_a_version_only_what_no_other_one_has_goes(config: Config, index: Index, tmp_path: Path) -> None:
    (tmp_path / "source" / "zzz.bin").write_bytes(b"new")
    newer = Catalog(config.catalog).open("digits", pack(str(tmp_path / "source"), "digits", config=config).version)
    shared = {entry.id for entry in index.shards} & {entry.id for entry in newer.shards}
    assert shared
    assert shared != {entry.id for entry in index.shards}
    (tmp_path / "source" / "zzz.bin").unlink()
    said("evict", f"digits@{index.version}")
    assert set(Store(config.store).ids()) == {entry.id for entry in newer.shards}


@pytest.fixture
def keepers(keepers: Keepers, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> Keepers:
    for name in ("n0", "n1"):
        keepers.start(name)
    token = tmp_path / "token"
    token.write_text(keepers.token)
    token.chmod(0o600)
    monkeypatch.setenv("DEEPLINK_MEMBERS", format_members(keepers.members))
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", str(token))
    return keepers


def test_members_are_warmed_and_the_table_says_who_is_silent(keepers: Keepers, index: Index) -> None:
    count = len(index.shards)
    text = CliRunner().invoke(cli, ["warm", "digits"])
    assert text.exit_code == 0, text.output
    assert f"cached and verified: 100.0 %; {count} of {count} shards have all 2 copies" in text.stdout
    assert "nothing, all was here" in CliRunner().invoke(cli, ["warm", "digits"]).stdout
    keepers.stop("n1")
    done = said("warm", "digits", code=1)
    assert (done["percent"], done["whole_shards"]) == (100.0, 0)
    assert [node["answered"] for node in done["nodes"]] == [True, False]
    assert said("warm", "digits", "--replicas", "1")["whole_shards"] == count
    gone = said("evict", "digits", code=1)
    assert len(gone["nodes"]["n0"]) == count
    assert "n1" in gone["problems"][0]


@pytest.mark.parametrize(("words", "code"), [(("nothing",), 2), (("digits/a",), 2), (("digits@0000",), 2)])
@pytest.mark.parametrize("verb", ["warm", "evict"])
def test_what_is_not_there_is_wrong_usage(config: Config, verb: str, words: tuple[str, ...], code: int) -> None:
    done = CliRunner().invoke(cli, [verb, *words])
    assert done.exit_code == code or getattr(done.exception, "exit_code", 1) == code


def test_a_dataset_goes_whole_and_an_open_index_stays_open(config: Config, index: Index, tmp_path: Path) -> None:
    store, count = Store(config.store), len(index.shards)
    (tmp_path / "source" / "zzz.bin").write_bytes(b"new")
    pack(str(tmp_path / "source"), "digits", config=config)
    held = len(store.ids())
    dry = said("rm", "digits", "--dry-run")
    assert (dry["dry_run"], len(dry["versions"]), dry["shards"], dry["kept"]) == (True, 2, held, {})
    assert len(store.ids()) == held > count
    assert Catalog(config.catalog).names() == ["digits"]
    done = said("rm", "digits")
    assert (done["versions"], done["shards"], done["bytes"]) == (dry["versions"], held, dry["bytes"])
    assert store.ids() == []
    assert Catalog(config.catalog).names(lost=True) == []
    assert index.row(index.key(3)) == 3  # who has it open reads on
    assert "has no dataset 'digits'" in refused("rm", "digits")


def test_nothing_is_removed_under_a_running_job(config: Config, index: Index) -> None:
    pin = Pin(config.store, index, SystemClock())
    for words in (["rm", "digits"], ["rm", "digits", "--dry-run"]):
        assert "a running job reads" in refused(*words)
    assert Catalog(config.catalog).names() == ["digits"]
    assert len(Store(config.store).ids()) == len(index.shards)
    pin.release()
    assert said("rm", "digits")["kept"] == {}


def test_what_another_dataset_has_too_stays(config: Config, tmp_path: Path) -> None:
    pack(str(tmp_path / "source"), "twin", config=config)
    ids = Store(config.store).ids()
    text = CliRunner().invoke(cli, ["rm", "digits"]).stdout
    assert f"kept {len(ids)} shard" in text
    assert "that twin has too" in text
    assert Store(config.store).ids() == ids
    assert Catalog(config.catalog).names() == ["twin"]


def test_of_several_versions_an_older_one_goes_alone(config: Config, index: Index, tmp_path: Path) -> None:
    (tmp_path / "source" / "zzz.bin").write_bytes(b"new")
    newest = pack(str(tmp_path / "source"), "digits", config=config).version
    assert "is the newest version" in refused("rm", f"digits@{newest[:8]}")
    assert said("rm", f"digits@{index.version[:8]}")["versions"] == [index.version]
    assert Catalog(config.catalog).versions("digits") == [newest]
    assert set(Store(config.store).ids()) == {entry.id for entry in Catalog(config.catalog).open("digits").shards}


def test_what_cannot_be_had_again_goes_with_its_dataset(config: Config, index: Index, tmp_path: Path) -> None:
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    assert said("rm", "digits", "--dry-run")["shards"] == len(index.shards)
    assert said("rm", "digits")["shards"] == len(index.shards)
    assert Store(config.store).ids() == []


def test_members_are_asked_and_a_silent_one_stops_it(
    keepers: Keepers, index: Index, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(cli, ["warm", "digits"]).exit_code == 0
    keepers.stop("n1")
    assert "whether a job reads digits is not known" in refused("rm", "digits")
    assert Catalog(config.catalog).names() == ["digits"]
    keepers.start("n1")
    monkeypatch.setenv("DEEPLINK_MEMBERS", format_members(keepers.members))
    assert said("rm", "digits")["shards"] >= len(index.shards)
    assert Catalog(config.catalog).names(lost=True) == []


@pytest.mark.parametrize(("beginning", "found"), [("di", "digits"), ("digits@", "digits@")])
def test_names_and_versions_are_completed(config: Config, index: Index, beginning: str, found: str) -> None:
    command = cli.get_command(None, "rm")  # type: ignore[arg-type]
    assert command is not None
    (dataset,) = [one for one in command.params if one.name == "dataset"]
    assert isinstance(dataset.type, PlaceType)
    offered = [one.value for one in dataset.type.shell_complete(None, dataset, beginning)]  # type: ignore[arg-type]
    assert offered == [found + index.version if found.endswith("@") else found]


@pytest.mark.parametrize("where", [("--here", "--local", "2"), ("--here", "--members", "n0=127.0.0.1:1")])
@pytest.mark.parametrize("verb", ["warm", "evict", "rm"])
def test_ways_to_say_where_exclude_each_other(verb: str, where: tuple[str, ...], config: Config) -> None:
    done = CliRunner().invoke(cli, [verb, "digits", "--dry-run", *where])
    assert done.exit_code == 2
    assert "exclude each other" in done.output
