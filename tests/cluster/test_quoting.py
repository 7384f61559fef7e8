"""Whatever words a command has, they arrive: through srun, its stand-in, with spares, and from a batch script."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from deeplink.scheduler.sandbox.cluster import Sandbox
from deeplink.scheduler.sandbox.shape import CTL
from deeplink.scheduler.slurm.states import JobState
from tests.cluster.jobs import Job, folder_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

NASTY = (
    *("", " ", "a b", "  two  ", "'", '"', "'\"'\"'", "\\", "\\n", "\\\\", "a\\ b", "a\nb", "\n", "\t", "\r\n"),
    *("$HOME", "$(id)", "`id`", "${x:-y}", "!", "*", "?", "[a-z]", "~", "#no", "a;b", "a|b", "a&b", ">f", "<f"),
    *("(x)", "{a,b}", "%j", "%%", "%s%n", "a,b=c,d", "=", "--", "-", "-x", "--spares=3", "--export=NONE"),
    *("é", "日本語", "\U0001f600", "\u200b", "\x01", "\x7f", "\udcff\udcfe", "x" * 5000, "\\x41", "\\u0041"),
    *("key='va lue'", '{"json": [1, "two"]}'),
)
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
    value = "".join(NASTY)[:6000]
    # What is no text in UTF-8 comes as it is: a file name of somebody else's, say.
    words = [
        "deeplink",
        "sbatch",
        "--deeplink-shim",
        "--deeplink-spares=1",
        "--parsable",
        f"--output={folder}/out",
    ]
    words += [str(folder / "job.sh"), str(folder), *NASTY]
    script = f"export NASTY={shlex.quote(value)}; exec {shlex.join(words)}"
    done = sandbox.run(CTL, ["bash", "-c", script])
    assert done.code == 0, done.stderr
    job = Job(sandbox, int(done.stdout), folder)
    assert job.await_end(90).state is JobState.COMPLETED, job.told()
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*.*.[01]")}
    assert sorted(found) == ["run.0.0", "run.0.1", "shim.1.0", "shim.1.1"], job.told()
    for arrived, variable in found.values():
        assert arrived == list(NASTY)
        assert variable == value
