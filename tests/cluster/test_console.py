"""The console beside a real Slurm: what it shows is so, and a dead controller is said."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deeplink.console.collect import QUERY_S, Collector, ConsoleSettings, SourceState
from deeplink.console.feed import encode
from deeplink.console.jobs import Mood
from deeplink.console.nodes import ShownHealth
from deeplink.console.snapshot import ConsoleSnapshot, build
from deeplink.core.text import printable
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Phase
from deeplink.scheduler.slurm.client import NodeOrder, Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import submit
from tests.hostile import NAMES
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]


def shown(collector: Collector) -> ConsoleSnapshot:
    collector.refresh_slurm()
    return build(collector.readings())


def until(
    collector: Collector, question: Callable[[ConsoleSnapshot], bool], bound_s: float = LIMIT_S
) -> ConsoleSnapshot:
    end = time.monotonic() + bound_s
    while True:
        snapshot = shown(collector)
        if question(snapshot):
            return snapshot
        assert time.monotonic() < end, snapshot.headline
        time.sleep(0.2)


def test_a_name_of_foreign_bytes_is_shown_and_freezes_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    slurm = Slurm(sandbox.runner())
    jobs = {slurm.submit([f"--job-name={name}", "--hold", "--wrap", "true"]): name for name in NAMES}
    collector = Collector(ConsoleSettings(journal=tmp_path / "none"), slurm=slurm)
    snapshot = shown(collector)
    assert {row.id: row.name for row in snapshot.jobs if row.id in jobs} == {
        job: printable(name) for job, name in jobs.items()
    }
    assert json.loads(encode(snapshot.document()))
    job = next(job for job, name in jobs.items() if "\udce9\x1b" in name)
    told = sandbox.run(CTL, ["deeplink", "status", str(job)])
    assert printable(jobs[job]) in told.stdout, told
    sandbox.run(CTL, ["scancel", *map(str, jobs)])


def test_a_job_of_any_name_is_started_and_no_log_has_its_escapes(sandbox: Sandbox) -> None:
    jobs = [
        submit(sandbox, f"-N1 --job-name={shlex.quote(name)}", "deeplink run --nproc-per-node 1 -- true")
        for name in NAMES
    ]
    for job in jobs:
        assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
        assert job.output().replace("\n", "").isprintable()


def test_a_job_put_back_and_held_is_held_from_the_first_look_on(sandbox: Sandbox, tmp_path: Path) -> None:
    slurm = Slurm(sandbox.runner())
    job = slurm.submit(["-N1", "--requeue", "--wrap", "trap 'sleep 2; exit 1' TERM; sleep 600 & wait"])
    with Journal(tmp_path / "watch.sqlite") as journal:
        journal.record_beat(Beat(attempt=Attempt(int(job), 0, 0), phase=Phase.FAILED), time.time())
        collector = Collector(ConsoleSettings(journal=journal.path, interval_s=0.2), slurm=slurm)

        def state(now: ConsoleSnapshot) -> str:
            return next(each.slurm_state for each in now.jobs if each.id == job)

        until(collector, lambda now: state(now) == "RUNNING", 3 * LIMIT_S)
        slurm.run(["scontrol", "requeuehold", str(job)])
        seen: dict[str, tuple[str, str]] = {}

        def look(now: ConsoleSnapshot) -> bool:
            seen.update({each.slurm_state: (each.phase, each.remedy) for each in now.jobs if each.id == job})
            return state(now) == "PENDING"

        until(collector, look, 3 * LIMIT_S)
    assert set(seen.values()) == {("", f"held: `scontrol release {job}` lets it start")}, seen
    slurm.run(["scancel", str(job)])


def test_nodes_jobs_and_the_death_of_a_node_and_of_the_controller(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    cluster = fresh_sandbox(Shape(spines=2, leaves=1, nodes_per_leaf=2))
    asked = cluster.runner()

    def bounded(argv: Sequence[str], /, *, timeout_s: float = QUERY_S) -> str:
        return asked(argv, timeout_s=timeout_s)

    names = list(cluster.nodes)
    collector = Collector(ConsoleSettings(journal=tmp_path / "none", interval_s=0.2), slurm=Slurm(bounded))
    first = until(collector, lambda now: bool(now.nodes and now.switches))
    assert first.cluster
    assert [node.name for node in first.nodes] == names
    assert {node.health for node in first.nodes} == {ShownHealth.IDLE}
    assert {node.gpus for node in first.nodes} == {cluster.shape.gpus}
    assert first.headline.mood is Mood.GOOD
    levels = {switch.name: switch.level for switch in first.switches}
    assert {levels[node.switch] for node in first.nodes} == {0}
    assert len({node.switch for node in first.nodes}) == 2

    admin = Slurm(cluster.runner(root=True))
    job = Slurm(cluster.runner()).submit(["-N2", "--wrap", "sleep 600"])
    busy = until(collector, lambda now: sum(node.job == job for node in now.nodes) == 2)
    assert [each.slurm_state for each in busy.jobs] == ["RUNNING"]
    idle = next(node.name for node in busy.nodes if node.job is None)
    admin.update_node(idle, NodeOrder.DRAIN, "ECC errors | GPU 0")
    drained = until(collector, lambda now: any(node.health is ShownHealth.DRAINED for node in now.nodes))
    assert next(node.reason for node in drained.nodes if node.name == idle) == "ECC errors | GPU 0"

    victim = next(node.name for node in busy.nodes if node.job == job)
    cluster.crash(victim)
    gone = until(
        collector, lambda now: any(node.health in {ShownHealth.SILENT, ShownHealth.DOWN} for node in now.nodes)
    )
    assert gone.headline.mood is Mood.BAD

    controller = next(machine.daemon for machine in cluster.status() if machine.name == CTL)
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    dead = until(collector, lambda now: now.headline.text.startswith("Slurm stopped answering"))
    assert [node.name for node in dead.nodes] == names, "what was known stays"
    source = next(source for source in dead.sources if source.name == "nodes")
    assert source.state is SourceState.FAILING
    assert source.problem
    assert 0 < source.at_unix < dead.unix
