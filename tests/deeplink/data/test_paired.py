"""Grouped datasets whose columns lie in folders of their own, and those with a table of annotations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils import data as torch_data

import deeplink
from deeplink.cache.errors import KeyMissingError
from deeplink.cache.packer import pack
from deeplink.core.config import Config
from deeplink.data import DatasetError, ResumableSampler
from tests.pickled import copied

COUNT = 24
PAIRED = {"image": "img/*.jpg;img/*.jpeg", "mask": "/mask/*.seg.png"}


def names(number: int) -> tuple[str, str]:
    """Return the files of a sample: folders with a dot and a letter of two bytes, extensions in capitals."""
    below = ("a", "b.c", "ü")[number % 3]
    return f"img/{below}/{number}.{('jpg', 'JPG', 'jpeg')[number // 3 % 3]}", f"mask/{below}/{number}.seg.png"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    base = tmp_path_factory.mktemp("paired")
    files: dict[str, bytes] = {
        "train/img/readme.md": b"",
        "train/mask/only.seg.png": b"only",
        "train/x/1.jpg": b"",
    }
    table, lines = ["file_name,note,size"], []
    for number in range(COUNT):
        for name in names(number):
            files[f"train/{name}"] = name.encode()
        table.append(f'{names(number)[0]},"a, ""{number}""",{number}')
        lines.append(json.dumps({"file_name": f"../{names(number)[0]}", "boxes": [[number, 1]]}))
    files["train/labels.csv"] = ("\ufeff" + "\r\n".join(table)).encode()
    files["train/labels.tsv"] = "\n".join(
        line.replace(",", "\t", 1).replace(",", "\t") for line in table[:1]
    ).encode()
    files["train/img/a/some.jsonl"] = (
        "\n".join(
            json.dumps({"file_name": f"{n}.{('jpg', 'JPG', 'jpeg')[n // 3 % 3]}", "n": n}) for n in (0, 3, 6)
        )
        + "\n\n"
    ).encode()
    files["train/twice.jsonl"] = b"".join(json.dumps({"file_name": name}).encode() + b"\n" for name in names(0))
    files["train/wrong.csv"] = b"file_name,a\nimg/no.jpg,1\n"
    files["train/nameless.csv"] = b"name,a\nx,1\n"
    files["train/broken.jsonl"] = b'{"file_name": "img/a/0.jpg"}\n{"file_name": '
    files["train/long.csv"] = b"file_name,a\nimg/a/0.jpg,1,2,3\n"
    for name, data in files.items():
        path = base / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    config = Config(catalog=base / "catalog", store=base / "store", state=base / "state", node="n0")
    pack(str(base / "tree"), "pairs", config=config)
    return config


def paired(config: Config, columns: Any = PAIRED, **more: Any) -> deeplink.GroupedDataset:
    return deeplink.GroupedDataset(
        "pairs", columns, **{"root": "train", "missing": "skip", "config": config, **more}
    )


def test_files_of_one_name_in_two_folders_are_one_sample(config: Config) -> None:
    dataset = paired(config)
    assert len(dataset) == COUNT
    keys = [dataset.key(i) for i in range(COUNT)]
    assert keys == sorted(keys, key=str.encode) == [item["__key__"] for item in dataset.__getitems__(range(COUNT))]
    for number in range(COUNT):
        image, mask = names(number)
        item = dataset[dataset.index(f"{('a', 'b.c', 'ü')[number % 3]}/{number}")]
        assert (item["image"], item["mask"]) == (image.encode(), mask.encode())
    assert copied(dataset.subset([5, 2]))[1] == dataset[2]
    with pytest.raises(DatasetError, match="no sample 'a/1'"):
        dataset.index("a/1")


