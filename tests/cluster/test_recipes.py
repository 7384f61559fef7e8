"""Frameworks under a real Slurm take the order of `deeplink run`, not Slurm's; the site's topology says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deeplink.demo.story import has_torch
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]

EXAMPLES = Path(__file__).parents[2] / "examples"
_SAID = re.compile(r"^\w+: rank (\d+) of (\d+) on (\S+), started as (\d+)$", re.MULTILINE)


def test_mpi_and_lightning_take_the_sites_order_and_not_slurms(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    (folder / "site.conf").write_text("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n0\nSwitchName=c Switches=a,b\n")
    ours = "deeplink run --nproc-per-node 1"
    script = f"""\
export DEEPLINK_TOPOLOGY={folder}/site.conf OMP_NUM_THREADS=1
{ours} --recipe mpi -- python {EXAMPLES}/mpi_sgd.py >{folder}/mpi
"""
    frameworks = ["mpi"]
    if has_torch():
        frameworks.append("lightning")
        trainer = f"python {EXAMPLES}/lightning_trainer.py {folder}/saved"
        script += f"{ours} --recipe lightning -- {trainer} >{folder}/lightning\n"
    job = submit(sandbox, "-N2 -w n[0-1]", script, folder=folder)
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    assert [event["nodes"] for event in job.events("attempt-started")] == [["n1", "n0"]] * len(frameworks)
    for framework in frameworks:
        said = (folder / framework).read_text()
        found = sorted((int(rank), node, int(own)) for rank, _, node, own in _SAID.findall(said))
        assert found == [(0, "n1", 0), (1, "n0", 1)], said
    if has_torch():
        assert "TorchElasticEnvironment" in (folder / "lightning").read_text()
    hosts = sandbox.home / ".local/state/deeplink/jobs" / str(job.id) / f"hostfile.{job.id}.0.0"
    assert hosts.read_text() == "n1 slots=1\nn0 slots=1\n"
