"""Shared storage that stalls: a file system of its own, frozen by the kernel, as a test really has it (root)."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.checkpoints import Checkpoints, background
from deeplink.checkpoints.ownership import FolderOwnership
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints.nodes import Nodes
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow]
FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)


@dataclass
class Storage:
    """A mounted file system that can be frozen: who writes to it hangs."""

    path: Path

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True, timeout=LIMIT_S)

    def thaw(self) -> None:
        subprocess.run(
            ["fsfreeze", "--unfreeze", str(self.path)], check=False, timeout=LIMIT_S, capture_output=True
        )


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    image, path = tmp_path / "image", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    path.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=LIMIT_S)
    subprocess.run(["mount", "-o", "loop,noatime", str(image), str(path)], check=True, timeout=LIMIT_S)
    mounted = Storage(path)
    try:
        yield mounted
    finally:
        mounted.thaw()
        background.finish(20)
        subprocess.run(["umount", "--lazy", str(path)], check=False, timeout=LIMIT_S)


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step=step) as draft:
        (draft / "state.bin").write_bytes(b"state" * 1000)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in folder.glob("step-*"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the storage for frozen after half a second."""
    hold = FolderOwnership.__init__

    def made(self: FolderOwnership, *args: object, **more: object) -> None:
        hold(self, *args, **more)  # type: ignore[arg-type]
        self.shared.patience_s = 0.5

    monkeypatch.setattr(FolderOwnership, "__init__", made)


@pytest.mark.usefixtures("impatient")
def test_saves_go_on_and_this_nodes_disk_is_tidied_while_shared_storage_stands_still(
    tmp_path: Path, storage: Storage
) -> None:
    shared, local = storage.path / "run", tmp_path / "ssd"
    checkpoints = Checkpoints(shared, attempt=FIRST, local=local)
    save(checkpoints, 1)
    checkpoints.wait()
    storage.freeze()
    for step in range(2, 9):
        save(checkpoints, step)
    # The newest two, and the one whose copying hangs.
    assert steps(local)[-2:] == [7, 8]
    assert len(steps(local)) <= 3
    storage.thaw()
    checkpoints.close()
    assert steps(shared)[-1] == 8
    assert steps(local) == [7, 8]


@pytest.mark.usefixtures("impatient")
def test_a_partner_gets_what_frozen_storage_does_not(tmp_path: Path, storage: Storage) -> None:
    nodes = Nodes(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.env(FIRST, "n0", ["n0"], spares=("n1", "n2", "n3")).items():
            patch.setenv(name, value)
        checkpoints = Checkpoints(storage.path / "run", local=nodes.local("n0"), lease_s=None)
    assert checkpoints.latest() is None
    storage.freeze()
    for step in (1, 2, 3):
        save(checkpoints, step)
    until(lambda: any("step-0000000003" in name for name in nodes.copies("n2")))
    # A restart, while it is still frozen.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.env(SECOND, "n1", ["n1"], spares=("n2", "n3")).items():
            patch.setenv(name, value)
        again = Checkpoints(storage.path / "run", local=nodes.local("n1"), lease_s=None)
    nodes.stop("n0")
    found = again.latest()
    assert found is not None
    assert (found.step, found.origin) == (3, "n2's copy for n0")
    save(again, 4)
    assert steps(nodes.local("n1")) == [3, 4]
    storage.thaw()
    again.close()
    nodes.close()
    outside = Checkpoints(storage.path / "run", readonly=True).latest()
    assert outside is not None
    assert outside.step == 4


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["sync", "async"])
def test_a_save_that_hangs_in_the_middle_is_whole_when_the_storage_goes_on(
    storage: Storage, *, is_waited_for: bool
) -> None:
    checkpoints = Checkpoints(storage.path / "run", attempt=FIRST)
    save(checkpoints, 1)
    done, frozen = threading.Event(), threading.Event()

    def saved() -> None:
        with checkpoints.save(step=2) as draft:
            (draft / "state.bin").write_bytes(b"one")
            storage.freeze()
            frozen.set()
            (draft / "more.bin").write_bytes(b"two")  # hangs here
        done.set()

    if is_waited_for:
        threading.Thread(target=saved).start()
        assert frozen.wait(LIMIT_S)
    else:
        storage.freeze()
        checkpoints.save_state({"model": {"weight": 1}}, step=2)
        assert checkpoints.is_saving
        frozen.set()
    assert not done.wait(1)
    storage.thaw()
    if is_waited_for:
        assert done.wait(LIMIT_S)
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 2
