"""What a launcher asks of Slurm about its own job; with the real Slurm: tests/cluster/test_run.py."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import agent_channel
from deeplink.scheduler.launch.backend import HeldRole
from deeplink.scheduler.launch.container import Container
from deeplink.scheduler.launch.environment import SLOTS_VARIABLE, Launch, NodeFacts, left_slots
from deeplink.scheduler.launch.launch_spec import Granted
from deeplink.scheduler.launch.rank_output import kept_folder
from deeplink.scheduler.launch.slurm_backend import SlurmBackend
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from tests.scheduler.slurm.answers import answer, job_answer
from tests.waiting import until

LOST = NodeName("n1")


def reach(_node: NodeName) -> grpc.Channel:
    return agent_channel("127.0.0.1:1", "t")


@dataclass
class Cluster:
    """Job 17 and node n1, as Slurm's commands tell of them."""

    node_state: str = "DOWN+NOT_RESPONDING"
    restarts: int = 0
    state: str = "RUNNING"
    nodes: str = "n[0-1]"
    requeued: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if argv[0] == "squeue":
            if "TimeLeft" in argv[-1]:
                return answer(argv, 17, "1:00:00", "N/A", "2026-11-20T17:01:31")
            return job_answer(argv, 17, state=self.state, restarts=self.restarts, nodes=self.nodes)
        if argv[1] == "show":
            return f"NodeName=n1 State={self.node_state}"
        self.requeued.append(argv[2])
        return ""


def backend(cluster: Cluster, restart: int = 0) -> SlurmBackend:
    nodes = (NodeName("n0"), LOST)
    return SlurmBackend(
        17, restart, "ada", "resnet", nodes, {"SLURM_JOB_ID": "17"}, Path("/state/17"), slurm=Slurm(cluster)
    )


def test_a_job_whose_lost_node_is_down_is_requeued() -> None:
    cluster = Cluster(restarts=2)
    assert backend(cluster, restart=2).requeue_if_down([LOST])
    assert cluster.requeued == ["17"]


@pytest.mark.parametrize(
    ("state", "restarts", "ours", "runs"),
    [
        ("RUNNING", 2, True, True),
        ("PENDING", 2, True, True),  # so says a controller that has just come up
        ("PENDING", 3, False, False),
        ("CANCELLED", 2, True, False),
    ],
)
def test_whose_the_job_is_and_whether_it_runs(state: str, restarts: int, *, ours: bool, runs: bool) -> None:
    word = backend(Cluster(state=state, restarts=restarts), restart=2).job_status()
    assert word is not None
    assert (word.ours, word.runs, word.left_s) == (ours, runs, 3600.0)


@pytest.mark.parametrize(
    "cluster", [Cluster(node_state="MIXED+NOT_RESPONDING"), Cluster(restarts=1), Cluster(state="PENDING")]
)
def test_never_while_a_node_is_only_unreachable_nor_by_an_older_run(cluster: Cluster) -> None:
    assert not backend(cluster).requeue_if_down([LOST])
    assert cluster.requeued == []


def test_a_lost_node_that_slurm_took_from_the_job_delays_no_requeue_though_it_is_in_service_again() -> None:
    cluster = Cluster(node_state="IDLE", nodes="n0")
    assert backend(cluster).requeue_if_down([LOST])
    assert cluster.requeued == ["17"]
    word = backend(cluster).nodes_status()
    assert word is not None
    assert word.taken == {LOST: "idle"}


@dataclass
class Ending(Cluster):
    """Takes the job back, and ends the very command that asked for it before it can say so; `later` once more."""

    later: int = 0

    @override
    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.requeued and self.later:
            self.later -= 1
            raise CommandError(argv, -15, "")
        said = super().__call__(argv, timeout_s=timeout_s)
        if argv[1] == "requeue":
            self.restarts, self.state = self.restarts + 1, "COMPLETING"
            raise CommandError(argv, -15, "")
        return said


@pytest.mark.parametrize("later", [0, 1])
def test_an_order_that_ends_its_own_command_was_heard(later: int) -> None:
    cluster = Ending(later=later, node_state="IDLE")
    nodes = (NodeName("n0"), LOST)
    slurm = Slurm(cluster)
    ours = SlurmBackend(
        17, 0, "ada", "resnet", nodes, {"SLURM_JOB_ID": "17"}, Path("/state/17"), slurm=slurm, clock=ManualClock()
    )
    assert ours.requeue([])
    assert cluster.requeued == ["17"], "once"


N0, N1 = NodeName("n0"), NodeName("n1")


def launched(ranks: tuple[int, ...], recipe: str = "torch") -> Launch:
    nodes = tuple(NodeFacts(node=name, address=f"{name}:1") for name in ("n1", "n0"))
    return Launch(
        attempt=Attempt(17, 0, 0),
        nodes=nodes,
        spares=(),
        ranks=ranks,
        master_port=1,
        passed_on={},
        recipe_name=recipe,
    )


