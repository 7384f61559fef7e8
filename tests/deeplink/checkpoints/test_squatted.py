"""Whose folders of checkpoints are: the one on a node's disk its user's alone, a shared one a group's."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.checkpoints import Checkpoints
from deeplink.core.private import PrivateFolderError
from deeplink.scheduler.slurm.command import finish

ALICE, MALLORY, PROJECT = 64_100, 64_102, 64_200
IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
TRAIN = """
import os, sys
from deeplink.checkpoints import Checkpoints
os.umask(0o002)
shared, local, deed = sys.argv[1:]
with Checkpoints(shared, local=local or None) as checkpoints:
    if deed != "look":
        with checkpoints.save(step=int(deed)) as draft:
            (draft / "state.bin").write_bytes(b"weights")
    found = checkpoints.latest()
print("step", found and found.step)
"""


@pytest.fixture
def disks() -> Iterator[tuple[Path, Path]]:
    """A node's disk on which everybody may make folders, and a shared folder of a project."""
    top = Path(tempfile.mkdtemp(prefix="deeplink-disks-"))
    top.chmod(0o755)
    ssd, shared = top / "ssd", top / "project"
    ssd.mkdir()
    ssd.chmod(0o1777)
    shared.mkdir()
    os.chown(shared, 0, PROJECT)
    shared.chmod(0o2775)
    yield ssd, shared
    shutil.rmtree(top)


def train(uid: int, shared: Path, local: Path | str, deed: int | str) -> str:
    """Run `TRAIN` as a user of the project; return what it says of its end."""
    argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={PROJECT}", sys.executable, "-c", TRAIN]
    done = finish([*argv, str(shared), str(local), str(deed)], timeout_s=120)
    return done.stdout + done.stderr


@IS_ROOT
@pytest.mark.parametrize("deed", [1, "look"])
def test_a_nodes_folder_that_another_user_made_first_is_neither_written_nor_read(
    disks: tuple[Path, Path], deed: int | str
) -> None:
    ssd, shared = disks
    squatted = ssd / "ckpt-alice"
    squatted.mkdir()
    squatted.chmod(0o777)
    os.chown(squatted, MALLORY, MALLORY)
    said = train(ALICE, shared / "run", squatted, deed)
    assert f"{squatted}: it belongs to user {MALLORY}" in said
    assert list(squatted.iterdir()) == []


@IS_ROOT
def test_what_a_node_holds_is_its_users_alone_and_what_is_shared_is_the_groups(disks: tuple[Path, Path]) -> None:
    ssd, shared = disks
    local = ssd / "alice" / "run"
    assert "step 1" in train(ALICE, shared / "run", local, 1)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (local.parent, local)] == [0o700, 0o700]
    # Another one of the project goes on from it, with a folder of his own or without.
    assert "step 2" in train(MALLORY, shared / "run", "", 2)
    assert "step 3" in train(MALLORY, shared / "run", ssd / "mallory", 3)
    assert "step 4" in train(ALICE, shared / "run", local, 4)


def test_a_nodes_folder_that_others_may_write_to_is_refused_by_the_call_that_would_use_it(tmp_path: Path) -> None:
    local = tmp_path / "ssd"
    local.mkdir()
    local.chmod(0o777)
    for readonly in (False, True):
        with pytest.raises(PrivateFolderError, match="others may write to it") as refused:
            Checkpoints(tmp_path / "shared", local=local, readonly=readonly).latest()
        assert f"chmod go-w {local}" in refused.value.remedy
    with pytest.raises(PrivateFolderError):
        Checkpoints(tmp_path / "shared", local=local).save_state({"best": 1.0}, step=1)
    local.chmod(0o755)
    with Checkpoints(tmp_path / "shared", local=local) as checkpoints:
        checkpoints.save_state({"best": 1.0}, step=1)
    assert stat.S_IMODE(local.stat().st_mode) == 0o700


def test_who_only_looks_makes_no_folder(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "shared") as checkpoints, checkpoints.save(step=1) as draft:
        (draft / "state.bin").write_bytes(b"weights")
    found = Checkpoints(tmp_path / "shared", local=tmp_path / "ssd", readonly=True).latest()
    assert found is not None
    assert not (tmp_path / "ssd").exists()
