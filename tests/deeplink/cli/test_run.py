"""`deeplink run`: its options, and where it cannot run."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deeplink.cli import cli
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import RECIPES
from deeplink.scheduler.launch.launch_spec import LaunchSpec


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["run", *words], standalone_mode=False)


def plan(*words: str) -> dict[str, Any]:
    done = run("--dry-run", "--json", *words)
    if done.exception is not None:
        raise done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_spares_rest_and_ranks_are_counted() -> None:
    found = plan("--local", "4", "--spares", "1", "--nproc-per-node", "2", "--", "python", "train.py", "--x")
    assert (found["nodes"], found["spares"]) == (["local0", "local1", "local2"], ["local3"])
    assert found["world_size"] == 6
    assert found["argv"][-3:] == ["python", "train.py", "--x"]


def test_nodes_beyond_nnodes_rest() -> None:
    found = plan("--local", "3", "--nnodes", "1", "--", "true")
    assert (len(found["nodes"]), len(found["spares"])) == (1, 2)


def test_groups_of_ranks_are_shown() -> None:
    words = (
        "--local",
        "4",
        "--nproc-per-node",
        "2",
        "--group-size",
        "8",
        "--group-size",
        "2",
        "--group-size",
        "2",
    )
    found = plan(*words, "--", "true")
    assert found["groups"] == [{"size": 2, "groups": 4, "cut": 0}, {"size": 8, "groups": 1, "cut": 0}]
    assert found["groups_cut"] == []
    assert (
        "4 groups of 2 ranks within a node each\n1 group of 8 ranks"
        in run("--dry-run", *words, "--", "true").stdout
    )


def test_groups_of_ranks_from_the_jobs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_GROUP_SIZE", "2 4")
    assert [one["size"] for one in plan("--local", "4", "--", "true")["groups"]] == [2, 4]


def test_groups_that_do_not_divide_the_ranks_are_refused_before_anything_starts() -> None:
    with pytest.raises(DeepLinkError, match="do not divide into groups of 2") as caught:
        plan("--local", "3", "--group-size", "2", "--", "true")
    assert caught.value.exit_code == 2


def test_a_group_that_lies_on_two_nodes_and_need_not_is_named() -> None:
    (cut,) = plan("--local", "2", "--nproc-per-node", "3", "--group-size", "2", "--", "true")["groups_cut"]
    assert (cut["ranks"], cut["nodes"]) == ([2, 3], ["local0", "local1"])
    assert cut["because"] == "a node's 3 ranks do not divide into groups of 2"


def test_the_jobs_default_of_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_SPARES", "2")
    assert len(plan("--local", "3", "--", "true")["spares"]) == 2


def test_without_slurm_a_node_runs_one_rank_whatever_a_job_around_it_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    found = plan("--local", "2", "--", "true")
    assert (found["per_node"], found["ranks"]) == (1, [1, 1])


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    done = run("--local", "2", "--dry-run", "--", "python", "a b")
    assert "local0: rank 0" in done.stdout
    assert "'a b'" in done.stdout
    assert "the ring stays on one leaf" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--spares", "2"], ["--nnodes", "3"], ["--nnodes", "2", "--spares", "1"]])
def test_more_nodes_than_there_are(words: list[str]) -> None:
    with pytest.raises(DeepLinkError, match="nodes wanted for ranks and spares; the job has 2") as caught:
        plan("--local", "2", *words, "--", "true")
    assert caught.value.exit_code == 2


def test_outside_of_a_job_the_remedies_are_named() -> None:
    with pytest.raises(LaunchError) as caught:
        plan("--", "true")
    assert "sbatch" in caught.value.remedy
    assert "--local" in caught.value.remedy


def test_one_of_many_tasks_of_a_step_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeepLinkError, match="without srun"):
        plan("--", "true")


GIVEN = """JobId=7 JobName=x
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
     Nodes=n2 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)
     Nodes=n3 CPU_IDs=0-1 Mem=0 GRES=gpu:1(IDX:0)
   TresPerJob=gres:gpu:3
