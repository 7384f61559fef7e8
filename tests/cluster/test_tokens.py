"""The token of an attempt ends with it, on every node whose agent lives on."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from tests.cluster.jobs import folder_of, submit

pytestmark = [pytest.mark.cluster]

SCRIPT = Path(__file__).parent / "token_rank.py"


def test_no_agent_takes_the_token_of_the_attempt_before(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    shutil.copy(SCRIPT, folder / "token_rank.py")
    run = f"exec deeplink run --nproc-per-node 1 -- {sys.executable} {folder}/token_rank.py {folder}"
    job = submit(sandbox, "-N2", run, folder=folder)
    assert job.await_end().state is JobState.COMPLETED, job.told()
    first, second = job.events("attempt-started")
    assert sorted(first["nodes"]) == sorted(second["nodes"])
    assert len(job.events("agents-ready")) == 1, "the same agents"
    for rank in (0, 1):
        found = [json.loads((folder / f"found{relaunch}.{rank}").read_text()) for relaunch in (0, 1)]
        assert all(found[0]["own"].values())
        assert all(found[1]["own"].values())
        assert len(found[1]["before"]) == 2
        assert not any(found[1]["before"].values())
        assert not found[1]["same"]["token"]
