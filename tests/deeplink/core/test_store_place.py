"""The rule for the store's folder: which one, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deeplink.core.config import explained_store, load_config
from deeplink.core.store_place import USUAL_STORE, StorePlace, chosen_store

NAME = f"deeplink-{os.getuid()}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's folders: /tmp alone, which is on a disk."""
    (tmp_path / "tmp").mkdir()
    return tmp_path


def chosen(root: Path, *, kinds: dict[str, str] | None = None, **env: str) -> StorePlace:
    mounts = [("/", "ext4"), *((str(root / folder), kind) for folder, kind in (kinds or {}).items())]
    return chosen_store({"SLURM_JOB_ID": "7"} | env, root=root, mounts=mounts)


def test_on_a_machine_of_its_own_it_stays_in_the_home_folder() -> None:
    usual = USUAL_STORE.expanduser()
    found = chosen_store({}, mounts=[("/", "ext4")])
    assert found.path == usual
    assert "ext4" in found.why
    shared = chosen_store({}, mounts=[("/", "ext4"), (str(Path.home()), "nfs4")])
    assert shared.path != usual
    assert "nfs4" in shared.why


def test_in_a_job_the_first_folder_on_a_local_disk_counts(root: Path) -> None:
    assert chosen(root).path == root / "tmp" / NAME
    (root / "scratch" / "local").mkdir(parents=True)
    assert chosen(root).path == root / "scratch" / "local" / NAME
    (root / "localscratch" / "ann").mkdir(parents=True)
    assert chosen(root).path == root / "localscratch" / NAME
    assert chosen(root, USER="ann").path == root / "localscratch" / "ann" / NAME
    own = root / "own"
    own.mkdir()
    assert chosen(root, TMPDIR=str(own)).path == own / NAME
    assert chosen(root, TMPDIR="/tmp").path == root / "localscratch" / NAME
    job = root / "of-job"
    job.mkdir()
    found = chosen(root, TMPDIR=str(own), SLURM_TMPDIR=str(job))
    assert found == StorePlace(
        job / NAME, "in a Slurm job, the first folder on a local disk (ext4): $SLURM_TMPDIR"
    )
    assert chosen(root, TMPDIR=str(own), SLURM_TMPDIR=str(root / "gone")).path == own / NAME


@pytest.mark.parametrize("kind", ["lustre", "tmpfs", "nfs4"])
def test_shared_storage_and_memory_are_passed_over(root: Path, kind: str) -> None:
    (root / "local").mkdir()
    (root / "local" / "ssd").mkdir()
    own = root / "own"
    own.mkdir()
    found = chosen(root, kinds={"own": kind, "local": kind, "local/ssd": "xfs"}, TMPDIR=str(own))
    assert found.path == root / "local" / "ssd" / NAME
    assert "xfs" in found.why
    nothing = chosen(root, kinds={"": kind})
    assert nothing.path == root / "tmp" / NAME
    assert "no folder on a local disk" in nothing.why


def test_what_is_set_counts_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('store = "/ssd/a"\n')
    env = {"DEEPLINK_CONFIG": str(file), "SLURM_JOB_ID": "7"}
    assert explained_store(env) == StorePlace(Path("/ssd/a"), f"set in {file}")
    named = env | {"DEEPLINK_STORE": "/ssd/b"}
    assert explained_store(named) == StorePlace(Path("/ssd/b"), "set in DEEPLINK_STORE")
    file.write_text("replicas = 3\n")
    assert load_config(env).store == explained_store(env).path == chosen_store(env).path
