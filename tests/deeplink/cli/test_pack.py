from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.cli import main
from deeplink.core.config import load_config
from deeplink.core.types import format_members
from tests.cache.agents import Agents, make_tar, small_files, write_tree
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Ended:
    code: int | str | None
    out: str
    err: str


class Deeplink:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["deeplink", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        return Ended(ended.value.code, out, err)


@pytest.fixture
def deeplink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Deeplink:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    settings = {"CATALOG": "catalog", "STORE": "store", "STATE": "state"}
    for name, folder in settings.items():
        monkeypatch.setenv(f"DEEPLINK_{name}", str(tmp_path / folder))
    monkeypatch.setenv("DEEPLINK_NODE", "here")
    monkeypatch.setenv("DEEPLINK_CONFIG", "/dev/null")
    return Deeplink(monkeypatch, capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "source", small_files(30))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    running = Agents(tmp_path)
    for name in ("n0", "n1"):
        running.start(name)
    yield running
    running.stop_all()


def test_packing_says_what_it_did_and_where_the_shards_are(deeplink: Deeplink, source: Path) -> None:
    ended = deeplink("pack", str(source), "digits", "--shard-size", "100K")
    assert ended.code == 0
    assert "digits: 30 files" in ended.out
    assert "shards per node: here" in ended.out
    with Reader.open("digits") as reader:
        assert dict(zip(reader.index.keys(), map(bytes, reader.read(range(30))), strict=True)) == small_files(30)
    again = deeplink("pack", str(source), "digits", "--shard-size", "100K")
    assert again.code == 0
    assert "nothing has changed" in again.out


def test_json_is_one_document_of_facts(deeplink: Deeplink, source: Path) -> None:
    ended = deeplink("pack", str(source), "digits", "--json")
    said = json.loads(ended.out)
    assert said["name"] == "digits"
    assert said["files"] == said["read_files"] == 30
    assert said["bytes"] == sum(map(len, small_files(30).values()))
    assert said["placed"] == {shard: ["here"] for shard in Store(load_config().store).ids()}
    assert said["version"] == Reader.open("digits").version


def test_a_dry_run_says_the_same_and_writes_nothing(deeplink: Deeplink, source: Path, tmp_path: Path) -> None:
    ended = deeplink("pack", str(source), "digits", "--shard-size", "100K", "--dry-run", "--json")
    said = json.loads(ended.out)
    assert ended.code == 0
    assert (said["files"], said["first"], said["last"]) == (30, min(small_files(30)), max(small_files(30)))
    assert said["shards"] == len(said["shard_bytes"]) > 1
    assert sum(said["shard_bytes"]) == said["bytes"]
    assert "would pack 30 files" in deeplink("pack", str(source), "digits", "--dry-run").out
    assert not (tmp_path / "catalog").exists()
    assert not (tmp_path / "store").exists()


def test_members_get_their_copies(
    deeplink: Deeplink, source: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", str(agents.token_file))
    onto = ("--members", format_members(agents.members), "--replicas", "2")
    ended = deeplink("pack", str(source), "digits", *onto)
    assert ended.code == 0, ended.err
    planned = json.loads(deeplink("pack", str(source), "digits", *onto, "--dry-run", "--json").out)
    assert planned["shards"] > 2
    assert f"n0 {planned['shards']}, n1 {planned['shards']}" in ended.out
    assert all(store.ids() for store in agents.stores.values())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("/nowhere", "digits"), "no such folder"),
        (("SOURCE", "../digits"), "dataset's name"),
        (("SOURCE", "digits", "--shard-size", "many"), "not a size"),
        (("SOURCE", "digits", "--shard-size", "0"), "not a size"),
        (("SOURCE", "digits", "--shard-size", "3K"), "4K is the least"),
        (("SOURCE", "digits", "--here", "--members", "n0=127.0.0.1:1"), "exclude each other"),
        (("SOURCE", "digits", "--home", "SOURCE/packed"), "the home SOURCE/packed lies in it"),
        (("SOURCE", "digits", "--replicas", "0"), "range"),
        (("SOURCE", "digits", "--members", "n0"), "NAME=HOST:PORT"),
        (("SOURCE", "digits", "--members", "n0=127.0.0.1:1"), "token_file"),
        (("SOURCE",), "Missing argument"),
    ],
)
def test_what_cannot_be_used_is_refused_with_code_2(
    deeplink: Deeplink, source: Path, args: tuple[str, ...], said: str
) -> None:
    ended = deeplink("pack", *(arg.replace("SOURCE", str(source)) for arg in args))
    assert ended.code == 2
    assert said.replace("SOURCE", str(source)) in ended.err
    assert not ended.out


