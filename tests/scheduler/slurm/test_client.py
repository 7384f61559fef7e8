"""The verbs: which command each becomes, and what becomes of Slurm's refusals."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.scheduler.slurm.client import JobVanishedError, NodeOrder, Slurm
from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.slurm.states import SlurmTextError

if TYPE_CHECKING:
    from collections.abc import Sequence

JOB = JobAddress.of_label("7_3")
RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8"


@dataclass
class Recorder:
    """Answers each command with a text, or refuses it, and keeps what it was asked."""

    answer: str = ""
    refusal: str = ""
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        self.asked.append(list(argv))
        if self.refusal:
            raise CommandError(argv, 1, self.refusal)
        separators = [found for word in argv for found in re.findall("~[0-9a-f]{16}~", word)]
        return self.answer.replace("@@@", separators[0]) if separators else self.answer


def test_jobs_are_read_with_a_separator_nobody_can_guess() -> None:
    run = Recorder((RECORDED / "4-names" / "squeue-O.txt").read_text())
    slurm = Slurm(run)
    assert slurm.jobs() == slurm.jobs(user="")
    assert run.asked[0] != run.asked[1]
    assert slurm.job(1).nodes == ("n0", "n2")


@pytest.mark.parametrize("run", [Recorder(), Recorder(refusal="slurm_load_jobs error: Invalid job id specified")])
def test_a_job_slurm_forgot(run: Recorder) -> None:
    with pytest.raises(JobVanishedError) as caught:
        Slurm(run).job(99)
    assert caught.value.job == 99


def test_other_refusals_keep_slurms_words() -> None:
    with pytest.raises(CommandError, match="Unable to contact"):
        Slurm(Recorder(refusal="Unable to contact slurm controller")).job(99)


def test_requeue_of_a_job_that_waits_already_is_done() -> None:
    assert Slurm(Recorder()).requeue(JOB)
    assert not Slurm(Recorder(refusal="Job is pending execution for job 7")).requeue(JOB)
    with pytest.raises(CommandError):
        Slurm(Recorder(refusal="Access/permission denied")).requeue(JOB)


def test_node_orders_and_job_updates_are_argument_lists() -> None:
    run = Recorder()
    slurm = Slurm(run)
    slurm.update_node("n1", NodeOrder.DRAIN, "deeplink: a b; c")
    slurm.update_job(JOB, ExcNodeList="n1,n2", StartTime="now")
    slurm.nodes(["n1", "n2"])
    assert run.asked == [
        ["scontrol", "update", "nodename=n1", "state=drain", "reason=deeplink: a b; c"],
        ["scontrol", "update", "jobid=7_3", "ExcNodeList=n1,n2", "StartTime=now"],
        ["scontrol", "show", "node", "--oneliner", "n[1-2]"],
    ]


def test_submit_returns_the_id_of_federated_answers_too() -> None:
    assert Slurm(Recorder("12;cluster\n")).submit(["x.sh"]) == 12
    with pytest.raises(SlurmTextError):
        Slurm(Recorder("sbatch: hm\n")).submit(["x.sh"])


def test_of_an_array_each_task_is_told_by_itself() -> None:
    """The task that started last has the array's own id, by which squeue selects all tasks (as recorded)."""
    said = "2@@@n1@@@\n3@@@n2@@@\n1@@@n3@@@\n"
    assert Slurm(Recorder(said)).comment(1) == "n3"


def test_the_cluster_has_a_name() -> None:
    said = "Configuration data as of now\nAccountingStorageHost   = localhost\nClusterName             = demo\n"
    assert Slurm(Recorder(said)).cluster_name() == "demo"
    with pytest.raises(SlurmTextError):
        Slurm(Recorder("AccountingStorageHost = localhost\n")).cluster_name()