"""


def test_gpus_that_the_user_asks_srun_for_are_not_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    other = "No topology information available"
    scontrol.write_text(
        f"#!/bin/sh\ncase \"$*\" in\n*' job '*) cat <<'E'\n{GIVEN}E\n;;\n*) echo '{other}';;\nesac\n"
    )
    scontrol.chmod(0o755)
    job = {"JOB_ID": "7", "JOB_NODELIST": "n[2-3]", "NTASKS": "4", "TASKS_PER_NODE": "2(x2)"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match="differ in them"):
        plan("--srun-option=--gres-flags=disable-binding", "--", "true")
    found = plan("--srun-option=--gres=gpu:1", "--", "true")
    assert (found["ranks"], "--gres=gpu:1" in found["argv"]) == ([2, 2], True)


@pytest.mark.parametrize(
    "words",
    [
        ["--local", "2"],
        ["--local", "0", "--", "true"],
        ["--nproc-per-node", "some", "--local", "1", "--", "true"],
        ["--nproc-per-node", "²", "--local", "1", "--", "true"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["run", *words]).exit_code == 2


def test_help_shows_examples() -> None:
    assert "--spares 1" in run("--help").stdout


def test_every_recipe_is_listed_with_what_it_is_for() -> None:
    said = run("--recipe", "list").stdout.splitlines()
    assert [line.split()[0] for line in said] == list(RECIPES)


def test_a_plan_says_what_rank_0_finds() -> None:
    found = plan("--local", "2", "--recipe", "torchrun", "--nproc-per-node", "4", "--", "torchrun", "t.py")
    assert found["world_size"] == 8
    assert found["recipe"]["name"] == "torchrun"
    assert found["recipe"]["rank_0_finds"]["PET_NPROC_PER_NODE"] == "4"
    assert found["container"] is None
    words = ("--local", "1", "--container", "i.sif", "--container-runtime", "apptainer", "--", "true")
    assert plan(*words)["container"] == {"runtime": "apptainer", "image": "i.sif"}


@pytest.mark.parametrize(
    "words",
    [
        ["--recipe", "keras"],
        ["--container-mount", "/data"],
        ["--container-runtime", "no"],
        ["--container", "image", "--container-runtime", "pyxis"],
    ],
)
def test_options_that_mean_nothing_are_wrong_usage(words: list[str]) -> None:
    done = CliRunner().invoke(cli, ["run", "--local", "1", *words, "--", "true"])
    assert done.exit_code == 2


def test_the_sites_topology_says_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.conf"
    site.write_text("SwitchName=a Nodes=local[0,2]\nSwitchName=b Nodes=local[1,3]\nSwitchName=c Switches=a,b\n")
    monkeypatch.setenv("DEEPLINK_TOPOLOGY", str(site))
    found = plan("--local", "4", "--spares", "1", "--", "true")
    assert (found["nodes"], found["spares"]) == (["local0", "local2", "local1"], ["local3"])
    assert (found["ring_crossings"], found["ring_crossings_stock"]) == (2, 2)


def test_a_topology_that_cannot_be_read_is_a_warning_and_no_reason_not_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPLINK_TOPOLOGY", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING):
        assert plan("--local", "4", "--", "true")["world_size"] == 4
    assert f"cannot read {tmp_path / 'none'}" in caplog.text


def test_a_mount_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(LaunchError):
        plan("--local", "1", "--container", "i", "--container-runtime", "apptainer", "--container-mount", "x", "y")


@pytest.mark.parametrize(
    ("words", "seconds"),
    [([], None), (["auto"], None), (["off"], 0.0), (["0"], 0.0), (["12.5"], 12.5)],
)
def test_how_long_a_step_may_take(
    words: list[str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[LaunchSpec] = []

    def run_job(_backend: object, order: LaunchSpec, *_: object, **__: object) -> int:
        orders.append(order)
        return 0

    monkeypatch.setattr("deeplink.scheduler.launch.job.run_job", run_job)
    option = [f"--step-timeout={word}" for word in words]
    run("--local", "1", *option, "--", "true")
    assert orders[0].step_timeout_s == seconds


@pytest.mark.parametrize("word", ["never", "-1", "nan", "inf", ""])
def test_a_step_timeout_that_is_none_is_wrong_usage(word: str) -> None:
    assert CliRunner().invoke(cli, ["run", f"--step-timeout={word}", "--", "true"]).exit_code == 2


def test_paths_are_not_served_in_a_container(tmp_path: Path) -> None:
    done = run("--local", "1", "--paths", "--container", "image.sif", "--dry-run", "--", "true")
    assert "does not reach into a container" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--paths"], "was packed from a folder"), (["--paths", "python"], "has no dataset 'python'")],
)
def test_paths_that_cannot_be_served_are_an_error_before_anything_starts(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEEPLINK_CATALOG", str(tmp_path))
    with pytest.raises(DeepLinkError, match=said):
        plan("--local", "1", *words, "--", "true")
