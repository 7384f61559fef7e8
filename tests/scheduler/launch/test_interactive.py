"""What `deeplink srun` makes of a command line: ranks in order where that is plainly meant, else srun as it is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.srun_shim import Interactive, interactive, understood
from deeplink.scheduler.slurm.nodeset import unfold_counts
from deeplink.scheduler.slurm.sbatch_options import SRUN
from deeplink.scheduler.topology.graph import Fabric

OURSELVES = ["deeplink", "srun"]
DEALT = Fabric({NodeName(f"n{number}"): ("core", f"leaf{number % 2}") for number in range(8)})
INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-3]", "SLURM_JOB_NUM_NODES": "4"}
SHAPE = ("srun", "--ntasks=4", "--distribution=arbitrary", "--nodelist=n0,n2,n1,n3")


def made(words: list[str], env: Mapping[str, str] = INSIDE, fabric: Fabric = DEALT) -> Interactive:
    return interactive(understood(words), env, lambda: fabric, OURSELVES)


def test_inside_an_allocation_the_ranks_of_a_step_stand_along_the_fabric() -> None:
    found = made(["-l", "python", "train.py", "a b"])
    assert found.argv == (*SHAPE, "-l", "python", "train.py", "a b")
    assert "2 times, and 4" in found.because


@pytest.mark.parametrize("words", [["-N4"], ["-N", "4", "-l"], ["--nodes=4"], ["-lN4"]])
def test_a_number_of_nodes_is_not_passed_on_beside_arbitrary(words: list[str]) -> None:
    """From 24.11 on srun refuses it."""
    found = made([*words, "true"])
    assert found.argv[: len(SHAPE)] == SHAPE
    assert not [word for word in found.argv if word.startswith(("-N", "--nodes="))]
    assert ("-l" in found.argv) == any("l" in word for word in words)


def test_tasks_stay_on_the_nodes_that_srun_would_give_them_to() -> None:
    each = made(["--ntasks-per-node=2", "true"])
    assert each.argv[1:4] == ("--ntasks=8", "--distribution=arbitrary", "--nodelist=n0,n0,n2,n2,n1,n1,n3,n3")
    uneven = made(["true"], {**INSIDE, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4,2,1(x2)"})
    assert uneven.argv[1:4] == ("--ntasks=8", "--distribution=arbitrary", "--nodelist=n0,n0,n0,n0,n2,n1,n1,n3")


@pytest.mark.parametrize(
    "words",
    [
        ["--pty", "bash"],
        ["-w", "n1,n2", "true"],
        ["-m", "cyclic", "true"],
        ["-N2", "true"],
        ["-N2-4", "true"],
        ["-n6", "true"],
        ["-r1", "true"],
        ["--multi-prog", "file"],
        ["--het-group=1", "true"],
        ["--jobid=9", "true"],
        ["--no-such-option", "true"],
        ["--version"],
        [],
    ],
)
def test_whatever_is_no_step_over_all_nodes_is_sruns_own(words: list[str]) -> None:
    assert made(words).argv == ("srun", *words)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_HOSTFILE": "/f"},
        {"SLURM_DISTRIBUTION": "cyclic"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_JOB_NODELIST": "n0"},
        {"SLURM_JOB_NODELIST": "n[0"},
        {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "odd"},
    ],
)
def test_an_environment_that_says_otherwise_is_heeded(env: dict[str, str]) -> None:
    assert made(["true"], {**INSIDE, **env}).argv == ("srun", "true")


def test_where_names_follow_the_switches_or_no_switches_are_known_nothing_is_changed() -> None:
    assert made(["true"], fabric=Fabric({})).argv == ("srun", "true")
    assert made(["true"], {**INSIDE, "SLURM_JOB_NODELIST": "n[0,2,4]"}).argv == ("srun", "true")


def test_outside_an_allocation_one_is_made_around_the_step() -> None:
    words = ["-N4", "-p", "main", "--exclusive", "--gres=gpu:2", "-l", "--output=o %t", "python", "-u", "a b"]
    found = made(words, {"HOME": "/"})
    assert found.argv == (
        *("salloc", "--job-name=python", "-N4", "-p", "main", "--exclusive", "--gres=gpu:2"),
        *(*OURSELVES, "-N4", "--gres=gpu:2", "-l", "--output=o %t", "--", "python", "-u", "a b"),
    )


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["-N2", "--pty", "bash"], {}),
        (["hostname"], {}),
        (["-N1", "hostname"], {}),
        (["-n8", "hostname"], {}),
        (["-N2", "-w", "n0,n1", "hostname"], {}),
        (["-N2", "--x11", "hostname"], {}),
        (["-N2", "hostname"], {"SLURM_PARTITION": "debug"}),
    ],
)
def test_outside_an_allocation_all_else_is_sruns_own(words: list[str], env: dict[str, str]) -> None:
    assert made(words, env).argv == ("srun", *words)


def test_a_cluster_with_one_leaf_needs_no_salloc() -> None:
    one = Fabric({NodeName("n0"): ("leaf0",), NodeName("n1"): ("leaf0",)})
    assert made(["-N2", "hostname"], {}, one).argv == ("srun", "-N2", "hostname")


def test_a_dry_run_is_ours_before_the_command_and_the_commands_own_behind_it() -> None:
    asked = understood(["-N2", "--dry-run", "prog", "--dry-run"])
    assert (asked.dry_run, asked.words) == (True, ("-N2", "prog", "--dry-run"))
    assert not understood(["prog", "--dry-run"]).dry_run


@pytest.mark.parametrize("word", ["--dry-run=1", "--deeplink-spares=1", "--deeplink-nothing"])
def test_an_option_of_ours_that_there_is_not_is_wrong_usage(word: str) -> None:
    with pytest.raises(LaunchError) as told:
        understood([word, "true"])
    assert told.value.exit_code == 2


@given(st.lists(st.text(max_size=8), max_size=6), st.sampled_from([{}, INSIDE]))
def test_the_commands_own_words_arrive_unchanged(words: list[str], env: dict[str, str]) -> None:
    found = made(["-N4", "prog", *words], env)
    assert found.argv[-len(words) - 1 :] == ("prog", *words)


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_words_become_a_command_of_srun_or_salloc(words: list[str]) -> None:
    try:
        found = made(words)
    except LaunchError:
        return
    assert found.argv[0] in {"srun", "salloc"}
    assert found.argv[-1:] == SRUN.parse(found.argv[1:]).rest[-1:] or found.argv == ("srun", *words)


@given(st.text(max_size=12))
def test_any_text_is_counts_or_none(text: str) -> None:
    assert all(count > 0 for count in unfold_counts(text))