@pytest.mark.parametrize(
    ("granted", "ranks", "recipe", "more"),
    [
        (Granted(cpus={N0: 1, N1: 5}), (5, 1), "torch", ["--ntasks=6"]),
        (Granted(cpus={N0: 5, N1: 1}), (5, 1), "torch", ["--ntasks=6", "--overcommit"]),
        (Granted(cpus={N0: 8, N1: 8}, gpus={N0: 4, N1: 4}), (4, 4), "torch", ["--ntasks=8", "--gres=gpu:4"]),
        (Granted(cpus={N0: 8, N1: 8}, gpus={N0: 1, N1: 3}), (3, 1), "torch", ["--ntasks=4", "--gpus-per-task=1"]),
        (
            Granted(cpus={N0: 8, N1: 6}, gpus={N0: 4, N1: 4}, gpus_per_task=1),
            (4, 4),
            "torchrun",
            ["--ntasks=2", "--cpus-per-task=6", "--gres=gpu:4"],
        ),
    ],
)
def test_the_step_of_the_ranks_is_told_of_tasks_cpus_and_gpus(
    granted: Granted, ranks: tuple[int, ...], recipe: str, more: list[str]
) -> None:
    ours = replace(backend(Cluster()), granted=granted)
    argv = ours.rank_command(launched(ranks, recipe), ["true"])
    told = ("--ntasks", "--overcommit", "--cpus", "--gres", "--gpus")
    assert [word for word in argv[: argv.index("-m")] if word.startswith(told)] == more
    by_user = replace(ours, srun_options=("--gres=gpu:1",)).rank_command(launched(ranks, recipe), ["true"])
    assert [word for word in by_user if word.startswith(("--gres", "--gpus"))] == ["--gres=gpu:1"]


@pytest.mark.parametrize(
    ("by_user", "ours"),
    [
        (("--gres=gpu:1",), False),
        (("--strange", "x", "--gres", "gpu:1"), False),
        (("--gpus-per-ta=1",), False),
        (("-G2",), False),
        (("--gres-flags=disable-binding",), True),
        (("--gpu-bind=none",), True),
        ((), True),
    ],
)
def test_gpus_of_the_users_go_first_and_no_other_option_does(by_user: tuple[str, ...], *, ours: bool) -> None:
    granted = Granted(gpus={N0: 4, N1: 4})
    argv = replace(backend(Cluster()), granted=granted, srun_options=by_user).rank_command(launched((4, 4)), [])
    assert ("--gres=gpu:4" in argv) is ours


@pytest.mark.parametrize(("by_user", "ours"), [(("--mpi", "pmix"), False), (("--mpi=pmix",), False), ((), True)])
def test_how_mpi_is_served_is_the_users_to_say(by_user: tuple[str, ...], *, ours: bool) -> None:
    argv = replace(backend(Cluster()), srun_options=by_user).rank_command(launched((1, 1), "mpi"), [])
    assert ("--mpi=pmi2" in argv) is ours


@dataclass
class Ports(Cluster):
    """Where the slurmds of n0 and n1 listen."""

    ports: tuple[int, int] = (0, 0)

    @override
    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        nodes = (
            f"NodeName=n{at} NodeAddr=127.0.0.1 State=ALLOCATED Port={one}" for at, one in enumerate(self.ports)
        )
        return "\n".join(nodes)


