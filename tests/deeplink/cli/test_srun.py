"""`deeplink srun` around a program that stands for srun; and what the everyday commands do not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.jobs.programs import TOPOLOGY, Programs
from tests.waiting import LIMIT_S

SRUN = f"""#!{sys.executable} -S
import json, os, sys
print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))
sys.exit(9)
"""
HEAVY = {"grpc", "pyarrow", "torch", "numpy", "yaml", "fsspec", "lmdb"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    slurm = Programs(tmp_path / "slurm")
    slurm.say(**{"scontrol show topology": TOPOLOGY})
    for name in ("srun", "salloc"):
        (slurm.bin / name).write_text(SRUN)
        (slurm.bin / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DEEPLINK"))}
    own = {
        "PATH": f"{slurm.bin}:{os.environ['PATH']}",
        "DEEPLINK_STATE": str(tmp_path),
        "DEEPLINK_CONFIG": os.devnull,
    }
    return {**kept, **own, "XDG_RUNTIME_DIR": str(tmp_path)}


def srun(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "deeplink", "srun", *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_NUM_NODES": "3"}


def test_what_srun_gets_and_how_it_ends(env: dict[str, str]) -> None:
    done = srun(env, "-N2", "--pty", "bash", "-c", "a  b$x")
    assert (done.returncode, json.loads(done.stdout)) == (9, ["srun", "-N2", "--pty", "bash", "-c", "a  b$x"])
    assert done.stderr == ""


def test_in_an_allocation_ranks_are_put_in_order(env: dict[str, str]) -> None:
    done = srun({**env, **INSIDE, "SLURM_JOB_NODELIST": "n[0-2]"}, "true")
    assert json.loads(done.stdout) == ["srun", "true"]  # n0, n1 and n2 cross twice in any order
    shuffled = TOPOLOGY.replace("n[0,2]", "n[0,2,4]").replace("Nodes=n1", "Nodes=n[1,3]")
    (Path(env["DEEPLINK_STATE"]) / "slurm" / "said").write_text(json.dumps({"scontrol show topology": shuffled}))
    fresh = {**env, **INSIDE, "SLURM_JOB_NODELIST": "n[0-3]", "SLURM_CONF": "/other"}
    assert json.loads(srun(fresh, "true").stdout)[1:] == [
        *("--ntasks=4", "--distribution=arbitrary", "--nodelist=n0,n2,n1,n3", "true")
    ]


def test_a_dry_run_prints_the_command_and_why(env: dict[str, str]) -> None:
    done = srun(env, "--dry-run", "-N2", "prog", "a b")
    assert done.returncode == 0
    assert done.stdout.startswith("salloc --job-name=prog -N2 ")
    assert done.stdout.endswith("srun -N2 -- prog 'a b'\n")
    assert "salloc makes the allocation" in done.stderr


def test_a_controller_that_does_not_answer_leaves_it_to_srun(env: dict[str, str]) -> None:
    said = {"fail": {"scontrol": "Unable to contact slurm controller"}}
    (Path(env["DEEPLINK_STATE"]) / "slurm" / "said").write_text(json.dumps(said))
    done = srun(env, "-N2", "true")
    assert json.loads(done.stdout) == ["srun", "-N2", "true"]
    assert "ranks stay in the order of names" in done.stderr


def test_without_srun_it_is_127(env: dict[str, str], tmp_path: Path) -> None:
    done = srun({**env, "PATH": str(tmp_path)}, "true")
    assert done.returncode == 127
    assert "srun is not on PATH" in done.stderr


def imported(modules: str) -> set[str]:
    code = f"import sys, json, {modules}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_srun_imports_next_to_nothing_and_looking_at_jobs_nothing_heavy() -> None:
    srun_path = "deeplink.cli.srun, deeplink.scheduler.launch.srun_shim, deeplink.scheduler.slurm.cached"
    assert not imported(srun_path) & {*HEAVY, "rich", "sqlite3"}
    looking = "deeplink.cli.status, deeplink.cli.status_screen"
    views = "deeplink.scheduler.jobs.job_view, deeplink.scheduler.jobs.follow, deeplink.scheduler.watch.requeue"
    assert not imported(f"{looking}, {views}") & HEAVY
