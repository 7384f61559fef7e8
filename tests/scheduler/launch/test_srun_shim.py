"""Which srun and torchrun of a script become a run, and as what."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.srun_shim import (
    LeftAlone,
    srun_becomes,
    torchrun_becomes,
    torchrun_in_rank,
    trains,
)

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}
SCRIPTS = {"train.sh": "#!/bin/bash\npython train.py\n", "clean.sh": "#!/bin/bash\nrm -rf scratch\n"}


def read(name: str) -> str:
    return SCRIPTS.get(name.removeprefix("./"), "")


def becomes(line: str, **env: str) -> list[str] | str:
    found = srun_becomes(shlex.split(line), {**JOB, **env}, read)
    return list(found) if isinstance(found, tuple) else found.because


def run(count: int, per_node: int, *options: str) -> list[str]:
    return [
        f"--nnodes={count}",
        *([f"--nproc-per-node={per_node}"] if per_node else []),
        *(f"--srun-option={one}" for one in options),
        "--",
    ]


@pytest.mark.parametrize(
    ("line", "env", "wanted"),
    [
        ("python train.py", {}, [*run(4, 1), "python", "train.py"]),
        ("python train.py", {"DEEPLINK_SPARES": "1"}, [*run(3, 1), "python", "train.py"]),
        ("-N4 -n8 python t.py", {}, [*run(4, 2), "python", "t.py"]),
        ("-n8 python t.py", {}, [*run(4, 2), "python", "t.py"]),
        # The job's own tasks, as Slurm spread them over the nodes.
        ("python t.py", {"SLURM_NTASKS": "7"}, [*run(4, 0), "python", "t.py"]),
        ("-n7 python t.py", {"SLURM_NTASKS": "7"}, [*run(4, 0), "python", "t.py"]),
        ("python t.py", {"SLURM_NTASKS": "8", "DEEPLINK_SPARES": "1"}, [*run(3, 0), "python", "t.py"]),
        ("python t.py", {"SLURM_NTASKS_PER_NODE": "3"}, [*run(4, 0), "python", "t.py"]),
        ("--gpus=8 python t.py", {"SLURM_GPUS": "8"}, [*run(4, 1), "python", "t.py"]),
        (
            "--cpu-bind=cores -l -c 4 --export=ALL,A=1 -K -u python t.py",
            {},
            [
                *run(4, 1, "--cpu-bind=cores", "--label", "--cpus-per-task=4", "--export=ALL,A=1", "--unbuffered"),
                *("python", "t.py"),
            ],
        ),
        ("bash -c 'torchrun t.py'", {}, [*run(4, 1), "bash", "-c", "torchrun t.py"]),
        ("bash -lc 'torchrun t.py'", {}, [*run(4, 1), "bash", "-lc", "torchrun t.py"]),
        ("bash ./train.sh", {}, [*run(4, 1), "bash", "./train.sh"]),
        ("./train.sh -x", {}, [*run(4, 1), "./train.sh", "-x"]),
        ("-- python -c 'a b'", {}, [*run(4, 1), "python", "-c", "a b"]),
    ],
)
def test_an_srun_that_trains_becomes_a_run(line: str, env: dict[str, str], wanted: list[str]) -> None:
    assert becomes(line, **env) == wanted


@pytest.mark.parametrize(
    ("line", "because"),
    [
        ("hostname", "no training"),
        ("", "no training"),
        ("./clean.sh", "no training"),
        ("bash clean.sh", "no training"),
        ("bash -c 'echo python-is-fun'", "no training"),
        ("-N1 -n1 python prepare.py", "part of the nodes"),
        ("-n1 python prepare.py", "evenly"),
        ("-n6 python t.py", "evenly"),
        ("-N2-4 python t.py", "part of the nodes"),
        ("--pty python", "--pty"),
        ("-w n1 python t.py", "--nodelist"),
        ("-m cyclic python t.py", "--distribution"),
        ("--export=NONE python t.py", "--export"),
        ("--from-the-future python t.py", "--from-the-future"),
        ("--multi-prog python.conf", "--multi-prog"),
        ("--jobid=9 python t.py", "--jobid"),
    ],
)
def test_every_other_srun_is_left_alone(line: str, because: str) -> None:
    assert because in becomes(line)


@pytest.mark.parametrize("env", [{"DEEPLINK_ATTEMPT": "7.0.0"}, {"SLURM_STEP_ID": "3"}])
def test_in_a_step_srun_is_left_alone(env: dict[str, str]) -> None:
    assert "batch script" in becomes("python t.py", **env)


def test_a_batch_script_of_26_05_is_no_step() -> None:
    assert becomes("python t.py", SLURM_STEP_ID="-5", SLURM_STEPID="-5") == becomes("python t.py")
    assert isinstance(srun_becomes(["python", "t.py"], {**JOB, "SLURM_STEP_ID": "-5"}, read), tuple)


def test_outside_of_a_job_everything_is_left_alone() -> None:
    assert isinstance(srun_becomes(["python"], {}, read), LeftAlone)
    assert isinstance(torchrun_becomes(["t.py"], {}), LeftAlone)


def test_a_torchrun_of_the_batch_script_runs_on_every_node() -> None:
    words = ["--nnodes=4", "--nproc_per_node", "2", "t.py", "--standalone"]
    found = torchrun_becomes(words, JOB)
    assert isinstance(found, tuple)
    assert list(found) == ["--recipe=torchrun", "--nproc-per-node=2", "--", "torchrun", *words]


@pytest.mark.parametrize(
    ("words", "env", "each"),
    [
        ("t.py", {}, "1"),
        ("--nproc-per-node=8 t.py", {}, "8"),
        ("--nproc_per_node gpu t.py", {}, "auto"),
        ("--nproc-per-node=cpu t.py", {}, "1"),
        ("t.py", {"PET_NPROC_PER_NODE": "4"}, "4"),
        ("t.py --nproc-per-node=8", {}, "1"),
    ],
)
def test_the_ranks_that_a_torchrun_will_start_are_counted(words: str, env: dict[str, str], each: str) -> None:
    found = torchrun_becomes(words.split(), {**JOB, **env})
    assert isinstance(found, tuple)
    assert found[1] == f"--nproc-per-node={each}"


WORDS = st.lists(st.text(st.characters(exclude_characters="\0"), max_size=20), max_size=6)


@given(WORDS)
def test_a_commands_own_words_are_handed_on_as_they_are(words: list[str]) -> None:
    for before, found in (
        (["python", "t.py"], srun_becomes(["-N4", "python", "t.py", *words], JOB, read)),
        (["torchrun", "--nnodes=4", "t.py"], torchrun_becomes(["--nnodes=4", "t.py", *words], JOB)),
    ):
        assert isinstance(found, tuple)
        behind = found[found.index("--") + 1 :]
        assert list(behind) == [*before, *words]
    assert torchrun_in_rank(["--nnodes=4", "t.py", *words], RANK) == [*HERE, "t.py", *words]


@pytest.mark.parametrize("words", [["--standalone", "t.py"], ["--nnodes", "1", "t.py"], ["--nnodes=1:1", "t.py"]])
def test_a_torchrun_for_one_node_is_left_alone(words: list[str]) -> None:
    assert isinstance(torchrun_becomes(words, JOB), LeftAlone)


RANK = {
    "DEEPLINK_ATTEMPT": "7.0.1",
    "GROUP_WORLD_SIZE": "3",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "10.77.0.10",
    "MASTER_PORT": "23456",
}
HERE = ["--nnodes=3", "--node-rank=2", "--master-addr=10.77.0.10", "--master-port=23456", "--rdzv-id=7.0.1"]


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--nnodes=4 --node_rank=0 --nproc_per_node=2 t.py --nnodes=9", "--nproc_per_node=2 t.py --nnodes=9"),
        (
            "--rdzv_id 5 --rdzv-backend=c10d --rdzv_endpoint n0:29500 --nproc-per-node gpu -m pkg.t",
            "--nproc-per-node gpu -m pkg.t",
        ),
        ("--max-restarts 3 --no-python ./t", "--max-restarts 3 --no-python ./t"),
        ("--master_addr n0 --master_port 1 t.py", "t.py"),
    ],
)
def test_in_a_rank_torchrun_meets_this_attempts_nodes(line: str, kept: str) -> None:
    assert torchrun_in_rank(line.split(), RANK) == [*HERE, *kept.split()]


def test_what_torchruns_own_parser_takes_no_value_for_swallows_no_script() -> None:
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for option in action.option_strings:
            line = [option, "--nnodes=4", "t.py"] if action.nargs == 0 else [option, "1", "--nnodes=4", "t.py"]
            assert torchrun_in_rank(line, RANK)[-1] == "t.py", option
            assert "--nnodes=4" not in torchrun_in_rank(line, RANK), option


def test_several_torchruns_on_one_node_are_refused() -> None:
    with pytest.raises(LaunchError):
        torchrun_in_rank(["t.py"], {**RANK, "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "command", ["python3.11", "/opt/conda/bin/python", "./train.py", "accelerate", "torchrun"]
)
def test_what_starts_python_trains(command: str) -> None:
    assert trains([command, "x"], read)
