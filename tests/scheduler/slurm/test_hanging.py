"""A Slurm that does not answer: every verb ends in its time, with the error that it says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.client import NodeOrder, Slurm
from deeplink.scheduler.slurm.command import CommandMissingError, CommandTimeoutError
from deeplink.scheduler.slurm.parse import JobAddress

JOB = JobAddress.of_label("1")
VERBS: dict[str, Callable[[Slurm], object]] = {
    "jobs": lambda slurm: slurm.jobs(),
    "job": lambda slurm: slurm.job(1),
    "columns": lambda slurm: slurm.columns(1, ["%k"]),
    "place": lambda slurm: slurm.place(1),
    "partition_nodes": lambda slurm: slurm.partition_nodes(["main"]),
    "nodes": lambda slurm: slurm.nodes(["n0"]),
    "topology": lambda slurm: slurm.topology(),
    "cluster_name": lambda slurm: slurm.cluster_name(),
    "submit": lambda slurm: slurm.submit(["--wrap", "true"]),
    "requeue": lambda slurm: slurm.requeue(JOB),
    "hold": lambda slurm: slurm.hold(JOB),
    "keep_only": lambda slurm: slurm.keep_only(JOB, ["n0"]),
    "comment": lambda slurm: slurm.comment(1),
    "release": lambda slurm: slurm.release(JOB),
    "comment_job": lambda slurm: slurm.comment_job(JOB, "why"),
    "comment_node": lambda slurm: slurm.comment_node("n0", "why"),
    "update_job": lambda slurm: slurm.update_job(JOB, StartTime="now"),
    "update_node": lambda slurm: slurm.update_node("n0", NodeOrder.RESUME),
    "cancel": lambda slurm: slurm.cancel(JOB),
    "complete": lambda slurm: slurm.complete(1, 0),
    "allocation": lambda slurm: slurm.allocation(1),
}


def test_every_verb_of_the_client_is_asked_here() -> None:
    public = {name for name, one in vars(Slurm).items() if callable(one) and not name.startswith("_")}
    assert public - {"run"} == VERBS.keys()


def test_commands_that_hang_are_ended_in_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scontrol", "squeue", "sinfo", "sbatch", "scancel", "ldd"):
        (tmp_path / name).write_text("#!/bin/sh\n/bin/sleep 60 &\nwait\n")  # the child of a child too
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = Slurm(run=partial(command.run, timeout_s=0.5))

    def raised(verb: Callable[[Slurm], object]) -> CommandTimeoutError:
        with pytest.raises(CommandTimeoutError) as caught:
            verb(slurm)
        return caught.value

    with ThreadPoolExecutor(len(VERBS)) as pool:
        for problem in pool.map(raised, VERBS.values()):
            assert problem.timeout_s == 0.5
            assert "scontrol ping" in problem.remedy
    assert not command._unfinished


def test_commands_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for verb in VERBS.values():
        with pytest.raises(CommandMissingError):
            verb(Slurm())
