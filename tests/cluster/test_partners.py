"""Checkpoints on private disks: a node dies with the newest, shared storage cannot be used, the job goes on."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.sandbox.cluster import Sandbox
from deeplink.scheduler.sandbox.shape import Shape
from deeplink.scheduler.slurm.states import JobState
from tests.cluster.jobs import folder_of, submit, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
RANK = Path(__file__).parent / "keeping_rank.py"


def test_a_dead_nodes_newest_checkpoint_is_had_from_its_partner(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    (folder / "run").write_text("the mount of the shared checkpoints is gone")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), "80"])
    script = f"export DEEPLINK_STORE=/local/ssd/store; exec deeplink run --nproc-per-node 1 --spares 1 -- {train}"
    job = submit(cluster, "-N4 --no-kill", script, folder=folder)
    saved = folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 15, 40, job.told)
    begun = job.events("attempt-started")[0]
    victim = begun["nodes"][-1]
    cluster.crash(victim)
    newest = int(saved.read_text())
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"]
    assert job.await_end(90).state is JobState.COMPLETED, job.told()
    begins = [path.read_text().split(maxsplit=3) for path in folder.glob(f"{job.id}.0.1.from*")]
    assert len(begins) == 3, job.told()
    steps = {(int(step), int(state)) for step, state, _, _ in begins}
    assert len(steps) == 1, begins
    # The copy of the very last save may have been under way.
    assert steps.pop()[0] in {newest, newest - 5}, begins
    assert any(f"copy for {victim}" in origin for *_, origin in begins), begins
    assert (folder / "run").is_file()