@pytest.mark.parametrize("what", ["catalog", "store"])
def test_a_source_that_holds_what_is_written_is_refused(
    deeplink: Deeplink, source: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv(f"DEEPLINK_{what.upper()}", str(source / "below" / what))
    ended = deeplink("pack", str(source), "digits")
    assert (ended.code, f"the {what} {source}/below/{what} lies in it" in ended.err) == (2, True)
    assert not (source / "below").exists()


def test_the_files_in_an_archive_are_packed(deeplink: Deeplink, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "tiles.zip", "w") as archive:
        for path, data in small_files(3).items():
            archive.writestr(path, data)
    ended = deeplink("pack", f"zip://::{tmp_path}/tiles.zip", "tiles")
    assert ended.code == 0, ended.err
    with Reader.open("tiles") as reader:
        assert list(reader.index.keys()) == sorted(small_files(3))


def test_more_copies_than_nodes_is_said(deeplink: Deeplink, source: Path) -> None:
    assert "there can be 1 of each shard" in deeplink("pack", str(source), "digits", "--replicas", "3").err
    assert deeplink("pack", str(source), "digits", "--replicas", "1").err == ""


def test_packing_nothing_new_keeps_the_time_of_the_version(deeplink: Deeplink, source: Path) -> None:
    deeplink("pack", str(source), "digits")
    file = next(load_config().catalog.glob("digits/*.json"))
    noted = json.loads(file.read_text())
    file.write_text(json.dumps(noted | {"packed_unix": 1.5}))
    assert "nothing has changed" in deeplink("pack", str(source), "digits").out
    again = json.loads(file.read_text())
    assert again.pop("listed_unix") >= noted.pop("listed_unix")
    assert again == noted | {"packed_unix": 1.5}


def test_an_empty_folder_is_refused(deeplink: Deeplink, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = deeplink("pack", str(tmp_path / "empty"), "digits")
    assert ended.code == 2
    assert "holds no files" in ended.err


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of Slurm's, and an srun that leaves the returned file when it is called."""
    called = tmp_path / "called"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f"#!/bin/sh\n/usr/bin/touch {called}\n")
    srun.chmod(0o755)
    job = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[0-1]", "RESTART_COUNT": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    return called


@pytest.mark.parametrize("wrong", ["/nowhere/at/all", "memory://nowhere"])
def test_a_misspelt_source_starts_no_agents(deeplink: Deeplink, allocation: Path, wrong: str) -> None:
    ended = deeplink("pack", wrong, "digits")
    assert (ended.code, ended.out) == (2, "")
    assert "no such folder" in ended.err
    assert not allocation.exists()


def test_a_catalog_that_cannot_be_written_starts_no_agents(
    deeplink: Deeplink, source: Path, allocation: Path, tmp_path: Path
) -> None:
    (tmp_path / "catalog").write_text("a file, so that it holds for root too")
    ended = deeplink("pack", str(source), "digits")
    assert ended.code == 1
    assert "DEEPLINK_CATALOG" in ended.err
    assert not allocation.exists()


def test_members_that_do_not_answer_are_code_1_with_a_remedy(
    deeplink: Deeplink, source: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", str(agents.token_file))
    agents.stop_all()
    ended = deeplink("pack", str(source), "digits", "--members", format_members(agents.members))
    assert ended.code == 1
    assert "Start the agents" in ended.err


def test_one_of_a_thing_is_said_as_one(deeplink: Deeplink, tmp_path: Path) -> None:
    source = write_tree(tmp_path / "one", {"a": b"a"})
    assert "would pack 1 file, 1 B, into 1 shard as one" in deeplink("pack", str(source), "one", "--dry-run").out
    assert "one: 1 file, 1 B, in 1 shard; 1 read" in deeplink("pack", str(source), "one").out


def test_help_has_examples(deeplink: Deeplink) -> None:
    assert "deeplink pack /data/imagenet imagenet" in deeplink("pack", "--help").out


# Packs once, so that all is imported before the interpreter's folder may be out of reach; then as nobody.
PACK_AS_NOBODY = """
import os, sys
from deeplink.cli import main
def packs(source, name):
    sys.argv = ["deeplink", "pack", source, name]
    try:
        main()
    except SystemExit as ended:
        return ended.code
assert packs("readable", "first") == 0
if os.geteuid() == 0:
    for folder, _, files in os.walk("."):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            os.chown(path, 65534, 65534)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
sys.exit(packs("source", "second"))
"""


@pytest.mark.parametrize("closed", ["train/b/closed.bin", "train/closed"])
def test_what_an_ordinary_user_may_not_read_is_named_and_nothing_published(closed: str) -> None:
    # Not below tmp_path: root's is closed to everybody else.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        top = Path(folder)
        write_tree(top / "readable", small_files(3))
        write_tree(top / "source", small_files(6))
        refused = top / "source" / closed
        if refused.suffix:
            refused.write_bytes(b"secret")
        else:
            refused.mkdir()
            (refused / "1.bin").write_bytes(b"secret")
        refused.chmod(0)
        settings = {"CATALOG": "catalog", "STORE": "store", "STATE": "state"}
        env = {f"DEEPLINK_{name}": str(top / part) for name, part in settings.items()}
        env |= {"DEEPLINK_CONFIG": "/dev/null", "DEEPLINK_NODE": "here", "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-c", PACK_AS_NOBODY],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=top,
            env=env,
        )
        refused.chmod(0o700)
        assert done.returncode == 1, done.stderr
        assert closed in done.stderr
        assert "Permission denied" in done.stderr
        assert "Traceback" not in done.stderr
        assert [path.name for path in (top / "catalog").iterdir()] == ["first"]


def test_append_says_what_is_new_and_keeps_the_rest(deeplink: Deeplink, source: Path) -> None:
    refused = deeplink("pack", str(source), "digits", "--append")
    assert refused.code == 2
    assert "no version yet" in refused.err
    shards = json.loads(deeplink("pack", str(source), "digits", "--shard-size", "100K", "--json").out)["shards"]
    write_tree(source, {"zebra/1.bin": b"new"})
    planned = json.loads(deeplink("pack", str(source), "digits", "--append", "--dry-run", "--json").out)
    assert (planned["shards"], planned["shards_there"]) == (shards + 1, shards)
    said = json.loads(deeplink("pack", str(source), "digits", "--append", "--json").out)
    assert (said["shards"], said["read_files"]) == (shards + 1, 1)


def test_verify_reads_back_and_fails_where_something_is_wrong(
    deeplink: Deeplink, source: Path, tmp_path: Path
) -> None:
    ended = deeplink("pack", str(source), "digits", "--verify", "--home", str(tmp_path / "home"))
    assert ended.code == 0
    assert "read back 1 copy of shards" in ended.out
    (shard,) = Store(load_config().store).ids()
    assert (tmp_path / "home" / f"{shard}.mdb").is_file()
    with Reader.open("digits") as reader:
        begins = int(reader.index.block_offsets(0)[0])
    with Store(load_config().store).path(shard).open("r+b") as file:
        file.seek(begins)
        file.write(b"other")
    again = deeplink("pack", str(source), "digits", "--verify", "--json")
    assert again.code == 1
    assert shard in json.loads(again.out)["verified"]["problems"][0]


def test_a_home_that_cannot_be_used_is_said_before_anything_is_packed(
    deeplink: Deeplink, source: Path, tmp_path: Path
) -> None:
    ended = deeplink("pack", str(source), "digits", "--home", "nosuchkind://x")
    assert ended.code == 1
    assert "nosuchkind" in ended.err
    assert not (tmp_path / "store").exists()


def test_what_is_left_out_and_what_is_skipped_is_said(deeplink: Deeplink, source: Path) -> None:
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("x")
    (source / "gone").symlink_to("nowhere")
    (source / "also").symlink_to("nowhere")
    refused = deeplink("pack", str(source), "digits")
    assert refused.code == 2
    assert "2 files cannot be packed" in refused.err
    done = deeplink("pack", str(source), "digits", "--skip-bad")
    assert done.code == 0
    assert "left out, files and folders: .git 1" in done.err
    assert done.err.count("skipped: ") == 2
    facts = json.loads(
        deeplink("pack", str(source), "digits", "--skip-bad", "--no-default-excludes", "--json").out
    )
    assert sorted(facts["skipped"]) == ["also", "gone"]
    assert facts["left_out"] == {}
    planned = deeplink("pack", str(source), "digits", "--skip-bad", "--include", ".git/", "--dry-run", "--json")
    assert planned.code == 2
    assert "left out" in planned.err


def test_a_name_moves_to_another_source_only_where_that_is_asked_for(
    deeplink: Deeplink, source: Path, tmp_path: Path
) -> None:
    other = write_tree(tmp_path / "other", {"a": b"1"})
    assert deeplink("pack", str(source), "digits").code == 0
    assert deeplink("pack", str(source), "digits").code == 0
    refused = deeplink("pack", str(other), "digits")
    assert refused.code == 2
    assert f"packed from {source}" in refused.err
    assert deeplink("pack", str(other), "digits", "--replace").code == 0
    assert deeplink("pack", str(source), "digits").code == 2


def test_a_folder_of_tars_is_packed_but_it_is_said_what_else_could_be_meant(
    deeplink: Deeplink, tmp_path: Path
) -> None:
    digits = {f"{number}.bin": bytes([number]) for number in range(9)}
    make_tar(tmp_path / "tars" / "a-0.tar", digits)
    make_tar(tmp_path / "tars" / "a-1.tar", digits)
    assert "each .tar file is one sample" in deeplink("pack", str(tmp_path / "tars"), "tars").err
    done = deeplink("pack", str(tmp_path / "tars" / "a-{0..1}.tar"), "digits")
    assert "digits: 18 files" in done.out
    assert deeplink("pack", str(tmp_path / "tars"), "tars", "--key", "id").code == 2
    with Reader.open("digits") as reader:
        assert list(reader.index.keys())[12] == "a-1/3.bin"
        assert [bytes(view) for view in reader.read([3, 12])] == [b"\3", b"\3"]


def test_a_catalog_that_nodes_share_has_a_packed_home_beside_it(
    deeplink: Deeplink, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = deeplink("pack", str(source), "digits")
    assert "no packed home" in alone.out
    home = tmp_path / "catalog.home"
    monkeypatch.setenv("DEEPLINK_HOME", str(home))
    planned = deeplink("pack", str(source), "digits", "--dry-run")
    assert f"packed home {home}: as the setting `home` says; up to" in planned.out
    assert not home.exists()
    ended = deeplink("pack", str(source), "digits")
    assert ended.code == 0
    first, second, *_ = ended.out.splitlines()
    assert first == f"store {tmp_path / 'store'} (set in DEEPLINK_STORE)"
    assert second.startswith(f"packed home {home}: as the setting")
    (shard,) = Store(load_config().store).ids()
    assert (home / f"{shard}.mdb").is_file()
    facts = json.loads(deeplink("info", "digits", "--json").out)
    assert (facts["home"], facts["home_shards"]) == (str(home), 1)
    assert (facts["store"], facts["store_why"]) == (str(tmp_path / "store"), "set in DEEPLINK_STORE")
    assert "packed home whole" in deeplink("verify", "digits").out
    left_out = deeplink("pack", str(source), "digits", "--no-home")
    assert "nodes without the shards read the small files again" in left_out.out
    assert json.loads(deeplink("info", "digits", "--json").out)["home"] == "none"
    assert deeplink("pack", str(source), "digits", "--no-home", "--home", "/x").code == 2


def test_a_damaged_copy_in_the_packed_home_is_found(deeplink: Deeplink, source: Path, tmp_path: Path) -> None:
    assert deeplink("pack", str(source), "digits", "--home", str(tmp_path / "home")).code == 0
    (path,) = (tmp_path / "home").glob("*.mdb")
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    assert deeplink("verify", "digits", "--quick").code == 0
    ended = deeplink("verify", "digits")
    assert ended.code == 1
    assert "packed home" in ended.err
    path.unlink()
    assert deeplink("verify", "digits").code == 0
    assert json.loads(deeplink("info", "digits", "--json").out)["home_shards"] == 0


def test_a_removed_version_leaves_the_catalogs_own_home_too(
    deeplink: Deeplink, source: Path, tmp_path: Path
) -> None:
    home = tmp_path / "catalog.home"
    first = json.loads(deeplink("pack", str(source), "digits", "--home", str(home), "--json").out)["version"]
    write_tree(source, {"a/new.bin": b"new"})
    assert deeplink("pack", str(source), "digits", "--home", str(home)).code == 0
    assert len(list(home.glob("*.mdb"))) == 2
    planned = deeplink("index", "rm", f"digits@{first}", "--dry-run")
    assert f"1 shard that no other version has would be removed from {home}" in planned.out
    assert len(list(home.glob("*.mdb"))) == 2
    assert deeplink("index", "rm", f"digits@{first}").code == 0
    assert len(list(home.glob("*.mdb"))) == len(list(home.glob("digits/*.arrow"))) == 1


def test_parts_are_packed_one_by_one_and_merged(deeplink: Deeplink, source: Path) -> None:
    whole = json.loads(deeplink("pack", str(source), "whole", "--json", "--shard-size", "64K").out)
    for part in ("2/3", "1/3", "3/3"):
        done = deeplink("pack", str(source), "digits", "--part", part, "--shard-size", "64K")
        assert done.code == 0
        assert f"part {part[0]} of 3" in done.out
    assert deeplink("index", "show", "digits").code == 2
    merged = json.loads(deeplink("index", "merge", "digits", "--json").out)
    assert (merged["version"], merged["parts"]) == (whole["version"], 3)
    assert deeplink("verify", "digits").code == 0
    assert deeplink("index", "merge", "digits").code == 2
    for wrong in ("0/3", "4/3", "1", "a/b"):
        assert deeplink("pack", str(source), "digits", "--part", wrong).code == 2
    assert deeplink("pack", str(source), "digits", "--part", "1/2", "--append").code == 2


def test_arrays_of_two_clusters_with_the_same_number_list_apart(
    deeplink: Deeplink, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    for cluster, listings in (("one", 1), ("two", 2), ("one", 2)):
        monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster)
        assert deeplink("pack", str(source), "digits", "--part", "1/2").code == 0
        assert len(list(tmp_path.rglob("listing-*.npz"))) == listings
