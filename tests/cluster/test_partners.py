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


def test_a_dead_nodes_newest_checkpoint_is_had_from_its_partner(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), "80"])
    script = f"export DEEPLINK_STORE=/local/ssd/store; exec deeplink run --nproc-per-node 1 --spares 1 -- {train}"
    job = submit(cluster, "-N4 --no-kill", script, folder=folder)
    saved = folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 15, LIMIT_S, job.told)
    shared = folder / "run"
    shared.rename(folder / "withheld")
    shared.write_text("the mount of the shared checkpoints is gone")
    until(lambda: int(saved.read_text() or 0) >= 30, LIMIT_S, job.told)
    begun = job.events("attempt-started")[0]
    victim = begun["nodes"][-1]
    cluster.crash(victim)
    newest = int(saved.read_text())
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"]
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    begins = [path.read_text().split(maxsplit=3) for path in folder.glob(f"{job.id}.0.1.from*")]
    assert len(begins) == 3, job.told()
    steps = {(int(step), int(state)) for step, state, _, _ in begins}
    assert len(steps) == 1, begins
    # The copy of the very last save may have been under way.
    assert steps.pop()[0] in {newest, newest - 5}, begins
    assert any(f"copy for {victim}" in origin for *_, origin in begins), begins
    assert shared.is_file()


def test_a_job_of_one_node_outlives_storage_that_is_frozen_for_longer_than_its_lease(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(1), Options(freezable=True))
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), "60", str(LEASE_S)])
    script = f"export DEEPLINK_STORE=/local/ssd/store; exec deeplink run --nproc-per-node 1 -- {train}"
    job = submit(cluster, "-N1", script, folder=folder)
    saved = folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 10, LIMIT_S, job.told)
    storage.freeze(cluster.layout)
    try:
        time.sleep(3 * LEASE_S)
    finally:
        storage.thaw(cluster.layout)
    assert job.await_end().state is JobState.COMPLETED, job.told()
    assert len(job.events("attempt-started")) == 1, job.told()
    assert saved.read_text() == "60"
