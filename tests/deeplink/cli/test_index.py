"""`deeplink index`: what it says, what it makes again, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.format.index_format import FORMAT
from deeplink.cache.reader import Reader
from deeplink.core.config import load_config
from deeplink.core.types import Version
from tests.cache.agents import small_files, write_tree
from tests.deeplink.cli.test_pack import Deeplink


@pytest.fixture
def deeplink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Deeplink:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CATALOG", "STORE", "STATE"):
        monkeypatch.setenv(f"DEEPLINK_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("DEEPLINK_NODE", "here")
    monkeypatch.setenv("DEEPLINK_CONFIG", "/dev/null")
    return Deeplink(monkeypatch, capsys)


@pytest.fixture
def packed(deeplink: Deeplink, tmp_path: Path) -> Version:
    """Return the version of dataset `digits`: 30 files in train and test."""
    write_tree(tmp_path / "source", small_files(30))
    assert deeplink("pack", str(tmp_path / "source"), "digits", "--here").code == 0
    return Catalog(load_config().catalog).latest("digits")


def index_file(version: Version) -> Path:
    return Catalog(load_config().catalog).path("digits", version)


def test_show_says_what_a_version_is_made_of(deeplink: Deeplink, packed: Version, tmp_path: Path) -> None:
    facts = json.loads(deeplink("index", "show", "digits", "--json").out)
    files = small_files(30)
    assert (facts["version"], facts["samples"], facts["format"]) == (packed, 30, FORMAT)
    assert facts["bytes"] == sum(map(len, files.values()))
    assert facts["source"] == str(tmp_path / "source")
    assert facts["index_bytes"] == index_file(packed).stat().st_size
    assert facts["folders"] == {
        "test": sum(key.startswith("test/") for key in files),
        "train": sum(key.startswith("train/") for key in files),
    }
    said = deeplink("index", "show", f"digits@{packed[:6]}").out
    assert packed in said
    assert "30, " in said
    assert "test/" in said


def test_what_a_folder_is_called_does_not_reach_the_terminal(deeplink: Deeplink, tmp_path: Path) -> None:
    write_tree(tmp_path / "source", {"a\x1b[31m/x": b"x"})
    assert deeplink("pack", str(tmp_path / "source"), "odd", "--here").code == 0
    for words in (("index", "show", "odd"), ("get", "-r", "--dry-run", "odd", str(tmp_path / "out"))):
        said = deeplink(*words).out
        assert "a\\x1b[31m" in said
        assert "\x1b" not in said


def test_a_damaged_index_is_found_and_made_again(deeplink: Deeplink, packed: Version) -> None:
    path = index_file(packed)
    good = path.read_bytes()
    assert deeplink("index", "verify", "digits").out == f"digits@{packed}: whole\n"
    path.write_bytes(good[:-100] + bytes(100))
    ended = deeplink("index", "verify", "digits", "--all", "--json")
    assert ended.code == 1
    (found,) = json.loads(ended.out)["versions"]
    assert found["version"] == packed
    assert found["problem"]
    assert "rebuild" in deeplink("index", "verify", "digits").err
    would = deeplink("index", "rebuild", "digits", "--dry-run")
    assert (would.code, "would be made again, byte for byte as it was: 30 samples" in would.out) == (0, True)
    assert path.read_bytes() != good
    done = json.loads(deeplink("index", "rebuild", f"digits@{packed[:4]}", "--json").out)
    assert done["restored"] is True
    assert path.read_bytes() == good


def test_an_index_is_rebuilt_from_another_folder(deeplink: Deeplink, packed: Version, tmp_path: Path) -> None:
    path = index_file(packed)
    good = path.read_bytes()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    path.unlink()
    nothing = deeplink("index", "rebuild", "digits")
    assert nothing.code == 1
    assert "--from" in nothing.err
    assert f"`deeplink index rebuild digits@{packed}`" in deeplink("index", "show", "digits").err
    made = deeplink("index", "rebuild", "digits", "--from", str(tmp_path / "elsewhere"))
    assert (made.code, "is made again, byte for byte as it was" in made.out) == (0, True)
    assert path.read_bytes() == good


def test_shards_alone_make_a_dataset(deeplink: Deeplink, packed: Version, tmp_path: Path) -> None:
    unsaid = deeplink("index", "rebuild", "again", "--all")
    assert (unsaid.code, "--source" in unsaid.err) == (2, True)
    unknown = deeplink("index", "rebuild", "again", "--source", "/x")
    assert (unknown.code, "--shard" in unknown.err) == (2, True)
    made = deeplink("index", "rebuild", "again", "--all", "--source", str(tmp_path / "source"))
    assert (made.code, "is made as a new version" in made.out) == (0, True)
    with Reader.open("again") as reader:
        assert len(reader.read(range(30))) == 30
        assert reader.version == packed  # of the same shards and source


def test_a_version_is_removed_but_not_the_newest_of_several(
    deeplink: Deeplink, packed: Version, tmp_path: Path
) -> None:
    (tmp_path / "source" / "new").write_bytes(b"new")
    assert deeplink("pack", str(tmp_path / "source"), "digits", "--here").code == 0
    newest = Catalog(load_config().catalog).latest("digits")
    refused = deeplink("index", "rm", f"digits@{newest}")
    assert (refused.code, "newest" in refused.err) == (2, True)
    assert deeplink("index", "rm", f"digits@{packed}", "--dry-run").code == 0
    assert index_file(packed).exists()
    assert json.loads(deeplink("index", "rm", f"digits@{packed}", "--json").out)["removed"] is True
    assert not index_file(packed).exists()
    gone = deeplink("index", "show", f"digits@{packed}")
    assert (gone.code, packed in gone.err) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("show", "digits/a"),
        ("show", ""),
        ("show", "../x"),
        ("rm", "digits"),
        ("rebuild", "digits", "--all", "--shard", "0" * 40),
        ("rebuild", "digits@zz"),
        ("rebuild", "digits", "--from", "/nonexistent"),
        ("verify", "nothing"),
    ],
)
@pytest.mark.usefixtures("packed")
def test_wrong_usage_is_2(deeplink: Deeplink, words: tuple[str, ...]) -> None:
    assert deeplink("index", *words).code == 2


def test_a_bad_shard_name_is_no_path(deeplink: Deeplink, packed: Version) -> None:
    ended = deeplink("index", "rebuild", "digits", "--shard", "../../etc/passwd")
    assert (ended.code, "--quick --json" in ended.err) == (2, True)
    assert index_file(packed).exists()


@pytest.mark.parametrize("pointer", ["", "rubbish\n", "\xff\n"])
def test_what_says_which_is_the_newest_comes_back(deeplink: Deeplink, packed: Version, pointer: str) -> None:
    latest = index_file(packed).with_name("latest")
    latest.write_bytes(pointer.encode("latin-1")) if pointer else latest.unlink()
    ended = deeplink("index", "show", "digits")
    assert ended.code != 0
    assert "which version of 'digits' is the newest" in ended.err
    assert f"`deeplink index rebuild digits@{packed}` records it again" in ended.err
    assert deeplink("index", "rebuild", f"digits@{packed}").code == 0
    assert deeplink("index", "show", "digits").code == 0


def test_nothing_to_rebuild_is_no_dataset(deeplink: Deeplink) -> None:
    ended = deeplink("index", "rebuild", "nothere")
    assert (ended.code, "has no dataset 'nothere'" in ended.err) == (2, True)


def test_a_version_that_is_not_there_is_answered_with_those_that_are(deeplink: Deeplink, packed: Version) -> None:
    assert f"newest last: {packed}." in deeplink("index", "show", "digits@0000").err
    index_file(packed).unlink()
    assert f"`deeplink index rebuild digits@{packed}`" in deeplink("index", "show", f"digits@{packed[:4]}").err
