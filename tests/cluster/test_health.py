"""A standing agent starts a real slurmd again before Slurm notices, and the watchdog hears of the node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]


@contextmanager
def running(
    cluster: Sandbox, machine: str, folder: Path, *argv: str, env: dict[str, str]
) -> Iterator[Callable[[], str]]:
    """Run one of our daemons on a machine, as root; gives what it said."""
    said = folder / f"said-{machine}"
    with said.open("wb") as file:
        process = cluster.spawn(
            machine, [sys.executable, "-m", "deeplink", *argv], root=True, env=env, stdout=file, stderr=file
        )
    try:
        yield said.read_text
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT_S)


def slurmd_of(cluster: Sandbox, node: str) -> list[str]:
    return cluster.run(node, ["pgrep", "-x", "slurmd|slurmd-wlm"], root=True).stdout.split()


def test_a_slurmd_that_dies_is_started_anew_before_slurm_notices_and_its_job_runs_on(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    folder = folder_of(cluster)
    token = folder / "watch.token"
    address = f"{cluster.shape.address(CTL)}:7412"
    journal = folder / "watch.sqlite"
    watch = ["watch", "--bind", address, "--journal", str(journal), "--token-file", str(token)]
    env = {
        "DEEPLINK_CONFIG": "/dev/null",
        "DEEPLINK_STATE": "/tmp/state",
        "DEEPLINK_STORE": "/tmp/store",
        "DEEPLINK_WATCH": address,
        "DEEPLINK_SLURMD_RESTART": f"slurmd -N n1 -f {cluster.layout.slurm_conf}",
    }
    job = submit(cluster, "-N2", "srun -N2 sleep 25\necho whole=$?\n", folder=folder)
    until(lambda: job.row().state is JobState.RUNNING, LIMIT_S, job.told)
    with (
        running(cluster, CTL, folder, *watch, env={"DEEPLINK_CONFIG": "/dev/null"}) as watch_said,
        running(cluster, "n1", folder, "-v", "node", "--name", "n1", env=env) as said,
    ):
        until(lambda: '"node": "n1"' in said(), LIMIT_S, said)
        assert json.loads(next(line for line in said().splitlines() if line.startswith("{")))["node"] == "n1"
        time.sleep(8)  # its checks have had their first looks
        (before,) = slurmd_of(cluster, "n1")
        killed = time.monotonic()
        assert cluster.run("n1", ["kill", "-9", before], root=True).code == 0
        until(lambda: slurmd_of(cluster, "n1") not in ([], [before]), LIMIT_S, said)
        sys.stdout.write(f"\n[health] slurmd killed, another one lives: {time.monotonic() - killed:.1f} s\n")
        until(lambda: "slurmd was gone and was started again" in said(), LIMIT_S, said)

        def heard() -> str:
            with Journal(journal, read_only=True) as kept:
                return next((node.boot_id for node in kept.nodes() if node.name == "n1"), "")

        until(lambda: bool(heard()), LIMIT_S, watch_said)
        assert heard() == cluster.run("n1", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()
        row = job.await_end(LIMIT_S)
    assert row.state is JobState.COMPLETED, job.told()
    assert "whole=0" in job.output()
    assert row.restarts == 0
    until(lambda: set(cluster.states().values()) == {"idle"}, LIMIT_S, lambda: str(cluster.states()))
