"""What a job asks, out of all the places where sbatch is told; and when nothing may be hinted."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.placement.hint.ask import ask_of
from deeplink.scheduler.placement.hint.decision import Ask
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.sbatch_options import SBATCH, directives


def ask(words: str, script: str = "", **env: str) -> Ask:
    scripted = SBATCH.parse(list(directives(script)))
    return ask_of(SBATCH.parse(shlex.split(words)), scripted, env, unfold)


def test_what_is_asked() -> None:
    found = ask(
        "-N4 --ntasks-per-node=8 -c 6 --gres=gpu:a100:8 --mem=100G -p gpu -C 'ib&nvme' -x n1,n2 -t 2:00:00 x -N9"
    )
    assert found == Ask(
        nodes=4,
        gpus=8,
        gpu_type="a100",
        cpus=48,
        memory_mib=102400,
        partition="gpu",
        features=("ib", "nvme"),
        excluded=("n1", "n2"),  # type: ignore[arg-type]
        limit_s=7200,
    )


def test_the_command_line_counts_more_than_the_environment_and_that_more_than_the_script() -> None:
    script = "#!/bin/sh\n#SBATCH -N 2 -p slow -t 5\n#SBATCH --exclusive\n"
    found = ask("-N4 job.sh", script, SBATCH_PARTITION="fast", SBATCH_TIMELIMIT="7")
    assert (found.nodes, found.partition, found.limit_s, found.exclusive) == (4, "fast", 420, True)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("-N2 --gpus-per-node=4", 4),
        ("-N2 -G 8", 4),
        ("-N2 --gpus=h100:8", 4),
        ("-N2 -n4 --gpus-per-task=3", 6),
        ("-N2 --gres=none", 0),
        ("-N2", 0),
    ],
)
def test_gpus_on_each_node(words: str, gpus: int) -> None:
    assert ask(words).gpus == gpus
    assert not ask(words).no_wish


@pytest.mark.parametrize(
    ("words", "cpus"),
    [("-N2 -n5", 3), ("-N2 -n5 -c2", 6), ("-N2 --ntasks-per-node=4", 4), ("", 1), ("-N1 -c9", 9)],
)
def test_cpus_on_each_node(words: str, cpus: int) -> None:
    assert ask(words).cpus == cpus


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("-N2 -w n1", "named"),
        ("-N2 -F hosts", "named"),
        ("-N2-4", "left open"),
        ("-N2-", "left open"),
        ("-n8", "left open"),
        ("-G16", "left open"),
        ("-N4 -n2", "fewer"),
        ("-N2 -M other", "cluster"),
        ("-N2 -p a,b", "partitions"),
        ("-N2 --reservation=r", "reservation"),
        ("-N2 --switches=1", "--switches"),
        ("-N2 -C 'a|b'", "features"),
        ("-N2 -C '[a*2]'", "features"),
        ("-N2 -G3", "same number"),
        ("-N2 --gres=gpu:1,shard:2", "GPUs"),
        ("-N2 --exclusive=user", "exclusive"),
        ("-N2 -x ./file", "file"),
        ("-N2 -x 'n[0-'", "nodes"),
        ("-N2 -m arbitrary", "arbitrary"),
        ("-N2 --contiguous", "contiguous"),
        ("-N2 --newest-option=3", "--newest-option"),
        ("-N2 -%", "not known"),
        ("-N2 --segment=1", "--segment"),
        ("-N2 --spread-segments", "--segment"),
        ("-N2 --tres-per-task=gres/gpu:1", "--tres-per-task is not weighed"),
        ("-N two", "nodes"),
        ("-N2 -t soon", "time"),
        ("-N2 --mem=lots", "memory"),
        ("-N2 --test-only", "nothing is submitted"),
        ("-N2 -s", "shares"),
    ],
)
def test_what_is_not_understood_is_said_and_wishes_nothing(words: str, reason: str) -> None:
    assert reason in ask(words).no_wish


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_CLUSTERS",
        "SBATCH_REQ_SWITCH",
        "SLURM_HOSTFILE",
        "SBATCH_RESERVATION",
        "SBATCH_SEGMENT_SIZE",
        "SBATCH_TRES_PER_TASK",
    ],
)
def test_variables_choose_too(name: str) -> None:
    assert ask("-N2", "", **{name: "1"}).no_wish


def test_a_job_of_several_components() -> None:
    assert ask_of(SBATCH.parse(["-N2"]), SBATCH.parse([]), {}, unfold, het=True).no_wish


@pytest.mark.parametrize("words", ["-N2 -b now+1hour", "-N2 -d afterok:7", "-N2 -H"])
def test_jobs_that_start_later(words: str) -> None:
    assert ask(words).later
    assert not ask("-N2 -b now").later


def test_an_array_and_whole_nodes() -> None:
    assert ask("-N2 -a 0-9").array
    assert ask("-N2 --mem=0").exclusive


def test_excluded_nodes_are_unfolded() -> None:
    assert ask("-N2 -x 'n[0-2],m1'").excluded == ("m1", "n0", "n1", "n2")


WORDS = "-N4 -N -w n1 --gres gpu:8 -t 1-0 --mem=4G -C a --foo -x n[ job.sh = -- -a"


@given(st.lists(st.sampled_from(WORDS.split())))
def test_any_command_line_is_an_ask_or_a_reason(words: list[str]) -> None:
    found = ask_of(SBATCH.parse(words), SBATCH.parse([]), {}, unfold)
    assert found.no_wish or found.nodes > 0
