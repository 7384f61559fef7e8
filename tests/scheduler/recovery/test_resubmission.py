"""A submission that is made again: the same, but for what makes it another job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.core.types import NodeName
from deeplink.scheduler.recovery.resubmission import MOST_GENERATIONS, resubmit_argv, resubmit_env, why_not
from deeplink.scheduler.slurm.submission import NAME, SubmissionError, Submitted, keep, kept

N1 = NodeName("n1")
PLAIN = Submitted(
    argv=("sbatch", "--requeue", "-N", "4", "-xn9", "--wait", "--comment", "mine", "train.sh", "--comment=no"),
    script="#!/bin/sh\n#SBATCH --gres=gpu:2\necho \udcff\n",
    cwd="/home/ada",
    env={"PATH": "/bin", "SBATCH_WAIT": "1", "ODD": "\udcfe"},
)


def test_what_was_kept_is_read_again_and_is_the_users_alone(tmp_path: Path) -> None:
    assert kept(tmp_path / "17") is None
    keep(tmp_path / "17", PLAIN)
    assert kept(tmp_path / "17") == PLAIN
    assert (tmp_path / "17" / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "argv": []}'])
def test_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(SubmissionError, match=r"no record of a submission"):
        kept(tmp_path)


def test_it_is_submitted_as_before_held_off_the_lost_node_and_with_the_token() -> None:
    argv = resubmit_argv(
        PLAIN,
        script="/s/resubmitted.sh",
        name="bert",
        comment="mine",
        mark="deeplink: t",
        excluded=[N1, NodeName("n9")],
    )
    assert argv == [
        "sbatch",
        "--parsable",
        "--hold",
        "--job-name=bert",
        "--comment=mine | deeplink: t",
        "--exclude=n[1,9]",
        "--requeue",
        "-N",
        "4",
        "/s/resubmitted.sh",
        "--comment=no",
    ]
    assert resubmit_env(PLAIN) == {"PATH": "/bin", "ODD": "\udcfe"}


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ("sbatch", "-b", "now+8hours", "train.sh")},
        {"script": "#!/bin/sh\n#SBATCH --begin=now+8hours\n", "argv": ("sbatch", "train.sh")},
    ],
)
def test_one_that_had_to_wait_for_its_time_does_not_wait_for_it_again(changes: dict[str, object]) -> None:
    late = replace(PLAIN, **changes)  # type: ignore[arg-type]
    argv = resubmit_argv(late, script="/s", name="x", comment="", mark="deeplink: t", excluded=[])
    assert [word for word in argv if "begin" in word or "hours" in word] == ["--begin=now"]


def test_a_wrapped_command_needs_no_script() -> None:
    wrapped = replace(PLAIN, argv=("sbatch", "-N4", "--wrap", "deeplink run -- x"), script=None)
    argv = resubmit_argv(wrapped, script="/no", name="wrap", comment="", mark="deeplink: t", excluded=[])
    assert argv[-3:] == ["-N4", "--wrap", "deeplink run -- x"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"argv": ("sbatch", "--array=1-4", "x.sh")}, "array"),
        ({"script": "#!/bin/sh\n#SBATCH -a 0-3\n"}, "array"),
        ({"env": {"SBATCH_ARRAY_INX": "1-4"}}, "array"),
        ({"argv": ("sbatch", "-d", "afterok:3", "x.sh")}, "dependency"),
        ({"argv": ("sbatch", "-N1", ":", "-N2", "x.sh")}, "several components"),
        ({"argv": ("sbatch", "-w", "n[1-2]", "x.sh")}, "named the lost node"),
        ({"argv": ("sbatch", "-w", "n2", "x.sh")}, ""),
        ({"generation": MOST_GENERATIONS}, "times"),
    ],
)
def test_what_cannot_be_the_same_again_is_not_submitted_anew(changes: dict[str, object], reason: str) -> None:
    said = why_not(replace(PLAIN, **changes), {N1})  # type: ignore[arg-type]
    assert reason in said
    assert bool(reason) is bool(said)
