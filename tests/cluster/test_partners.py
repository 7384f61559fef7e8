"""Checkpoints on private disks: a node dies with the newest, shared storage cannot be used, the job goes on."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed import state as storage
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.shape import Shape
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]
LEASE_S = 5.0
RANK = Path(__file__).parent / "keeping_rank.py"
NEVER = str(10**9)


def newest(folder: Path, names: str = "step-*") -> int:
    """Return the step of the newest checkpoint published below a folder; 0 where there is none."""
    return max((int(path.name[5:15]) for path in folder.glob(names)), default=0)


def test_a_dead_nodes_newest_checkpoint_is_had_from_its_partner(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), NEVER])
    script = f"export DEEPLINK_STORE=/local/ssd/store; exec deeplink run --nproc-per-node 1 --spares 1 -- {train}"
    job = submit(cluster, "-N4 --no-kill", script, folder=folder)
    saved = folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 15, LIMIT_S, job.told)
    shared = folder / "run"
    shared.rename(folder / "withheld")
    shared.write_text("the mount of the shared checkpoints is gone")
    begun = job.events("attempt-started")[0]
    victim = begun["nodes"][-1]
    others = [cluster.ssd(node) / "store/checkpoints" for node in cluster.nodes if node != victim]

    def copied() -> int:
        return max(newest(disk, f"*/from-{victim}/step-*") for disk in others)

    until(lambda: copied() > newest(folder / "withheld"), LIMIT_S, job.told)
    cluster.crash(victim)
    kept, lost = copied(), newest(cluster.ssd(victim) / "run")
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"]
    job.await_event("first-step", count=2)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    begins = [path.read_text().split(maxsplit=3) for path in folder.glob(f"{job.id}.0.1.from*")]
    assert len(begins) == 3, job.told()
    steps = {(int(step), int(state)) for step, state, _, _ in begins}
    assert len(steps) == 1, begins
    step, state = steps.pop()
    # A copy that had all its bytes may have been published a moment after the node's death.
    assert kept <= step == state <= lost, begins
    assert any(f"copy for {victim}" in origin for *_, origin in begins), begins
    assert shared.is_file()


def test_a_job_of_one_node_outlives_storage_that_is_frozen_for_longer_than_its_lease(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(1), Options(freezable=True))
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), NEVER, str(LEASE_S)])
    script = f"export DEEPLINK_STORE=/local/ssd/store; exec deeplink run --nproc-per-node 1 -- {train}"
    job = submit(cluster, "-N1", script, folder=folder)
    saved = folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 10, LIMIT_S, job.told)
    storage.freeze(cluster.layout)
    try:
        time.sleep(3 * LEASE_S)
    finally:
        storage.thaw(cluster.layout)
    before = int(saved.read_text() or 0)
    until(lambda: int(saved.read_text() or 0) > before, LIMIT_S, job.told)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert len(job.events("attempt-started")) == 1, job.told()
