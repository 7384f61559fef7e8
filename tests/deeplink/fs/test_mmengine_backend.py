"""The backend under the real mmengine: its file functions, its configs, its BaseDataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmengine
import numpy as np
import pytest
from mmengine import fileio
from mmengine.config import Config as MMConfig
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from torch.utils.data import DataLoader

from deeplink.cache.packer import pack
from deeplink.fs.library import DatasetNotFoundError, IsFolderError, ReadOnlyDatasetError
from deeplink.fs.mmengine_backend import DeepLinkBackend
from tests.cache.agents import config_below, write_tree
from tests.pickled import copied

if TYPE_CHECKING:
    from deeplink.core.config import Config

FILES = {
    "annotations.json": json.dumps(
        {
            "metainfo": {"classes": ["a", "b"]},
            "data_list": [{"img_path": f"{'ab'[i % 2]}/{i}.bin", "label": i % 2} for i in range(6)],
        }
    ).encode(),
    **{f"images/{'ab'[i % 2]}/{i}.bin": bytes([i]) * (i + 1) for i in range(6)},
    "images/.hidden": b"",
    "notes/ü.txt": "Grüße".encode(),
}
CONFIG = """
custom_imports = dict(imports=["deeplink.fs.mmengine_backend"], allow_failed_imports=False)
backend_args = dict(backend="deeplink")
mapped = dict(backend="deeplink", path_mapping={"data/coco/": "deeplink://coco/"})
dataset = dict(
    type="PackedBytes",
    data_root="deeplink://coco/",
    ann_file="annotations.json",
    data_prefix=dict(img_path="images/"),
    backend_args=backend_args,
)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    base = tmp_path_factory.mktemp("mmengine")
    config = config_below(base)
    pack(str(write_tree(base / "tree", FILES)), "coco", config=config)
    return config


@pytest.fixture(autouse=True)
def _environment(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    # mmengine keeps one backend for the life of the process.
    monkeypatch.setattr(mmengine.fileio.io, "backend_instances", {})


@pytest.fixture
def backend(config: Config) -> DeepLinkBackend:
    return DeepLinkBackend(config=config)


@DATASETS.register_module()
class PackedBytes(BaseDataset):  # type: ignore[misc]
    """A dataset as OpenMMLab's are: annotations by one call of fileio, images by another for each."""

    def __init__(self, *, backend_args: dict[str, Any], **options: Any) -> None:
        self.backend_args = backend_args
        super().__init__(**options)

    def prepare_data(self, idx: int) -> dict[str, Any]:
        facts: dict[str, Any] = self.get_data_info(idx)
        facts["data"] = fileio.get(facts["img_path"], backend_args=self.backend_args)
        return facts


def test_mmengine_finds_the_backend_by_prefix_and_by_name() -> None:
    assert isinstance(fileio.get_file_backend("deeplink://coco/x"), DeepLinkBackend)
    assert isinstance(fileio.get_file_backend(backend_args={"backend": "deeplink"}), DeepLinkBackend)
    assert fileio.get("deeplink://coco/images/a/2.bin") == b"\2\2\2"
    assert fileio.get_text("deeplink://coco/notes/ü.txt") == "Grüße"
    assert fileio.exists("deeplink://coco/images")
    assert fileio.isdir("deeplink://coco/images")
    assert fileio.isfile("deeplink://coco/annotations.json")
    assert not fileio.exists("deeplink://coco/none")
    assert fileio.load("deeplink://coco/annotations.json")["metainfo"] == {"classes": ["a", "b"]}
    assert mmengine.list_from_file("deeplink://coco/notes/ü.txt") == ["Grüße"]


def test_paths_are_mapped_and_joined(config: Config) -> None:
    mapping = {"data/": "deeplink://other/", "data/coco": "deeplink://coco"}
    backend = DeepLinkBackend(mapping, config=config)
    assert backend.get("data/coco/images/a/0.bin") == b"\0"
    assert backend.get(Path("data/coco/images/a/0.bin")) == b"\0"
    assert backend.get(Path("deeplink://coco/images/a/0.bin")) == b"\0"  # pathlib leaves one slash
    with pytest.raises(DatasetNotFoundError, match="other"):
        backend.get("data/elsewhere")
    joined = backend.join_path("deeplink://coco/", "images", "/a/", "0.bin")
    assert joined == "deeplink://coco/images/a/0.bin"
    assert backend.isfile(joined)


def test_what_is_not_there_or_no_file_is_an_error(backend: DeepLinkBackend) -> None:
    with pytest.raises(FileNotFoundError):
        backend.get("deeplink://coco/none")
    with pytest.raises(IsFolderError):
        backend.get("deeplink://coco/images")
    assert (backend.isdir("deeplink://none"), backend.isfile("deeplink://none/x")) == (False, False)


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"list_dir": False}, {"list_file": False}, {"list_dir": False, "suffix": (".bin", ".txt")}],
    ids=str,
)
def test_folders_are_listed_as_local_ones_are(
    backend: DeepLinkBackend, config: Config, wanted: dict[str, Any], recursive: bool
) -> None:
    local = fileio.LocalBackend()
    for folder in ("", "images", "images/a"):
        here = str(config.catalog.parent / "tree" / folder)
        expected = sorted(local.list_dir_or_file(here, recursive=recursive, **wanted))
        found = backend.list_dir_or_file(f"deeplink://coco/{folder}", recursive=recursive, **wanted)
        assert sorted(found) == expected