def test_agents_are_started_once_more_beside_a_node_whose_slurmd_is_gone(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/argv\n')
    srun.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as away:
        ports = (there.getsockname()[1], away.getsockname()[1])
        away.close()
        ours = replace(
            backend(Cluster()),
            slurm=Slurm(Ports(ports=ports)),
            folder=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        )
        facts = {node: NodeFacts(node=node, address="127.0.0.1:1") for node in (N0, N1)}
        step = ours.start_agents("token", facts)
    until(lambda: step.ended() is not None)
    step.stop()
    assert step.gone == {N1}
    assert "--nodelist=n0 " in (tmp_path / "argv").read_text()


def test_another_launcher_adopts_the_slots_and_ends_them(tmp_path: Path) -> None:
    launch = launched((1, 1))
    launch = replace(launch, nodes=tuple(replace(one, address="127.0.0.1:1") for one in launch.nodes))
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexec sleep 600\n")
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    first = replace(backend(Cluster()), folder=tmp_path, env=env)
    assert first.adopt_ranks(launch, ["true"], reach) is None
    first.start_ranks(launch, ["true"], reach).send(signal.SIGTERM)
    second = replace(backend(Cluster()), folder=tmp_path, env=env, slots=[])
    second.adopt_slots(first.started_slots(), lambda _: None)
    adopted = second.adopt_ranks(launch, ["true"], reach)
    assert adopted is not None
    adopted.send(signal.SIGTERM)
    assert second.started_slots() == first.started_slots()
    (theirs,) = first.slots
    assert theirs.ended() is None
    second.end_slots()
    assert theirs.ended() is not None


@pytest.mark.parametrize(
    ("container", "waits"),
    [
        (None, True),
        (Container("pyxis", "image"), True),  # the slots are inside
        (Container("apptainer", "image"), False),
        (Container("singularity", "image"), False),
        (Container("charliecloud", "image"), False),
    ],
)
def test_nothing_is_preloaded_outside_the_container_that_a_rank_is_to_enter(
    container: Container | None, tmp_path: Path, *, waits: bool
) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexec sleep 600\n")
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ours = replace(backend(Cluster()), folder=tmp_path, env=env, preload=("torch",), slots=[])
    launch = replace(launched((1, 1)), container=container)
    ours.start_ranks(launch, ["python", "train.py"], reach).send(signal.SIGTERM)
    ours.end_slots()
    (told,) = (json.loads(one.read_text()) for one in tmp_path.glob("slots*"))
    assert ("preload" in told) is waits


def test_what_ranks_of_two_runs_at_once_in_one_job_write_is_kept_apart(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexec sleep 600\n")
    srun.chmod(0o755)
    kept: list[Path] = []
    for run in ("a", "b"):
        folder = tmp_path / run
        folder.mkdir()
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        ours = replace(backend(Cluster()), folder=folder, env=env, slots=[], role=HeldRole(run=run))
        ours.start_ranks(launched((1, 1)), ["python", "train.py"], reach).send(signal.SIGTERM)
        ours.end_slots()
        (told,) = folder.glob("slots*")
        place = left_slots({SLOTS_VARIABLE: str(told)}, "n0")
        kept.append(kept_folder(tmp_path, place.run))
    assert kept[0] != kept[1]


@dataclass
class Silent(Cluster):
    """Does not answer for so many times, then tells of the job; `refuses` always."""

    silent: int = 2
    refuses: str = ""

    @override
    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.refuses:
            raise CommandError(argv, 1, self.refuses)
        if self.silent:
            self.silent -= 1
            raise CommandTimeoutError(argv, 20.0)
        given = "     Nodes=n[0-1] CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)\n"
        head = f"JobId=17 JobName=x\n   Requeue=1 Restarts={self.restarts} BatchFlag=1\n"
        return f"{head}   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=1 \n{given}"


def test_what_a_task_of_an_array_handed_on_to_a_plain_job_is_not_believed(tmp_path: Path) -> None:
    stale = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_HET_SIZE": "2"}
    env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_USER": "ada", **stale}
    ours = replace(SlurmBackend.from_environment(env, tmp_path), slurm=Slurm(Silent(silent=0)))
    assert (ours.label, ours.with_granted().label) == ("17", "17")
    assert str(ours.with_granted().address) == "17"


def test_what_an_outer_job_left_in_the_environment_is_not_believed(tmp_path: Path) -> None:
    outer = {"SLURM_RESTART_COUNT": "1", "SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_CPUS_PER_TASK": "6"}
    env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_USER": "ada", **outer}
    ours = replace(SlurmBackend.from_environment(env, tmp_path), slurm=Slurm(Silent(silent=0))).with_granted()
    assert ours.restart == 0
    assert (ours.granted.tasks, ours.granted.unclear) == (None, "")
    assert not any("cpus-per-task" in word for word in ours.rank_command(launched((2, 2)), ["true"]))
    assert not set(outer) & set(ours.env)


@pytest.mark.parametrize(("env", "restart"), [({}, 0), ({"SLURM_RESTART_COUNT": "1"}, 1)])
def test_a_run_that_slurm_has_followed_by_another_knows_itself_as_the_older_one(
    tmp_path: Path, env: dict[str, str], restart: int
) -> None:
    env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_USER": "ada", **env}
    slurm = Slurm(Silent(silent=0, restarts=2))
    assert replace(SlurmBackend.from_environment(env, tmp_path), slurm=slurm).with_granted().restart == restart


def test_what_the_job_has_is_asked_for_until_slurm_answers() -> None:
    clock = ManualClock()
    ours = replace(backend(Silent()), env={"SLURM_JOB_NODELIST": "n[0-1]"}, clock=clock)
    assert ours.with_granted().granted.gpus == {N0: 2, N1: 2}
    with pytest.raises(CommandTimeoutError):
        replace(ours, slurm=Slurm(Silent(silent=1 << 20))).with_granted()
    with pytest.raises(CommandError, match="Invalid job id"):
        replace(ours, slurm=Slurm(Silent(refuses="Invalid job id specified"))).with_granted()
