"""`deeplink calibrate` in a real allocation: which nodes are how far apart is what Slurm says."""

from __future__ import annotations

import json

import pytest

from deeplink.demo.story import has_torch
from deeplink.scheduler.placement.model import constants_from
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not has_torch(), reason="its ranks time torch's collectives"),
]


def test_nodes_of_two_leaves_are_timed_below_one_and_across(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    out = folder / "constants.json"
    calibrate = f"deeplink calibrate --largest {1 << 20} --repeats 3 --json --out {out}"
    # Eight nodes, names dealt to two leaves in turns: three of them touch both, and two are below one.
    job = submit(sandbox, "-N3 -w n0,n1,n2", f"OMP_NUM_THREADS=1 deeplink run --nproc-per-node 1 -- {calibrate}")
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told() + job.output()
    (told,) = [json.loads(line) for line in job.output().splitlines() if line.startswith("{")]
    assert [(sweep["reach"], sweep["ranks"]) for sweep in told["sweeps"]] == [
        ("nic", 2),
        ("leaf", 2),
        ("nodes", 3),
    ]
    assert constants_from(out.read_text(), str(out)) == constants_from(json.dumps(told["constants"]), "output")
