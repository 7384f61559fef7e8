"""Whatever words a command has, they arrive: through srun, its stand-in, with spares, and from a batch script."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import Job, folder_of
from tests.hostile import WORDS
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]

SAY = """\
import json, os, sys
name = f"{sys.argv[1]}.{os.environ['DEEPLINK_ATTEMPT'].rpartition('.')[2]}.{os.environ['RANK']}"
with open(name, "w") as file:
    json.dump([sys.argv[2:], os.environ["NASTY"]], file)
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1
cd "$1"; shift
deeplink run --spares 1 -- {python} say.py run "$@"
srun {python} say.py shim "$@"
"""


def test_words_and_variables_arrive_unchanged(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    (folder / "say.py").write_text(SAY)
    (folder / "job.sh").write_text(SCRIPT.format(python=shlex.quote(sys.executable)))
    value = "".join(WORDS)[:6000]
    # What is no text in UTF-8 comes as it is: a file name of somebody else's, say.
    words = [
        "deeplink",
        "sbatch",
        "--deeplink-shim",
        "--deeplink-spares=1",
        "--parsable",
        f"--output={folder}/out",
    ]
    words += [str(folder / "job.sh"), str(folder), *WORDS]
    script = f"export NASTY={shlex.quote(value)}; exec {shlex.join(words)}"
    done = sandbox.run(CTL, ["bash", "-c", script])
    assert done.code == 0, done.stderr
    job = Job(sandbox, int(done.stdout), folder)
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*.*.[01]")}
    assert sorted(found) == ["run.0.0", "run.0.1", "shim.1.0", "shim.1.1"], job.told()
    for arrived, variable in found.values():
        assert arrived == list(WORDS)
        assert variable == value