def test_a_file_without_its_counterpart_is_as_missing_says(config: Config) -> None:
    with pytest.raises(DatasetError, match="1 samples have no file for column 'image': 'only'"):
        paired(config, missing="error")
    whole = paired(config, missing="none")
    only = whole[whole.index("only")]
    assert (len(whole), only) == (COUNT + 1, {"__key__": "only", "image": None, "mask": b"only"})
    with pytest.raises(DatasetError, match="no sample has 'mask'"):
        paired(config, {"mask": "x/*.png"})


@pytest.mark.parametrize(
    "columns",
    [
        {"a": "img/*.jpg", "b": "png"},
        ["img/jpg"],
        ["*.jpg"],
        ["/*.jpg"],
        ["img/*."],
        ["img/*/0.jpg"],
        ["i*/*.jpg"],
    ],
)
def test_columns_that_make_no_sense_are_refused(config: Config, columns: Any) -> None:
    with pytest.raises(ValueError, match="column"):
        paired(config, columns)


def _batch_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return items


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_each_sample_comes_once_with_its_annotation(config: Config, options: dict[str, Any]) -> None:
    dataset = paired(config, annotations="labels.csv")
    sampler = ResumableSampler(dataset, batch_size=7)
    loader = torch_data.DataLoader(dataset, batch_sampler=sampler, collate_fn=_batch_of, **options)
    seen = {}
    for batch in loader:
        seen.update({item["image"].decode(): item["annotation"] for item in batch})
        sampler.finished()
    assert seen == {names(n)[0]: {"note": f'a, "{n}"', "size": str(n)} for n in range(COUNT)}


def test_a_table_lies_where_its_names_begin_and_lacks_what_it_lacks(config: Config) -> None:
    some = paired(config, annotations="img/a/some.jsonl")
    assert [(item["__key__"], item["annotation"]) for item in some.__getitems__(range(len(some)))] == [
        (f"a/{n}", {"n": n}) for n in (0, 3, 6)
    ]
    some[0]["annotation"]["n"] = 99  # an item is the caller's
    assert some[0]["annotation"] == {"n": 0}
    assert some.subset([2])[0]["annotation"] == {"n": 6}
    whole = paired(config, annotations="img/a/some.jsonl", missing="none")
    assert sum(whole[i]["annotation"] is None for i in range(len(whole))) == COUNT + 1 - 3
    flat = deeplink.GroupedDataset(
        "pairs", ["jpg"], root="train/img/a", annotations="some.jsonl", missing="skip", config=config
    )
    assert [flat[i]["annotation"]["n"] for i in range(len(flat))] == [0, 3]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("twice.jsonl", "two rows are about the sample of"),
        ("wrong.csv", "name 'img/no.jpg', and 'train/img/no.jpg' is no file of a sample"),
        ("nameless.csv", "row 1 has no 'file_name'"),
        ("broken.jsonl", "behind row 1: "),
        ("long.csv", "its file_name is"),
        ("img/a/some.jsonl", "21 samples have no annotation: "),
        ("labels.tsv", "24 samples have no annotation: "),
    ],
)
def test_annotations_that_cannot_be_used_are_refused(config: Config, file: str, said: str) -> None:
    columns = {"image": PAIRED["image"]} if file != "twice.jsonl" else PAIRED
    strict = {"missing": "error"} if file != "twice.jsonl" else {}
    with pytest.raises(DatasetError, match="annotation") as refused:
        paired(config, columns, annotations=file, **strict)
    assert said in str(refused.value)


def test_annotations_of_no_known_kind_or_place_are_refused(config: Config) -> None:
    with pytest.raises(ValueError, match=r"csv, \.tsv, \.jsonl"):
        paired(config, annotations="labels.json")
    with pytest.raises(ValueError, match="'annotation' is what"):
        paired(config, {"annotation": "img/*.jpg"}, annotations="labels.csv")
    with pytest.raises(KeyMissingError, match=r"train/no\.csv"):
        paired(config, annotations="no.csv")
    with pytest.raises(DatasetError, match="about none of its samples"):
        paired(config, annotations="wrong.csv")
