"""Where a real job's steps go, by `deeplink status`: one whose DataLoader is slow waits for data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cache.agents import small_files, write_tree
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]


def test_a_job_whose_data_comes_slowly_is_said_to_wait_for_it(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    shutil.copy(Path(__file__).with_name("starved_rank.py"), folder / "train.py")
    source = write_tree(folder / "source", small_files(2000))
    for path in (source, *source.rglob("*")):
        shutil.chown(path, sandbox.user.uid, sandbox.user.gid)
    script = f"""\
export USER=$(id -un) DEEPLINK_STORE=/local/ssd/$USER
deeplink pack {source} starved
deeplink run --nproc-per-node 1 -- {{train}} 100000
"""
    job = submit(sandbox, "-N2", script, folder=folder)
    job.await_event("first-step", 2 * LIMIT_S)

    def seen() -> dict[str, Any]:
        done = sandbox.run(CTL, ["deeplink", "status", str(job.id), "--json"])
        assert done.code == 0, done
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    until(lambda: (seen()["step"] or 0) > 30 and seen()["binds"] is not None, 2 * LIMIT_S, job.told)
    found = seen()
    screen = sandbox.run(CTL, ["deeplink", "status", str(job.id)]).stdout
    assert found["binds"]["cause"] == "data", screen
    assert sum(found["binds"]["shares"].values()) == pytest.approx(1.0)
    assert found["binds"]["shares"]["data"] > 0.5, screen
    assert found["reads"]["local"] + found["reads"]["peer"] > 2000, "counted though workers read them"
    assert found["reads"]["bytes"] > 0
    assert found["loaded_per_s"] > 0
    assert "waiting for data" in screen
    assert "of its reads came from" in screen
    assert "reads unknown" not in " ".join(screen.split())
    sandbox.run(CTL, ["deeplink", "cancel", str(job.id)])
    job.await_end()
