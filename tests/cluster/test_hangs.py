"""A rank that hangs in a real job: found by what the job has shown, asked where it is, and started elsewhere."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.demo.story import has_torch
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.lab.scene import agents_on, is_verb, processes_on, ranks_on
from deeplink.scheduler.testbed.processes import arguments
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
Record = Callable[[str, object], None]
STANDS_STILL_S = 70.0  # longer than any patience with a silent node
STOPPED_AT = 80
"""Ten reports of four ranks each are known by then: enough to learn from."""


def test_a_stopped_rank_costs_seconds_and_its_stack_is_kept(sandbox: Sandbox, record_property: Record) -> None:
    script = "exec deeplink run --nproc-per-node 1 --spares 1 -- {train} 5000"
    job = submit(sandbox, "-N5 --no-kill", script)
    state = job.folder / "state"
    until(lambda: state.exists() and int(state.read_text()) >= STOPPED_AT, LIMIT_S, job.told)
    victim = job.events("attempt-started")[0]["nodes"][2]
    for who in ranks_on(sandbox, victim)[2]:
        who.send(signal.SIGSTOP)
    stopped = time.time()

    relaunch = job.await_event("relaunch")
    assert "rank 2 is stopped by a signal" in relaunch["because"]
    assert f"rank 2 on {victim} is stopped (T)" in relaunch["because"]
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"], "the spare instead"
    first = job.await_event("first-step", count=2)
    assert first["step"] > 5, "it went on where it was saved"
    record_property(
        "stopped to relaunch, to first step (s)", (relaunch["unix"] - stopped, first["unix"] - stopped)
    )
    assert job.let_end().state is JobState.COMPLETED, job.told()

    (stacks,) = job.events("stacks")
    assert (stacks["blamed"], stacks["silent"]) == ([2], [])
    text = Path(stacks["file"]).read_text()
    assert [f"=== rank {rank} on" in text for rank in range(4)] == [True] * 4
    assert text.count("<module> (train.py") == 4, "where each of them is, the stopped one too"
    with Journal(Path(stacks["file"]).parent / "journal.sqlite", read_only=True) as journal:
        (incident,) = journal.incidents()
        assert (incident.kind, incident.action, incident.outcome) == (
            "ranks-hung",
            "relaunch",
            IncidentOutcome.RECOVERED,
        )
        assert [stack.state for stack in journal.stacks(incident.id)][2] == "T"


def test_an_agent_that_stands_still_while_its_ranks_go_on_restarts_nothing(
    sandbox: Sandbox, record_property: Record
) -> None:
    script = "exec deeplink run --nproc-per-node 1 --spares 1 -- {train} 5000"
    job = submit(sandbox, "-N4 --no-kill", script)
    state = job.folder / "state"
    until(lambda: state.exists() and int(state.read_text()) >= STOPPED_AT, LIMIT_S, job.told)
    victim = job.events("attempt-started")[0]["nodes"][2]
    agents = [who for who in processes_on(sandbox, victim) if is_verb(arguments(who.pid), "node")]
    assert agents, job.told()
    for who in agents:
        who.send(signal.SIGSTOP)
    stopped, before = time.time(), int(state.read_text())
    try:
        until(lambda: time.time() - stopped >= STANDS_STILL_S or bool(job.events("relaunch")), 2 * STANDS_STILL_S)
    finally:
        for who in agents:
            who.send(signal.SIGCONT)
    record_property("steps made meanwhile", int(state.read_text()) - before)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert len(job.events("attempt-started")) == 1, job.told()


SRUN_PORTS = "50000-51000"
DROP = """set -e
rule() { ip rule add pref "$1" ipproto tcp "$2" "$3" lookup main; }
for port in 6817-6819 {srun} {agents}; do
    rule 50 dport "$port"
    rule 51 sport "$port"
done
ip rule add pref 60 ipproto tcp to {network} blackhole
"""


@pytest.mark.skipif(not has_torch(), reason="its ranks wait in torch's collectives")
def test_a_node_whose_ports_for_ranks_are_dropped_is_found_and_left_out(
    fresh_sandbox: Callable[..., Sandbox], record_property: Record
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    with cluster.layout.slurm_conf.open("a") as conf:
        conf.write(f"SrunPortRange={SRUN_PORTS}\n")
    assert cluster.run(CTL, ["scontrol", "reconfigure"], root=True).code == 0
    folder = folder_of(cluster)
    shutil.copy(Path(__file__).parent / "gloo_rank.py", folder / "train.py")
    script = "exec deeplink run --nproc-per-node 1 --spares 1 -- {train} 100000"
    job = submit(cluster, "-N4 --no-kill", script, folder=folder)
    state = job.folder / "state"
    until(lambda: state.exists() and int(state.read_text()) >= 2 * STOPPED_AT, LIMIT_S, job.told)
    nodes = job.events("attempt-started")[0]["nodes"]
    victim = next(node for node in nodes[:3] if node != job.row().batch_host)
    agents = " ".join(str(port) for node in cluster.nodes for port in agents_on(cluster, node))
    drop = DROP.replace("{srun}", SRUN_PORTS).replace("{agents}", agents).replace("{network}", "10.77.0.0/16")
    done = cluster.run(victim, ["sh", "-c", drop], root=True)
    assert done.code == 0, done
    dropped, reached = time.time(), int(state.read_text())

    relaunch = job.await_event("relaunch", 3 * LIMIT_S)
    assert f"{victim} is cut off" in relaunch["because"], job.told()
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"], "the spare instead"
    first = job.await_event("first-step", count=2)
    assert first["step"] >= reached - 5, "it went on where it was saved"
    seconds = [event["unix"] - dropped for event in (relaunch, again, first)]
    record_property("dropped to relaunch, to start, to first step (s)", seconds)
    assert not cluster.run(victim, ["ip", "rule", "del", "pref", "60"], root=True).code
    assert job.let_end().state is JobState.COMPLETED, job.told()