def test_wrong_wishes_for_a_list_are_refused(backend: DeepLinkBackend) -> None:
    with pytest.raises(TypeError, match="should be None"):
        backend.list_dir_or_file("deeplink://coco", suffix=".bin")
    with pytest.raises(TypeError, match="string or tuple"):
        backend.list_dir_or_file("deeplink://coco", list_dir=False, suffix=[".bin"])  # type: ignore[arg-type]
    with pytest.raises(DatasetNotFoundError, match="no folder"):
        backend.list_dir_or_file("deeplink://coco/annotations.json")


def test_local_copies(backend: DeepLinkBackend, tmp_path: Path) -> None:
    with backend.get_local_path("deeplink://coco/images/b/3.bin") as path:
        assert Path(path).read_bytes() == FILES["images/b/3.bin"]
        assert path.endswith(".bin")
    assert not Path(path).exists()
    with fileio.get_local_path("deeplink://coco/images/b/3.bin") as path:
        assert Path(path).read_bytes() == FILES["images/b/3.bin"]
    assert backend.copyfile_to_local("deeplink://coco/images/b/3.bin", tmp_path) == str(tmp_path / "3.bin")
    by_name = {"backend": "deeplink"}
    fileio.copyfile_to_local("deeplink://coco/images/b/3.bin", str(tmp_path / "named"), backend_args=by_name)
    assert (tmp_path / "named").read_bytes() == (tmp_path / "3.bin").read_bytes() == FILES["images/b/3.bin"]
    backend.copytree_to_local("deeplink://coco/images/a", tmp_path / "tree")
    assert sorted(path.name for path in (tmp_path / "tree").iterdir()) == ["0.bin", "2.bin", "4.bin"]
    with pytest.raises(FileExistsError):
        backend.copytree_to_local("deeplink://coco/images/a", tmp_path / "tree")


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("put", [b"", "deeplink://coco/new"]),
        ("put_text", ["", "deeplink://coco/new"]),
        ("copyfile", ["deeplink://coco/a", "deeplink://coco/b"]),
        ("copytree", ["deeplink://coco/a", "deeplink://coco/b"]),
        ("copyfile_from_local", ["/etc/hostname", "deeplink://coco/b"]),
        ("copytree_from_local", ["/etc", "deeplink://coco/b"]),
        ("remove", ["deeplink://coco/annotations.json"]),
        ("rmtree", ["deeplink://coco/images"]),
        ("copy_if_symlink_fails", ["deeplink://coco/a", "deeplink://coco/b"]),
    ],
)
def test_whatever_writes_is_refused(backend: DeepLinkBackend, call: str, args: list[Any]) -> None:
    with pytest.raises(ReadOnlyDatasetError):
        getattr(backend, call)(*args)
    with pytest.raises(ReadOnlyDatasetError):
        getattr(fileio, call)(*args)


def _data(item: Any) -> bytes:
    data: bytes = item["data"]
    return data


def test_a_dataset_of_a_config_file_reads_packed_samples(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    config = MMConfig.fromfile(tmp_path / "config.py")
    assert fileio.get("data/coco/images/a/0.bin", backend_args=config.mapped) == b"\0"
    dataset: Any = DATASETS.build(config.dataset)
    assert len(dataset) == 6
    for i in range(6):
        facts = dataset[i]
        assert facts["data"] == bytes([i]) * (i + 1)
        assert facts["label"] == i % 2
    loader = DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=_data)
    assert list(loader) == [bytes([i]) * (i + 1) for i in range(6)]


def test_a_copy_in_another_process_reads_the_same_version(backend: DeepLinkBackend) -> None:
    copy = copied(backend)
    data = np.frombuffer(copy.get("deeplink://coco/images/b/5.bin"), np.uint8)
    assert data.tolist() == [5] * 6
