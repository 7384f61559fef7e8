"""The planner beside a real Slurm: what holds a job is taken back, a lost race is mended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

STATE = "plan-tests"
"""A state folder of its own, below the home: submissions of other tests have started a planner of theirs."""


def submitted(cluster: Sandbox, *options: str) -> int:
    argv = ["sbatch", "--parsable", "--exclusive", "-o", "/dev/null", *options, "--wrap", "sleep 100"]
    done = cluster.run(CTL, argv)
    assert done.code == 0, done.stderr
    return int(done.stdout)


def noted(cluster: Sandbox, job: int, decision: Decision) -> None:
    line = Recorded(unix=0.0, by="sbatch", ask=Ask(nodes=2, exclusive=True), decision=decision)
    told = f"mkdir -p {folder(cluster, job)} && cat >> {folder(cluster, job)}/decisions.jsonl"
    assert cluster.run(CTL, ["bash", "-c", told], stdin=f"{json.dumps(line.document())}\n").code == 0


def folder(cluster: Sandbox, job: int) -> Path:
    return cluster.home / STATE / "jobs" / str(job)


def state(cluster: Sandbox, job: int) -> str:
    return cluster.run(CTL, ["squeue", "-h", "-o", "%T %r", "-j", str(job)]).stdout.strip()


def once(cluster: Sandbox, job: int) -> dict[str, object]:
    env = {"DEEPLINK_STATE": str(cluster.home / STATE)}
    done = cluster.run(CTL, ["deeplink", "plan", "--once", "--json", "--job", str(job)], env=env)
    assert done.code == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture
def jobs(sandbox: Sandbox) -> list[int]:
    """All nodes but n0 and n1, which hang on different leaves, are taken; the jobs to be ended."""
    cleared(sandbox)
    made = [submitted(sandbox, "-N6", "-w", "n[2-7]")]
    until(lambda: state(sandbox, made[0]).startswith("RUNNING"), LIMIT_S)
    return made


def cleared(cluster: Sandbox) -> None:
    cluster.run(CTL, ["bash", "-c", "scancel -u $USER"])
    until(lambda: not cluster.run(CTL, ["squeue", "-h"]).stdout, LIMIT_S)


def test_a_job_that_few_switches_hold_starts_in_the_round_that_sees_it(sandbox: Sandbox, jobs: list[int]) -> None:
    job = submitted(sandbox, "-N2", "--switches=1@00:10:00")
    # Seen before Slurm has first looked: taken back by a zero, the job would wait for ever.
    noted(sandbox, job, Decision(kind=HintKind.SWITCHES, why=Why.SCATTERED, words="", switches=1, patience_s=600))
    try:
        seen = once(sandbox, job)
        assert (seen["deed"], seen["changes"]) == ("drop", {"Switches": "2@00:00:00"})
        until(lambda: state(sandbox, job).startswith("RUNNING"), LIMIT_S, lambda: state(sandbox, job))
    finally:
        cleared(sandbox)


def test_a_lost_race_is_mended_in_one_round_and_on_the_record(sandbox: Sandbox, jobs: list[int]) -> None:
    job = submitted(sandbox, "-N2", "-w", "n[0,2]", "--comment=deeplink-wish=n[0,2]")
    wish = Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=(NodeName("n0"), NodeName("n2")))
    noted(sandbox, job, wish)
    try:
        until(lambda: "Resources" in state(sandbox, job), LIMIT_S, lambda: state(sandbox, job))
        seen = once(sandbox, job)
        assert (seen["deed"], seen["changes"]) == ("drop", {"ReqNodeList": "", "Comment": ""})
        until(lambda: state(sandbox, job).startswith("RUNNING"), LIMIT_S, lambda: state(sandbox, job))
        lines = (folder(sandbox, job) / "decisions.jsonl").read_text().splitlines()
        last = Recorded.parse(json.loads(lines[-1]))
        assert (last.by, last.decision.kind) == ("plan", HintKind.NOTHING)
        assert last.decision.words == "Slurm has not started it there (Resources)"
    finally:
        cleared(sandbox)
