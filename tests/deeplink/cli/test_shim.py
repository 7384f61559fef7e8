"""The stand-ins as a job's shell finds them, in front of programs that stand for the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.command import make_stand_ins
from tests.waiting import LIMIT_S


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    real = tmp_path / "bin"
    real.mkdir()
    for name in ("srun", "torchrun"):
        (real / name).write_text(f'#!/bin/sh\nprintf "real {name}"; printf " <%s>" "$@"; exit 4\n')
        (real / name).chmod(0o755)
    make_stand_ins(tmp_path / "shim")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0"}
    path = f"{tmp_path / 'shim'}:{real}:{os.environ['PATH']}"
    return {**os.environ, **job, "PATH": path, "DEEPLINK_SHIM": str(tmp_path / "shim"), "HOME": str(tmp_path)}


def shell(env: dict[str, str], line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_helper_command_reaches_the_real_srun_word_by_word(env: dict[str, str]) -> None:
    del env["SLURM_STEP_ID"]
    done = shell(env, "srun -n1 hostname 'a b' '' \"\\$x\"")
    assert (done.returncode, done.stdout) == (4, "real srun <-n1> <hostname> <a b> <> <$x>")


def test_in_a_step_the_real_srun_runs(env: dict[str, str]) -> None:
    assert shell(env, "srun python train.py").stdout == "real srun <python> <train.py>"


def test_turned_off_for_one_command(env: dict[str, str]) -> None:
    del env["SLURM_STEP_ID"]
    assert shell(env, "DEEPLINK_SHIM=off srun python train.py").stdout == "real srun <python> <train.py>"


def test_in_a_rank_torchrun_gets_this_attempts_rendezvous(env: dict[str, str]) -> None:
    rank = {
        "DEEPLINK_ATTEMPT": "7.0.0",
        "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
    }
    done = shell({**env, **rank}, "torchrun --nnodes=5 --nproc_per_node=2 train.py --x")
    assert "<--nnodes=2> <--node-rank=1> <--master-addr=h> <--master-port=9>" in done.stdout
    assert done.stdout.endswith("<--nproc_per_node=2> <train.py> <--x>")


def test_no_real_program_behind_it(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "torchrun").unlink()
    path = f"{tmp_path / 'shim'}:{tmp_path / 'bin'}:/usr/bin:/bin"
    done = shell({**env, "PATH": path}, "torchrun train.py")
    assert done.returncode == 127
    assert "torchrun" in done.stderr


def test_an_unknown_program_is_refused() -> None:
    argv = [sys.executable, "-m", "deeplink", "shim", "mpirun", "x"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "mpirun" in done.stderr
