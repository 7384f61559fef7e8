"""pandas and Hugging Face datasets read packed samples by `deeplink://`, knowing nothing of us."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.fs.library import ReadOnlyDatasetError
from tests.cache.agents import config_below, write_tree

if TYPE_CHECKING:
    from deeplink.core.config import Config

COLOURS = {"cat": (200, 0, 0), "dog": (0, 200, 0)}


def table(start: int, stop: int) -> bytes:
    data = io.BytesIO()
    numbers = list(range(start, stop))
    pq.write_table(pa.table({"number": numbers, "text": [f"text {number}" for number in numbers]}), data)
    return data.getvalue()


def picture(kind: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 4), COLOURS[kind]).save(data, "png")
    return data.getvalue()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A catalog with "pets" in it, that this process's environment names."""
    files = {
        "labels.csv": b"file,kind\n0,cat\n1,dog\n",
        "more.csv": b"file,kind\n2,cat\n",
        "packed.csv.gz": gzip.compress(b"a,b\n1,2\n"),
        "parts/0.parquet": table(0, 5),
        "parts/1.parquet": table(5, 9),
        **{f"train/{kind}/{number}.png": picture(kind) for number, kind in enumerate(["cat", "dog", "cat"])},
    }
    config = config_below(tmp_path)
    pack(str(write_tree(tmp_path / "pets", files)), "pets", config=config)
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "hf" / "downloads")
    return config


# pandas.


@pytest.mark.usefixtures("config")
def test_pandas_reads_tables() -> None:
    assert pd.read_csv("deeplink://pets/labels.csv")["kind"].tolist() == ["cat", "dog"]
    assert pd.read_csv("deeplink://pets/packed.csv.gz").to_dict("list") == {"a": [1], "b": [2]}
    one = pd.read_parquet("deeplink://pets/parts/1.parquet", columns=["number"])
    assert one["number"].tolist() == [5, 6, 7, 8]
    whole = pd.read_parquet("deeplink://pets/parts")
    assert whole["text"].tolist() == [f"text {number}" for number in range(9)]
    chunks = pd.read_csv("deeplink://pets/labels.csv", chunksize=1)
    assert [chunk["file"].tolist() for chunk in chunks] == [[0], [1]]


def test_pandas_reads_the_version_and_the_catalog_that_are_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "pets" / "labels.csv").write_text("file,kind\n9,owl\n")
    (old,) = (path.stem for path in (config.catalog / "pets").glob("*.arrow"))
    pack(str(tmp_path / "pets"), "pets", config=config)
    assert pd.read_csv("deeplink://pets/labels.csv")["kind"].tolist() == ["owl"]
    assert pd.read_csv(f"deeplink://pets@{old[:10]}/labels.csv")["kind"].tolist() == ["cat", "dog"]
    elsewhere = config_below(tmp_path / "elsewhere")
    pack(str(write_tree(tmp_path / "tree", {"labels.csv": b"kind\newt\n"})), "pets", config=elsewhere)
    found = pd.read_csv("deeplink://pets/labels.csv", storage_options={"config": elsewhere})
    assert found["kind"].tolist() == ["ewt"]


@pytest.mark.usefixtures("config")
def test_what_is_not_there_and_what_would_write_is_refused_as_pandas_users_expect() -> None:
    with pytest.raises(FileNotFoundError, match=r"pets/none\.csv"):
        pd.read_csv("deeplink://pets/none.csv")
    for write in (pd.DataFrame.to_csv, pd.DataFrame.to_parquet):
        with pytest.raises(ReadOnlyDatasetError):
            write(pd.DataFrame({"a": [1]}), "deeplink://pets/new")


# Hugging Face datasets.


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_tables(*, streaming: bool) -> None:
    found = datasets.load_dataset("csv", data_files="deeplink://pets/*.csv", streaming=streaming)
    assert [row["kind"] for row in found["train"]] == ["cat", "dog", "cat"]
    parts = {"train": "deeplink://pets/parts/0.parquet", "test": ["deeplink://pets/parts/1.parquet"]}
    found = datasets.load_dataset("parquet", data_files=parts, streaming=streaming)
    assert [row["number"] for split in ("train", "test") for row in found[split]] == list(range(9))


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_pictures_labelled_by_their_folders(*, streaming: bool) -> None:
    files = {"train": "deeplink://pets/train/**"}
    train = datasets.load_dataset("imagefolder", data_files=files, streaming=streaming)["train"]
    names = train.features["label"].names
    assert names == ["cat", "dog"]
    seen = [(names[row["label"]], row["image"].getpixel((0, 0))) for row in train]
    assert sorted(seen) == sorted((kind, COLOURS[kind]) for kind in ("cat", "dog", "cat"))


@pytest.mark.parametrize("how", ["version", "etag", "streaming"])
def test_datasets_sees_that_a_dataset_was_packed_anew(config: Config, tmp_path: Path, how: str) -> None:
    """By default it takes what it has once downloaded from a URL, from any storage, for what is there now."""
    options: dict[str, Any] = {"streaming": how == "streaming"}
    if how == "etag":
        options["download_config"] = datasets.DownloadConfig(use_etag=True)

    def kinds() -> list[str]:
        newest = f"@{Catalog(config.catalog).latest('pets')}" if how == "version" else ""
        url = f"deeplink://pets{newest}/labels.csv"
        return [row["kind"] for row in datasets.load_dataset("csv", data_files=url, **options)["train"]]

    assert kinds() == ["cat", "dog"]
    (tmp_path / "pets" / "labels.csv").write_text("file,kind\n0,cow\n1,dog\n")  # of the same length
    pack(str(tmp_path / "pets"), "pets", config=config)
    assert kinds() == ["cow", "dog"]


@pytest.mark.slow
def test_datasets_reads_with_several_processes(config: Config, tmp_path: Path) -> None:
    code = """
import datasets
parts = datasets.load_dataset("parquet", data_files="deeplink://pets/parts/*.parquet", num_proc=2)["train"]
assert sorted(parts["number"]) == list(range(9))
assert parts.map(lambda row: {"twice": 2 * row["number"]}, num_proc=2)["twice"] == [2 * n for n in parts["number"]]
"""
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
