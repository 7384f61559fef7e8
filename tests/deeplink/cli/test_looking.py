"""`deeplink ls`, `info`, `cat`, `get` and `verify`, in this process and on real agents."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.shell_completion import ShellComplete

from deeplink.cache.format.block import checksum
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.cli import cli
from deeplink.core.config import load_config
from deeplink.core.types import format_members
from tests.cache.agents import Agents, config_below, small_files, write_tree
from tests.deeplink.cli.test_pack import Deeplink
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.core.config import Config

FILES = small_files(30) | {"readme.txt": b"hello\n", "odd/[ä] ?.txt": b"odd"}
README_SUM = f"{checksum(FILES['readme.txt']):016x}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    base = tmp_path_factory.mktemp("looking")
    config = config_below(base)
    pack(str(write_tree(base / "source", FILES)), "digits", config=config)
    pack(str(write_tree(base / "other", {"one": b"1", "sub/one": b"2"})), "other", config=config)
    return config


@pytest.fixture
def deeplink(config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Deeplink:
    return command_of(config, monkeypatch, capsys)


def command_of(config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Deeplink:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "CATALOG": config.catalog,
        "STORE": config.store,
        "NODE": config.node,
        "CONFIG": "/dev/null",
        "MEMBERS": config.members,
        "TOKEN_FILE": config.token_file or "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"DEEPLINK_{name}", str(value))
    return Deeplink(monkeypatch, capsys)


# ls


def test_ls_lists_datasets(deeplink: Deeplink) -> None:
    lines = deeplink("ls").out.splitlines()
    assert [line.split()[0] for line in lines] == ["digits", "other"]
    assert "32 samples" in lines[0]
    said = json.loads(deeplink("ls", "--json").out)
    assert said[0]["samples"] == 32
    assert said[0]["bytes"] == sum(map(len, FILES.values()))
    assert said[0]["versions"] == [said[0]["version"]]


@pytest.mark.parametrize(
    ("lost", "problem", "remedy"),
    [
        (["latest"], "which version of 'pets' is the newest", "`deeplink index rebuild pets@{version}`"),
        (["latest", "arrow"], "which version of 'pets' is the newest", "`deeplink index rebuild pets@{version}`"),
        (["latest", "json"], "which version of 'pets' is the newest", "`deeplink index rebuild pets@{version}`"),
        (["arrow"], "has lost the index of version {version}", "`deeplink index rebuild pets@{version}`"),
        (["arrow", "json"], "has no version {version}", "`deeplink pack SOURCE NAME`"),
    ],
)
def test_ls_lists_a_dataset_of_which_something_is_lost_and_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    lost: list[str],
    problem: str,
    remedy: str,
) -> None:
    config = config_below(tmp_path)
    source = write_tree(tmp_path / "source", {"cat/1": b"1"})
    for name in ("pets", "well"):
        pack(str(source), name, config=config)
    version = Reader.open("pets", config=config).version
    for what in lost:
        (config.catalog / "pets" / ("latest" if what == "latest" else f"{version}.{what}")).unlink()
    deeplink = command_of(config, monkeypatch, capsys)
    pets, then, well = deeplink("ls").out.splitlines()
    assert pets.startswith("pets  ")
    assert problem.format(version=version) in pets
    assert remedy.format(version=version) in then
    assert well.split()[0] == "well"
    said, _ = json.loads(deeplink("ls", "--json").out)
    assert said["name"] == "pets"
    assert problem.format(version=version) in said["problem"]
    assert said["remedy"] == then.strip()
    if "rebuild" in remedy:
        assert deeplink("index", "rebuild", f"pets@{version}").code == 0
        assert "1 sample" in deeplink("ls").out.splitlines()[0]


def test_ls_of_an_empty_catalog_says_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    ended = command_of(config_below(tmp_path), monkeypatch, capsys)("ls")
    assert (ended.code, ended.out) == (0, "")
    assert "deeplink pack" in ended.err


def test_ls_lists_folders_and_samples(deeplink: Deeplink) -> None:
    assert deeplink("ls", "digits").out.splitlines() == ["odd/", "readme.txt", "test/", "train/"]
    assert deeplink("ls", "deeplink://digits/odd/").out.splitlines() == ["[ä] ?.txt"]
    long = deeplink("ls", "-l", "digits").out.splitlines()
    assert long[1].split() == ["6", "B", "readme.txt"]
    test = [data for path, data in FILES.items() if path.startswith("test/")]
    assert f"{len(test)} samples  test/" in long[2]
    assert deeplink("ls", "-R", "digits").out.splitlines() == [f"digits/{path}" for path in sorted(FILES)]
    facts = json.loads(deeplink("ls", "--json", "digits").out)
    assert facts[1] == {
        "path": "digits/readme.txt", "type": "sample", "bytes": 6, "checksum": README_SUM
    }  # fmt: skip
    assert facts[2] == {
        "path": "digits/test",
        "type": "folder",
        "samples": len(test),
        "bytes": sum(map(len, test)),
    }


def test_a_name_cannot_play_with_the_terminal(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    config = config_below(tmp_path)
    pack(str(write_tree(tmp_path / "tree", {"a\nb\x1b[31m": b""})), "odd", config=config)
    deeplink = command_of(config, monkeypatch, capsys)
    assert deeplink("ls", "odd").out == "a\\nb\\x1b[31m\n"
    assert "\x1b" not in deeplink("info", "odd/a\nb\x1b[31m").out
    assert json.loads(deeplink("ls", "--json", "odd").out)[0]["path"] == "odd/a\nb\x1b[31m"


@pytest.mark.parametrize("verb", ["ls", "info", "cat", "verify"])
@pytest.mark.parametrize("place", ["none", "digits/none", "digits@00", "o dd", "digits@"])
def test_what_is_not_there_is_wrong_usage_that_says_so(deeplink: Deeplink, verb: str, place: str) -> None:
    ended = deeplink(verb, place)
    assert ended.code == 2
    assert ended.out == ""
    assert place.partition("@")[0] in ended.err
    assert len(ended.err.splitlines()) == 2  # and what to do


# info


def test_info_tells_of_a_dataset_and_where_it_is(deeplink: Deeplink, config: Config) -> None:
    said = json.loads(deeplink("info", "--json", "digits").out)
    index = Reader.open("digits", config=config).index
    assert (said["samples"], said["shards"], said["version"]) == (32, len(index.shards), index.version)
    assert said["source"].endswith("/source")
    assert (said["replicas"], said["cached_percent"]) == (1, 100.0)
    assert said["nodes"]["head"]["verified"] == len(index.shards)
    text = deeplink("info", "digits").out
    assert f"version                {index.version}" in text
    assert "  head: " in text


def test_info_tells_of_a_folder_and_of_a_sample(deeplink: Deeplink, config: Config) -> None:
    folder = json.loads(deeplink("info", "--json", "digits/train").out)
    assert folder["samples"] == sum(path.startswith("train/") for path in FILES)
    assert (folder["folders"], folder["samples_directly"]) == (3, 0)
    sample = json.loads(deeplink("info", "--json", "digits/readme.txt").out)
    index = Reader.open("digits", config=config).index
    row = index.row("readme.txt")
    assert sample["checksum"] == README_SUM
    assert (sample["row"], sample["bytes"], sample["pieces"]) == (row, 6, 1)
    assert sample["shard"] == index.shards[int(index.shard[row])].id
    assert (sample["owners"], sample["holders"]) == (["head"], ["head"])
    assert "checksum" in deeplink("info", "digits/readme.txt").out
    assert deeplink("info", "").code == 2


# cat


def cat(config: Config, *args: str) -> subprocess.CompletedProcess[bytes]:
    env = {
        **os.environ,
        "DEEPLINK_CATALOG": str(config.catalog),
        "DEEPLINK_STORE": str(config.store),
        "DEEPLINK_CONFIG": "/dev/null",
    }
    command = [sys.executable, "-m", "deeplink", "cat", *args]
    return subprocess.run(command, capture_output=True, env=env, timeout=LIMIT_S, check=False)


def test_cat_writes_the_very_bytes(config: Config) -> None:
    paths = ["odd/[ä] ?.txt", "test/b/00004.bin", "readme.txt", "test/b/00004.bin"]
    done = cat(config, *(f"digits/{path}" for path in paths))
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"".join(FILES[path] for path in paths)


def test_cat_as_json(deeplink: Deeplink) -> None:
    said = json.loads(deeplink("cat", "--json", "digits/readme.txt").out)
    assert base64.b64decode(said.pop("base64")) == b"hello\n"
    assert said == {"path": "digits/readme.txt", "bytes": 6, "checksum": README_SUM}


def test_cat_of_a_folder_writes_nothing(deeplink: Deeplink) -> None:
    ended = deeplink("cat", "digits/readme.txt", "digits/train")
    assert (ended.code, ended.out) == (2, "")
    assert "is a folder" in ended.err


def in_shell(config: Config, words: str, into: str) -> str:
    """Return what a command says on standard error, and its exit code."""
    done = subprocess.run(
        ["bash", "-c", f"({sys.executable} -m deeplink {words}; echo code $? >&2) {into}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "DEEPLINK_CATALOG": str(config.catalog), "DEEPLINK_STORE": str(config.store)},
    )
    return done.stderr


@pytest.mark.parametrize("words", ["cat digits/readme.txt", "ls -R digits"])
def test_output_into_a_closed_pipe_is_no_failure(config: Config, words: str) -> None:
    assert in_shell(config, words, "| true") == "code 0\n"


@pytest.mark.parametrize("words", ["cat digits/readme.txt", "ls", "ls --help", "--help"])
def test_output_that_cannot_be_written_is_said_in_a_line(config: Config, words: str) -> None:
    said = in_shell(config, words, "> /dev/full").splitlines()
    assert said[0] == "deeplink: standard output: No space left on device"
    assert said[1:] == ["  Write to a place that has room, and run it again.", "code 1"]


# get


def below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_get_copies_one_sample_to_a_file_or_into_a_folder(deeplink: Deeplink, tmp_path: Path) -> None:
    assert deeplink("get", "digits/readme.txt", str(tmp_path / "new")).out == "1 file, 6 B\n"
    deeplink("get", "digits/readme.txt", str(tmp_path))
    deeplink("get", "digits/readme.txt", f"{tmp_path}/made/")
    deeplink("get", "digits/readme.txt", "other/one", str(tmp_path / "two"))
    deeplink("get", "other/one", str(tmp_path / "new"))
    assert below(tmp_path) == {
        "new": b"1", "readme.txt": b"hello\n", "made/readme.txt": b"hello\n", "two/readme.txt": b"hello\n",
        "two/one": b"1",
    }  # fmt: skip


def test_get_copies_folders(deeplink: Deeplink, tmp_path: Path) -> None:
    ended = deeplink("get", "-r", "digits", "--json", str(tmp_path / "all"))
    assert json.loads(ended.out) == {"files": 32, "bytes": sum(map(len, FILES.values())), "failed": {}}
    assert below(tmp_path / "all") == FILES
    deeplink("get", "-r", "digits/odd", str(tmp_path / "all"))  # into a folder that is there, as cp does
    deeplink("get", "-r", "digits/train", "digits/odd", str(tmp_path / "some"))
    assert below(tmp_path / "some") == {
        path: data for path, data in FILES.items() if path.startswith(("train/", "odd/"))
    }
    assert below(tmp_path / "all") == FILES


def test_get_says_what_it_would_do(deeplink: Deeplink, tmp_path: Path) -> None:
    said = json.loads(deeplink("get", "-r", "digits/odd", str(tmp_path / "x"), "--dry-run", "--json").out)
    assert said == {"files": 1, "bytes": 3, "targets": {f"{tmp_path}/x/[ä] ?.txt": "digits/odd/[ä] ?.txt"}}
    assert "would write 32 files" in deeplink("get", "-r", "digits", str(tmp_path / "x"), "--dry-run").out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["digits/odd", "x"], "is a folder\n  -r copies it"),
        (["digits/readme.txt", "digits/./x", "x"], "no such"),
        (["other/one", "other/sub/one", "x"], "both other/one and other/sub/one"),
        (["-r", "digits/test", "digits/train", "file"], "it is a file"),
        (["digits/none", "x"], "no such"),
        (["digits/readme.txt", "file/x"], "File exists"),
        (["digits/readme.txt", ""], "DEST is empty"),
    ],
)
def test_get_refuses_what_makes_no_sense(
    deeplink: Deeplink, tmp_path: Path, monkeypatch: Any, args: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    ended = deeplink("get", *args)
    assert ended.code == 2
    assert said in ended.err
    assert below(tmp_path) == {"file": b""}


def test_get_of_a_sample_named_twice_is_one_file(deeplink: Deeplink, tmp_path: Path, config: Config) -> None:
    version = Reader.open("other", config=config).version
    assert deeplink("get", "other/one", f"other@{version}/one", "other/one", f"{tmp_path}/").code == 0
    assert below(tmp_path) == {"one": b"1"}


def test_get_copies_what_can_be_had_and_names_the_rest(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    config = config_below(tmp_path)
    source = write_tree(tmp_path / "source", FILES)
    pack(str(source), "digits", config=config)
    index = Reader.open("digits", config=config).index
    lost = index.shards[0]
    Store(config.store).remove(lost.id)
    source.rename(tmp_path / "moved")
    ended = command_of(config, monkeypatch, capsys)("get", "-r", "digits", str(tmp_path / "out"))
    assert ended.code == 1
    assert f"{lost.samples} samples could not be read" in ended.err
    there = {index.key(row) for row in range(len(index)) if index.shard[row]}
    assert below(tmp_path / "out") == {path: FILES[path] for path in there}


# verify


def test_verify_reads_everything_here(deeplink: Deeplink, config: Config) -> None:
    shards = len(Reader.open("digits", config=config).index.shards)
    ended = deeplink("verify", "digits")
    assert ended.code == 0
    assert ended.out.count("head whole") == shards
    assert f"{shards} shards; every copy is read and right" in ended.out
    assert deeplink("verify", "digits", "--quick").out.count("head present") == shards
    assert f"{shards} copies read and right" in deeplink("verify", "digits", "--in-place").out
    assert deeplink("verify", "digits/train").code == 2
    assert deeplink("verify", "digits", "--quick", "--in-place").code == 2


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[tuple[Agents, Config]]:
    agents = Agents(tmp_path)
    for name in ("n0", "n1"):
        agents.start(name)
    config = agents.config(read_deadline_ms=2000)
    source = write_tree(tmp_path / "source", FILES)
    pack(str(source), "digits", config=config, members=agents.members, token=agents.token)
    source.rename(tmp_path / "moved")
    yield agents, config
    agents.stop_all()


def test_verify_names_the_samples_that_are_wrong_on_a_member(
    spread: tuple[Agents, Config], monkeypatch: Any, capsys: Any
) -> None:
    agents, config = spread
    deeplink = command_of(config, monkeypatch, capsys)
    assert format_members(agents.members) == load_config().members
    ended = deeplink("verify", "digits")
    assert ended.code == 0, ended.err
    index = Reader.open("digits", config=config).index
    assert ended.out.count("n0 whole, n1 whole") == len(index.shards)

    in_place = json.loads(deeplink("verify", "digits", "--in-place", "--json").out)
    assert (in_place["right"], in_place["copies"]) == (True, 2 * len(index.shards))

    row = next(row for row in range(len(index)) if index.lengths[row] > 4000)
    shard = index.shards[int(index.shard[row])]
    path = agents.stores[agents.members[1].name].path(shard.id)
    with path.open("r+b") as file:
        file.seek(int(index.block_offsets(int(index.shard[row]))[index.block[row]]) + int(index.offset[row]) + 7)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    ended = deeplink("verify", "digits", "--json")
    said = json.loads(ended.out)
    assert (ended.code, said["right"]) == (1, False)
    copies = {entry["shard"]: entry["copies"] for entry in said["shards"]}
    assert copies[shard.id]["n0"]["state"] == "whole"
    assert copies[shard.id]["n1"]["state"] == "wrong"
    assert copies[shard.id]["n1"]["wrong"] == [index.key(row)]
    assert all(
        copy["state"] == "whole" for name, each in copies.items() if name != shard.id for copy in each.values()
    )

    agents.stop("n0")
    ended = deeplink("verify", "digits", "--quick")
    assert ended.code == 1
    assert "not verified on n0" in ended.err
    assert "every copy that answered is there; 1 node did not answer" in ended.out


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone", "index"])
def test_verify_names_what_is_wrong_here(tmp_path: Path, monkeypatch: Any, capsys: Any, how: str) -> None:
    config = config_below(tmp_path)
    pack(str(write_tree(tmp_path / "source", FILES)), "digits", config=config)
    deeplink = command_of(config, monkeypatch, capsys)
    index = Reader.open("digits", config=config).index
    row = next(row for row in range(len(index)) if index.lengths[row] > 4000)
    number = int(index.shard[row])
    path = Store(config.store).path(index.shards[number].id)
    if how == "flipped":
        with path.open("r+b") as file:
            file.seek(int(index.block_offsets(number)[index.block[row]]) + int(index.offset[row]))
            file.write(bytes(10))
    elif how == "truncated":
        os.truncate(path, 8192)
    elif how == "gone":
        path.unlink()
    else:
        with index.path.open("r+b") as file:
            at = index.path.read_bytes().find(b"readme.txt")
            file.seek(at)
            file.write(b"README")
    ended = deeplink("verify", "digits")
    assert ended.code == 1
    expected = {
        "flipped": f"head: 1 sample ({index.key(row)!r}): the bytes have changed",
        "truncated": "its file has 8,192 bytes",
        "gone": "",
        "index": "its content is that of version",
    }
    assert expected[how] in ended.err
    assert ("no node holds it" in ended.out) == (how == "gone")
    assert ("`deeplink warm digits`" in ended.err) == (how != "index")
    assert (f"`deeplink index rebuild digits@{index.version}`" in ended.err) == (how == "index")
    if how != "index":
        assert f"1 of {len(index.shards)} shards not right" in ended.out
    assert deeplink("verify", "digits", "--quick").code == (1 if how in {"truncated", "gone"} else 0)
    ended = deeplink("verify", "digits", "--in-place")
    assert ended.code == 1
    assert {"gone": "no member holds it", "index": "its content is that of"}.get(how, "head: shard") in ended.err
    assert all(line.count("shard ") < 2 for line in ended.err.splitlines())
    assert ("`deeplink warm digits`" in ended.err) == (how != "index")


# Completion.


def completed(args: list[str], incomplete: str) -> list[str]:
    shell = ShellComplete(cli, {}, "deeplink", "_DEEPLINK_COMPLETE")
    return [item.value for item in shell.get_completions(args, incomplete)]


def test_the_shell_completes_places(deeplink: Deeplink, config: Config) -> None:
    version = Reader.open("digits", config=config).version
    assert completed(["ls"], "") == ["digits", "other"]
    assert completed(["info"], "di") == ["digits"]
    assert completed(["cat"], "digits/") == ["digits/odd/", "digits/readme.txt", "digits/test/", "digits/train/"]
    assert completed(["get", "-r"], "digits/t") == ["digits/test/", "digits/train/"]
    assert completed(["cat"], f"digits@{version}/odd/") == [f"digits@{version}/odd/[ä] ?.txt"]
    assert completed(["verify"], f"digits@{version[:3]}") == [f"digits@{version}"]
    assert completed(["ls"], "digits/none/") == []
    assert completed(["ls"], "none/x") == []
