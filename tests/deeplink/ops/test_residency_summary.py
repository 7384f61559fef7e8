"""What commands learn of where a dataset lies is kept beside its index."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.replicate.residency import HeldSummary, UnknownHoldingError, held
from deeplink.cli import main
from deeplink.core.types import NodeName
from deeplink.ops.inventory import note_placed
from tests.cache.agents import small_files, write_tree

Command = Callable[..., int | str | None]


@pytest.fixture
def deeplink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in {"CATALOG": "catalog", "STORE": "store", "STATE": "state"}.items():
        monkeypatch.setenv(f"DEEPLINK_{name}", str(tmp_path / folder))
    monkeypatch.setenv("DEEPLINK_NODE", "here")
    monkeypatch.setenv("DEEPLINK_CONFIG", "/dev/null")
    write_tree(tmp_path / "source", small_files(20))

    def run(*args: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["deeplink", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return run


def summary(folder: Path) -> HeldSummary:
    return held(folder / "catalog", "images", unix=0.0, old_s=1e12)


def forget(folder: Path) -> None:
    (path,) = (folder / "catalog" / "images").glob("*.held")
    path.unlink()


def test_pack_warm_verify_and_evict_keep_what_they_learn(deeplink: Command, tmp_path: Path) -> None:
    assert deeplink("pack", str(tmp_path / "source"), "images") == 0
    packed = summary(tmp_path)
    assert packed.bytes == {"here": packed.total}
    assert packed.total > 0
    for words in (
        ("warm", "images"),
        ("warm", "images", "--dry-run"),
        ("verify", "images"),
        ("verify", "images", "--in-place"),
    ):
        forget(tmp_path)
        assert deeplink(*words) == 0
        assert summary(tmp_path) == packed
    assert deeplink("evict", "images", "--dry-run") == 0
    assert summary(tmp_path) == packed
    assert deeplink("evict", "images") == 0
    assert summary(tmp_path).bytes == {"here": 0}


def test_a_version_that_goes_takes_its_note_along(deeplink: Command, tmp_path: Path) -> None:
    deeplink("pack", str(tmp_path / "source"), "images")
    catalog = Catalog(tmp_path / "catalog")
    catalog.remove("images", catalog.latest("images"), now=True)
    assert not list((tmp_path / "catalog" / "images").glob("*.held"))
    with pytest.raises(UnknownHoldingError):
        summary(tmp_path)


def test_a_catalog_that_takes_no_writes_costs_the_note_alone(
    deeplink: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deeplink("pack", str(tmp_path / "source"), "images")
    catalog = Catalog(tmp_path / "catalog")
    index = catalog.open("images")

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("deeplink.cache.replicate.residency.write_unsynced", refuse)
    with caplog.at_level(logging.INFO):
        note_placed(catalog.root, "images", index, {entry.id: [NodeName("n1")] for entry in index.shards})
    assert "could not be noted" in caplog.text
    assert summary(tmp_path).bytes.keys() == {"here"}
