"""Every Python block of docs/reading.md is run as it stands there."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmengine
import pytest
from PIL import Image

from deeplink.cache.packer import pack
from tests.cache.agents import config_below, write_tree

if TYPE_CHECKING:
    from deeplink.core.config import Config

GUIDE = Path(__file__).parents[3] / "docs" / "reading.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
SAID = [
    "['pets']",
    "2 ['file', 'kind']",
    "pets/train/cat/0.jpg (2, 2)",
    '2 train/cat/0 b\'{"kind": "cat"}\'',
    "",
    "file,kind",
    "6 4 0 0.0",
]


def picture(kind: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (2, 2)).save(data, kind)
    return data.getvalue()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    base = tmp_path_factory.mktemp("guide")
    files = {"labels.csv": b"file,kind\n0,cat\n1,dog\n", "train/cat/0.seg.png": picture("png")}
    for number, kind in enumerate(("cat", "dog")):
        files[f"train/{kind}/{number}.jpg"] = picture("jpeg")
        files[f"train/{kind}/{number}.json"] = json.dumps({"kind": kind}).encode()
    config = config_below(base)
    pack(str(write_tree(base / "tree", files)), "pets", config=config)
    return config


def test_there_is_something_expected_of_each_block() -> None:
    assert len(BLOCKS) == len(SAID)


@pytest.mark.parametrize("number", range(len(SAID)))
def test_the_guides_examples_run(number: int, config: Config, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    monkeypatch.setattr(mmengine.fileio.io, "backend_instances", {})  # it keeps one for the life of the process
    names: dict[str, Any] = {}
    exec(BLOCKS[number], names)  # noqa: S102 - our own document
    assert capsys.readouterr().out.startswith(SAID[number])
    if "custom_imports" in names:
        assert names["custom_imports"]["imports"] == ["deeplink.fs.mmengine_backend"]
    if "loose" in names:
        assert len(names["loose"]) == 2
