"""`deeplink run` in real allocations: order of ranks, exit codes, signals, and nodes that die."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from deeplink.core.types import NodeName, parse_members
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome
from deeplink.scheduler.slurm.client import NodeOrder, Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.lab.laboratory import Laboratory
from deeplink.scheduler.testbed.shape import CTL, Shape
from deeplink.scheduler.topology.rank_order import ring_crossings
from tests.cluster.jobs import Job, folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

RUN = "exec deeplink run --nproc-per-node 1"


def crossings(placed: list[tuple[str, str]]) -> int:
    leaf_of = {NodeName(node): leaf for node, leaf in placed}
    return ring_crossings([NodeName(node) for node, _ in placed], leaf_of.__getitem__)


def test_ranks_follow_the_fabric_where_slurms_own_do_not(sandbox: Sandbox) -> None:
    stock = 'srun bash -c "echo $SLURMD_NODENAME $SLURM_TOPOLOGY_ADDR $SLURM_PROCID"'
    plain = submit(sandbox, "-N8", stock.replace("$", r"\$"))
    ours = submit(sandbox, "-N8", f"{RUN} -- {{train}} 3")
    assert ours.await_end().state is JobState.COMPLETED, ours.told()
    plain.await_end()
    lines = sorted((line.split() for line in plain.output().splitlines()), key=lambda words: int(words[2]))
    assert crossings([(node, address.split(".")[-2]) for node, address, _ in lines]) == 8
    placed = ours.placed(f"{ours.id}.0.0")
    assert len(placed) == 8
    assert crossings(placed) == 2
    begun = ours.events("attempt-started")[0]
    assert (begun["ring_crossings"], begun["ring_crossings_stock"]) == (2, 8)
    assert [node for node, _ in placed] == begun["nodes"]
    members = parse_members((ours.folder / f"{ours.id}.0.0.members").read_text())
    assert [(member.name, member.domain) for member in members] == placed, "copies of shards are to lie apart"
    assert ours.events("ended")[0]["code"] == 0


def test_many_ranks_per_node_and_the_failed_ranks_own_exit_code(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    (folder / "fail").write_text("3 2 7")
    script = "deeplink run --no-retry -- {train} 500; echo code=$?; exit 7"
    job = submit(sandbox, "-N2 --gres=gpu:2", script, folder=folder)
    assert job.await_end().state is JobState.FAILED
    assert "code=7" in job.output(), job.told()
    assert len(job.placed(f"{job.id}.0.0")) == 4, "two ranks on each node, one per GPU"
    ended = job.events("ended")[0]
    assert ended["code"] == 7
    assert "rank 3" in ended["because"]
    assert not job.events("relaunch"), "none was wanted"


def test_a_second_run_of_one_script_is_a_newer_attempt(sandbox: Sandbox) -> None:
    script = "deeplink run -- {train} 3 && deeplink run -- {train} 6"
    job = submit(sandbox, "-N2 --ntasks-per-node=2 --cpus-per-task=2", script)
    assert job.await_end().state is JobState.COMPLETED, job.told()
    begun = [event["attempt"] for event in job.events("attempt-started")]
    assert begun == [f"{job.id}.0.0", f"{job.id}.0.1"]
    assert [event["attempts"] for event in job.events("ended")] == [1, 1]
    assert len(job.placed(f"{job.id}.0.1")) == 4, "two tasks per node, as the job asked"


def test_signals_reach_the_ranks_and_their_answer_comes_back(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2", f"{RUN} -- {{train}} 5000")
    until(lambda: len([*job.folder.glob(f"{job.id}.0.0.rank*")]) == 2, LIMIT_S, job.told)  # both heed signals
    sandbox.run(CTL, ["scancel", "--batch", "--signal=USR1", str(job.id)])
    noted = job.folder / "signals"
    until(lambda: noted.exists() and len(noted.read_text().split("\n")) > 2, LIMIT_S, job.told)
    assert sorted(noted.read_text().split()) == ["0", "1", "SIGUSR1", "SIGUSR1"]
    sandbox.run(CTL, ["scancel", "--batch", "--signal=TERM", str(job.id)])
    row = job.await_end()
    assert row.state is JobState.FAILED
    assert job.events("ended")[0]["code"] == 9, job.told()
    # One that is slow to end may get a second one from srun, which ends the others when the first one has failed.
    assert {f"{rank} {signal.SIGTERM.name}" for rank in (0, 1)} <= set(noted.read_text().splitlines())


@pytest.mark.parametrize("how", ["power off", "cut"])
def test_a_lost_node_costs_seconds_where_there_is_a_spare(fresh_sandbox: Callable[..., Sandbox], how: str) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    job = submit(cluster, "-N4 --no-kill --gres=gpu:2", f"{RUN} --spares 1 -- {{train}} 5000")
    job.await_event("first-step")
    until((job.folder / "state").exists, LIMIT_S, job.told)
    begun = job.events("attempt-started")[0]
    victim = begun["nodes"][-1]
    if how == "cut":
        cluster.cut(victim)
    else:
        cluster.crash(victim)
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"]
    assert begun["spares"][0] in again["nodes"]
    first = job.await_event("first-step", count=2)
    assert first["step"] > 5, "it went on where it was saved"
    assert job.row().state is JobState.RUNNING
    assert job.row().restarts == 0, "the same job, the same run"
    if how == "cut":
        cluster.heal(victim)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert job.events("ended")[0]["attempts"] == 2
    assert {node for node, _ in job.placed(f"{job.id}.0.1")} == set(again["nodes"])
    incident = recorded(job)
    assert (incident.kind, incident.node, incident.action) == ("node-silent", victim, "relaunch")
    assert incident.outcome is IncidentOutcome.RECOVERED
    assert incident.began_unix <= incident.detected_unix <= incident.acted_unix <= incident.recovered_unix


def test_a_job_submitted_by_a_requeued_one_is_its_own_first_run(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    handed_on = "env SLURM_RESTART_COUNT=1 sbatch"
    job = submit(cluster, "-N2 --no-kill --requeue", f"{RUN} -- {{train}} 5000", program=handed_on)
    begun = job.await_event("attempt-started")
    assert (begun["attempt"], job.row().restarts) == (f"{job.id}.0.0", 0)
    job.await_event("first-step")
    cluster.crash(next(node for node in begun["nodes"] if node != job.row().batch_host))
    until(lambda: job.row().restarts == 1, LIMIT_S, job.told)
    assert not job.events("elsewhere")


@pytest.mark.parametrize(
    ("more", "spares", "starts_again"),
    [("--requeue", 0, True), ("--requeue", 1, True), ("--no-requeue", 0, False)],
)
def test_a_node_that_is_lost_before_its_agent_comes_up_is_no_fault_of_the_ranks(
    fresh_sandbox: Callable[..., Sandbox], more: str, spares: int, *, starts_again: bool
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    folder = folder_of(cluster)
    wait = f"touch {folder}/begun; while [ ! -e {folder}/go ]; do sleep 0.1; done"
    job = submit(
        cluster, f"-N3 --no-kill {more}", f"{wait}\n{RUN} --spares {spares} -- {{train}} 30", folder=folder
    )
    until((folder / "begun").exists, LIMIT_S, job.told)
    row = job.row()
    victim = next(node for node in row.nodes if node != row.batch_host)
    cluster.crash(victim)
    (folder / "go").touch()
    if not starts_again:
        assert job.await_end(2 * LIMIT_S).state is JobState.FAILED, job.told()
        assert job.events("ended")[0]["code"] == 75
        assert victim in job.events("ended")[0]["because"]
        return
    until(lambda: job.row().restarts == 1 or job.events("attempt-started"), 2 * LIMIT_S, job.told)
    if job.row().restarts:
        job.start_again()
    assert victim not in job.await_event("attempt-started")["nodes"]
    assert job.await_end(2 * LIMIT_S).state is JobState.COMPLETED, job.told()
    assert job.row().restarts == 1 or spares


@pytest.mark.parametrize("others", [1, 0])
def test_a_resting_node_that_was_drained_is_used_last_and_that_is_said(
    fresh_sandbox: Callable[..., Sandbox], others: int
) -> None:
    cluster = fresh_sandbox(Shape.of(4 + others))
    spares = 1 + others
    job = submit(cluster, f"-N{4 + others} --no-kill", f"{RUN} --spares {spares} -- {{train}} 5000")
    job.await_event("first-step")
    begun = job.events("attempt-started")[0]
    drained, victim = begun["spares"][0], begun["nodes"][-1]
    Slurm(cluster.runner(root=True)).update_node(drained, NodeOrder.DRAIN, "fan 2 is loud")
    cluster.crash(victim)
    again = job.await_event("attempt-started", count=2)
    assert victim not in again["nodes"]
    said = job.await_event("drained")
    assert said["nodes"] == [drained]
    if others:
        assert drained not in again["nodes"]
        assert begun["spares"][1] in again["nodes"]
        assert said["because"] == "drained: fan 2 is loud; left out"
    else:
        assert drained in again["nodes"]
        assert said["because"] == "drained: fan 2 is loud; used all the same, no other node is left"
    assert said["because"] in job.output()
    job.await_event("first-step", count=2)
    assert job.row().restarts == 0
    cluster.run(CTL, ["scancel", str(job.id)])


def recorded(job: Job) -> Incident:
    path = job.cluster.home / ".local/state/deeplink/jobs" / str(job.id) / "journal.sqlite"
    with Journal(path, read_only=True) as journal:
        (incident,) = journal.incidents()
    return incident


def test_without_a_spare_slurm_is_asked_once_it_has_given_the_node_up(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(3))
    job = submit(cluster, "-N2 --no-kill --requeue --gres=gpu:2", f"{RUN} -- {{train}} 5000")
    victim = job.await_event("attempt-started")["nodes"][-1]
    job.await_event("first-step")
    cluster.crash(victim)
    job.await_event("stranded")
    # Slurm ends us, and the command that asked it, as soon as it has heard: nothing of ours need be told.
    until(lambda: job.row().restarts == 1 and job.row().state is JobState.PENDING, 3 * LIMIT_S, job.told)
    assert job.events("ended")[0]["code"] == 75
    used = {row.name: row.gpus_used for row in Slurm(cluster.runner()).nodes(details=True)}
    assert set(used.values()) == {0}, f"no GPU leaked: {used}"
    cluster.run(CTL, ["scancel", str(job.id)])


def test_ranks_that_fail_again_at_one_step_have_the_job_held_not_looping(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    (folder / "fail").write_text("0 12 5")
    job = submit(sandbox, "-N1 --requeue --open-mode=append", f"{RUN} -- {{train}} 60", folder=folder)
    again = job.await_event("attempt-started", count=2)
    assert job.await_event("relaunch")["because"].startswith("rank 0 on ")
    ended = job.await_event("ended")
    assert (ended["code"], again["nodes"]) == (5, job.events("attempt-started")[0]["nodes"])
    assert "exit code 5 again at step 12: the application" in ended["because"]
    until(lambda: job.row().state is JobState.PENDING, LIMIT_S, job.told)
    assert "held" in job.row().reason
    assert "exit code 5 again at step 12" in Slurm(sandbox.runner()).comment(job.id)
    (folder / "fail").unlink()
    sandbox.run(CTL, ["scontrol", "release", str(job.id)])
    # Whoever mends something takes longer than Slurm holds any requeued job.
    job.start_again()
    assert job.await_event("first-step", count=3)["step"] > 10, "it went on where it was saved"
    assert job.await_end().state is JobState.COMPLETED, job.told()


def test_a_script_that_never_comes_to_a_step_fails_with_its_own_code(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N1 --requeue", f"{RUN} -- sh -c 'exit 7'")
    assert job.await_end().state is JobState.FAILED, job.told()
    assert job.events("ended")[0]["code"] == 7


def test_a_fast_reboot_that_slurm_overlooks_costs_seconds_without_a_spare(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    job = submit(cluster, "-N2 --no-kill", f"{RUN} -- {{train}} 5000")
    begun = job.await_event("attempt-started")
    until((job.folder / "state").exists, LIMIT_S, job.told)
    victim = begun["nodes"][-1] if begun["nodes"][-1] != job.row().batch_host else begun["nodes"][0]
    cluster.crash(victim)
    cluster.boot(victim)
    assert job.await_event("first-step", count=2)["step"] > 5, "it went on where it was saved"
    # It was missed, and found to be back; or, where it booted too fast to be missed, found to run another kernel.
    found = [*(event["rebooted"] for event in job.events("back")), *(e["because"] for e in job.events("relaunch"))]
    assert found in ([[victim]], [f"{victim} rebooted, and the ranks there are gone"]), job.told()
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert job.row().restarts == 0


def test_an_agent_that_is_killed_is_there_again_and_no_rank_notices(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N3 --no-kill", f"{RUN} -- {{train}} 5000")
    agents = job.await_event("agents-ready")["agents"]
    victim = job.await_event("attempt-started")["nodes"][1]
    job.await_event("first-step")
    port = agents[victim]["address"].rpartition(":")[2]

    def listening() -> bool:
        return f":{port} " in sandbox.run(victim, ["ss", "-ltn"]).stdout

    sandbox.run(victim, ["pkill", "-KILL", "-f", "deeplink node --job"])
    assert job.await_event("agents-again")["nodes"] == [victim]
    until(listening, LIMIT_S, job.told)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert not [*job.events("relaunch"), *job.events("late")], job.told()


def test_an_agent_whose_serving_process_is_killed_never_lets_go_of_its_port(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N3 --no-kill", f"{RUN} -- {{train}} 5000")
    agents = job.await_event("agents-ready")["agents"]
    victim = job.await_event("attempt-started")["nodes"][1]
    job.await_event("first-step")
    port = agents[victim]["address"].rpartition(":")[2]
    keeper, state = str(agents[victim]["pid"]), job.folder / "state"
    until(state.exists, LIMIT_S, job.told)
    before = int(state.read_text())
    sandbox.run(victim, ["pkill", "-KILL", "-P", keeper])
    assert f":{port} " in sandbox.run(victim, ["ss", "-ltn"]).stdout
    until(lambda: sandbox.run(victim, ["pgrep", "-P", keeper]).stdout, LIMIT_S, job.told)
    until(lambda: int(state.read_text()) >= before + 100, LIMIT_S, job.told)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert not [*job.events("relaunch"), *job.events("agents-again")], job.told()


def test_outside_of_a_job_the_remedy_is_named(sandbox: Sandbox) -> None:
    done = sandbox.run(CTL, ["deeplink", "run", "--", "true"])
    assert done.code == 2
    assert "sbatch" in done.stderr
    assert "--local" in done.stderr


def test_a_dry_run_says_where_ranks_would_run(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N5", "deeplink run --spares 1 --nproc-per-node 2 --dry-run -- python train.py 'a b'")
    job.await_end()
    output = job.output()
    assert "resting: " in output
    assert "ranks 0-1" in output
    (line,) = [line for line in output.splitlines() if "--distribution=arbitrary" in line]
    assert "--nodes" not in line, "from 24.11 on srun refuses both together"
    assert "python train.py 'a b'" in output
    assert not job.events()


@pytest.mark.parametrize("others", [1, 0])
def test_a_node_that_slurm_took_from_the_job_is_never_used_again_though_its_agent_answers(
    fresh_sandbox: Callable[..., Sandbox], others: int
) -> None:
    cluster = fresh_sandbox(Shape.of(4 + others))
    spares = 1 + others
    job = submit(cluster, f"-N{4 + others} --no-kill --gres=gpu:2", f"{RUN} --spares {spares} -- {{train}} 5000")
    job.await_event("first-step")
    begun = job.events("attempt-started")[0]
    taken, victim = begun["spares"][0], begun["nodes"][-1]
    Laboratory(cluster).inject("slurmd-killed", taken)  # nobody ends what runs there
    Slurm(cluster.runner(root=True)).update_node(taken, NodeOrder.DOWN, "fan 2 is loud")
    until(lambda: taken not in job.row().nodes, LIMIT_S, job.told)
    assert job.row().state is JobState.RUNNING
    cluster.crash(victim)
    said = job.await_event("taken")
    assert said["nodes"] == [taken]
    assert said["because"] == "down: fan 2 is loud; Slurm has taken it from the job, it is not used any more"
    assert said["because"] in job.output()
    if others:
        again = job.await_event("attempt-started", count=2)
        assert taken not in again["nodes"]
        assert taken not in again["spares"]
        assert begun["spares"][1] in again["nodes"]
        job.await_event("first-step", count=2)
        assert job.row().restarts == 0
    else:
        job.await_event("stranded")
        until(lambda: job.row().restarts == 1, LIMIT_S, job.told)
        assert [event["attempt"] for event in job.events("attempt-started")] == [f"{job.id}.0.0"]
    cluster.run(CTL, ["scancel", str(job.id)])
