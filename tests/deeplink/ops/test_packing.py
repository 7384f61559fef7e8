from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deeplink
from deeplink.cache.errors import CatalogError, SourceError
from deeplink.cache.reader import Reader
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from tests.cache.agents import Agents, config_below, make_tar, write_tree


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_below(tmp_path)


def contents(name: str, config: Config) -> dict[str, bytes]:
    with Reader.open(name, config=config) as reader:
        data = [bytes(view) for view in reader.read(range(len(reader)))]
        return dict(zip(reader.index.keys(), data, strict=True))


def shuffled(count: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(3)  # noqa: S311 - test data
    for number in rng.sample(range(count), count):
        yield f"a/{number:05d}.bin", rng.randbytes(number * 37 % 5_000)


def test_an_iterable_in_any_order_is_packed_and_placed_by_members(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = deeplink.pack(shuffled(300), "it", config=config)
    assert contents("it", config) == dict(shuffled(300))
    assert (result.files, result.shards > 1) == (300, True)
    assert "has no source" in caplog.text
    agents = Agents(tmp_path)
    for name in ("n0", "n1"):
        agents.start(name)
    there = agents.config(replicas=2)
    caplog.clear()
    spread = deeplink.pack(shuffled(300), "it", config=there, home=str(tmp_path / "home"))
    assert contents("it", there) == dict(shuffled(300))
    agents.stop_all()
    assert spread.short == 0
    assert "has no source" not in caplog.text
    assert not list(config.store.glob("tmp*"))


def test_what_was_an_iterable_cannot_be_read_again_and_says_so(config: Config, tmp_path: Path) -> None:
    result = deeplink.pack({"x": b"1"}.items(), "it", config=config)
    for path in config.store.glob("*.mdb"):
        path.unlink()
    with Reader.open("it", config=config) as reader, pytest.raises(DeepLinkError) as lost:
        reader.read([0])
    assert "cannot be read again" in str(lost.value)
    with pytest.raises(SourceError, match="for files"):
        deeplink.pack(shuffled(3), "it", config=config, append=True)
    home = str(tmp_path / "home")
    assert deeplink.pack({"x": b"1"}.items(), "it", config=config, home=home).version != result.version
    for path in config.store.glob("*.mdb"):
        path.unlink()
    assert contents("it", config) == {"x": b"1"}


def test_mappings_are_samples_of_several_parts(config: Config) -> None:
    rows = [{"id": 5, "text": "é", "label": 3, "none": None}, {"id": 6, "text": "", "label": [1, 2]}]
    deeplink.pack(rows, "rows", key="id", config=config)
    expected = {"5.label": b"3", "5.text": "é".encode(), "6.label": b"[1,2]", "6.text": b""}
    assert contents("rows", config) == expected
    deeplink.pack([("a", {"jpg": b"1", "cls": 7})], "parts", config=config)
    assert contents("parts", config) == {"a.cls": b"7", "a.jpg": b"1"}
    deeplink.pack(rows, "numbered", columns=["text"], config=config)
    assert contents("numbered", config) == {"00000000.text": "é".encode(), "00000001.text": b""}


def test_buffers_are_taken_whole_whatever_their_elements_are(config: Config) -> None:
    numbers = np.arange(6, dtype="f4").reshape(2, 3)
    deeplink.pack([("a", numbers.data), ("b", numbers.T.data), ("c", {"n": np.int64(7)})], "it", config=config)
    assert contents("it", config) == {"a": numbers.tobytes(), "b": numbers.T.tobytes(), "c.n": b"7"}


def test_a_home_is_named_so_that_others_find_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deeplink.pack([("a", b"1")], "it", config=config, home="packed").home == str(tmp_path / "packed")


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "no samples"),
        ([b"bare"], "neither"),
        ([("same", b"1"), ("same", b"2")], "twice"),
        ([("../up", b"1")], "cannot be packed"),
        ([{"other": 1}], "has no 'id'"),
        ([("a", np.zeros((100, 100)))], "a is a ndarray, of which no bytes are known"),
        ([("a", {"x": [object()]})], "a.x is a list, of which no bytes are known"),
    ],
)
def test_an_iterable_that_cannot_be_packed_is_refused(config: Config, items: list[Any], said: str) -> None:
    with pytest.raises(SourceError, match=said):
        deeplink.pack(items, "it", key="id", config=config)
    assert not (config.catalog / "it").exists()


def test_a_hugging_face_dataset_is_packed_as_its_bytes_are_stored(config: Config, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    image = b"\x89PNG not really"
    on_disk = tmp_path / "b.png"
    on_disk.write_bytes(b"on disk")
    rows = {"image": [{"bytes": image, "path": None}, {"bytes": None, "path": str(on_disk)}], "label": [1, 0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict(rows, features=features)
    deeplink.pack(made, "hf", config=config)
    expected = {
        "00000000.image": image,
        "00000000.label": b"1",
        "00000001.image": b"on disk",
        "00000001.label": b"0",
    }
    assert contents("hf", config) == expected
    deeplink.pack(made.to_iterable_dataset(), "streamed", config=config)
    assert contents("streamed", config) == expected
    with pytest.raises(SourceError, match="neither"):
        deeplink.pack(datasets.DatasetDict({"train": made}), "splits", config=config)


def test_a_folder_is_packed_as_the_command_does(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree = write_tree(tmp_path / "tree", {"a.jpg": b"1", "b.txt": b"2", ".git/x": b"3"})
    result = deeplink.pack(tree, "tree", include=["*.jpg"], config=config)
    assert contents("tree", config) == {"a.jpg": b"1"}
    assert result.left_out == {".git": 1, "(not --include)": 1}
    with pytest.raises(CatalogError, match="name would move"):
        deeplink.pack(shuffled(2), "tree", config=config)
    assert deeplink.pack(shuffled(2), "tree", config=config, replace=True).files == 2


def test_what_is_one_sample_in_tars_and_tables_is_one_to_a_grouped_dataset(config: Config, tmp_path: Path) -> None:
    for number in range(2):
        names = [(sample, part) for sample in range(5) for part in ("jpg", "cls")]
        files = {f"{sample:03d}.{part}": f"{number}{sample}{part}".encode() for sample, part in names}
        make_tar(tmp_path / f"t-{number}.tar", files)
    deeplink.pack(f"{tmp_path}/t-*.tar", "tars", config=config)
    tars = deeplink.GroupedDataset("tars", ["jpg", "cls"], config=config)
    assert len(tars) == 10
    assert tars[6] == {"__key__": "t-1/001", "jpg": b"11jpg", "cls": b"11cls"}
    deeplink.pack([{"image": b"i", "label": 3}, {"image": b"j", "label": 4}], "rows", config=config)
    rows = deeplink.GroupedDataset("rows", ["image", "label"], config=config)
    assert [rows[row]["label"] for row in range(2)] == [b"3", b"4"]
