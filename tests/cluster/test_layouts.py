"""How many ranks `deeplink run` starts on each node, with which GPUs, beside what srun does of the same job."""

from __future__ import annotations

import os
import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.conftest import PATIENT
from tests.cluster.jobs import Job, folder_of, submit

pytestmark = pytest.mark.cluster

SHAPE = Shape(leaves=2, nodes_per_leaf=2, cpus=8, gpus=4)
WAIT_S = 200.0


@pytest.fixture(scope="module")
def roomy() -> Iterator[Sandbox]:
    """Four nodes of 8 CPUs and 4 GPUs; a job runs at a time, so that each finds them empty."""
    cluster = Sandbox.up(f"l-{os.getpid()}-{secrets.token_hex(3)}", SHAPE, PATIENT)
    yield cluster
    cluster.down()


@dataclass(frozen=True)
class Ranks:
    """What the ranks of one start found: how many on each node, and how many GPUs each saw."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]


WRITE = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES" >{folder}/{kind}.${rank}'


def script(folder: Path, ours: str = "deeplink run") -> str:
    stock = WRITE.format(folder=folder, kind="stock", rank="SLURM_PROCID")
    rank = WRITE.format(folder=folder, kind="ours", rank="RANK")
    return (
        f"srun --kill-on-bad-exit=0 bash -c {shlex.quote(stock)}\n"
        f"{ours} -- bash -c {shlex.quote(rank)}\necho code=$?\n"
    )


def found(folder: Path, kind: str) -> Ranks:
    files = sorted(folder.glob(f"{kind}.*"), key=lambda path: int(path.suffix[1:]))
    assert [int(path.suffix[1:]) for path in files] == list(range(len(files))), files
    words = [path.read_text().split() for path in files]
    nodes = Counter(node for node, *_ in words)
    gpus = {(node, len(seen[0].split(",")) if seen else 0) for node, *seen in words}
    assert len(gpus) == len(nodes), f"ranks of one node differ: {words}"
    return Ranks(tuple(nodes[node] for node in sorted(nodes)), tuple(count for _, count in sorted(gpus)))


def ended(cluster: Sandbox, options: str, ours: str = "deeplink run", *, program: str = "sbatch") -> Job:
    folder = folder_of(cluster)
    job = submit(cluster, f"-t 3 {options}", script(folder, ours), folder=folder, program=program)
    assert job.await_end(WAIT_S).state is JobState.COMPLETED, job.told()
    return job


AS_SRUN = [
    "-N2",
    "-N2 -n8",
    "-N3 -n7",
    "-n8",
    "-n12",
    "-N2-3 -n6",
    "-N2 --mem=1000",
    "-N2 -n5 -O",
    "-N3 -n7 -m cyclic",
    "-N2 -n6 -m plane=2",
    "-N2 --ntasks-per-node=2 -n3",
    "-N2 --ntasks-per-node=2 --cpus-per-task=2",
    "-N2 --ntasks-per-node=1 --gres=gpu:4",
    "-N2 --ntasks-per-node=4 --gres=gpu:4",
    "-N2 --ntasks-per-node=2 --gpus-per-node=4",
    "-N2 -n4 --gpus-per-task=1",
    "-N2 -n4 --gpus-per-task=2",
    "-n5 --gpus-per-task=1",
    "-N2 -n4 --cpus-per-gpu=2 --gpus-per-task=1",
    "-N2 --gpus-per-socket=1 --sockets-per-node=2",
    "--ntasks-per-gpu=1 --gpus=4",
    "-N2 --ntasks-per-gpu=2 --gpus=8",
    "-n1 --gpus=2",
    "-N2 -n2 --gpus=8",
]


@pytest.mark.parametrize("options", AS_SRUN)
def test_the_tasks_of_the_job_are_srun_s(roomy: Sandbox, options: str) -> None:
    job = ended(roomy, options)
    stock = found(job.folder, "stock")
    assert found(job.folder, "ours") == stock, job.told()
    # 24.11 gives jobs of `--cpus-per-gpu` nodes that its own srun cannot start in: then nor do we, in words.
    assert ("code=0" if stock.nodes else "code=2") in job.output(), job.told()


def test_the_tasks_are_those_that_slurm_says_where_srun_of_22_05_does_otherwise(roomy: Sandbox) -> None:
    job = ended(roomy, "-N2 -n4 -c3")
    assert "code=0" in job.output(), job.told()
    assert found(job.folder, "stock") == Ranks((2, 2), (0, 0))
    assert found(job.folder, "ours") in (Ranks((3, 1), (0, 0)), Ranks((2, 2), (0, 0))), job.told()


@pytest.mark.parametrize(
    ("options", "ours", "stock"),
    [
        # It asks for no tasks: a rank for each GPU, where srun starts one task on each node.
        ("-N1 --gres=gpu:2", Ranks((2,), (2,)), Ranks((1,), (2,))),
        ("-N2 --gres=gpu:4", Ranks((4, 4), (4, 4)), Ranks((1, 1), (4, 4))),
        ("-N2 --gpus-per-node=2", Ranks((2, 2), (2, 2)), Ranks((1, 1), (2, 2))),
        ("-N2 --gpus=8", Ranks((4, 4), (4, 4)), Ranks((1, 1), (4, 4))),
        # Nodes that differ in their GPUs: each rank is shown its own, since Slurm has no words for all of them.
        ("-N2 --gpus=4", Ranks((3, 1), (1, 1)), Ranks((1, 1), (3, 1))),
        ("-N3 --gpus=7", Ranks((4, 2, 1), (1, 1, 1)), Ranks((1, 1, 1), (4, 2, 1))),
        ("--gpus=5 -n5", Ranks((4, 1), (1, 1)), Ranks((4, 1), (4, 1))),
        # All of a node's GPUs are the job's; srun's step is given none unless it asks.
        ("-N2 --exclusive", Ranks((4, 4), (4, 4)), Ranks((1, 1), (0, 0))),
        ("-N2 --exclusive -n6", Ranks((3, 3), (4, 4)), Ranks((3, 3), (0, 0))),
        ("-N2 --exclusive --ntasks-per-node=3", Ranks((3, 3), (4, 4)), Ranks((3, 3), (0, 0))),
        ("--exclusive -n20", Ranks((7, 7, 6), (4, 4, 4)), Ranks((7, 7, 6), (0, 0, 0))),
    ],
)
def test_where_ranks_are_laid_out_otherwise_than_srun_s(
    roomy: Sandbox, options: str, ours: Ranks, stock: Ranks
) -> None:
    job = ended(roomy, options)
    assert "code=0" in job.output(), job.told()
    assert found(job.folder, "ours") == ours, job.told()
    theirs = found(job.folder, "stock")  # srun of 26.05 may begin at another node
    assert (sorted(theirs.nodes), theirs.gpus) == (sorted(stock.nodes), stock.gpus), job.told()


# As sbatch inside of a job of one task hands them on.
OUTER = "SLURM_JOB_ID=1 SLURM_NTASKS=1 SLURM_NPROCS=1 SLURM_NTASKS_PER_NODE=1 SLURM_NTASKS_PER_GPU=1"
OUTER += " SLURM_CPUS_PER_TASK=6 SLURM_GPUS_PER_TASK=1"


@pytest.mark.parametrize(
    ("program", "options", "ours"),
    [
        ("deeplink sbatch --deeplink-place=off", "-N2 --gres=gpu:4", Ranks((4, 4), (4, 4))),
        ("deeplink sbatch --deeplink-place=off", "-N2 --gpus=8", Ranks((4, 4), (4, 4))),
        ("sbatch", "-N2 --ntasks-per-node=2 --gres=gpu:4", Ranks((2, 2), (4, 4))),
        ("sbatch", "-N3 -n7", Ranks((1, 5, 1), (0, 0, 0))),
        ("sbatch", "-N2", Ranks((1, 1), (0, 0))),
        # One task, and one node of a job that asks for none: Slurm's record is the same.
        ("deeplink sbatch --deeplink-place=off", "-N1 --gres=gpu:4", Ranks((4,), (4,))),
        ("deeplink sbatch --deeplink-place=off", "-N1 -n2", Ranks((2,), (0,))),
    ],
)
def test_a_job_submitted_inside_of_another_is_laid_out_as_it_asks_itself(
    roomy: Sandbox, program: str, options: str, ours: Ranks
) -> None:
    job = ended(roomy, options, program=f"env {OUTER} {program}")
    assert "code=0" in job.output(), job.told()
    assert found(job.folder, "ours") == ours, job.told()


@pytest.mark.parametrize("options", ["-N2 --gres=gpu:4", "-N2 --gpus=8"])
def test_a_job_that_asks_for_no_tasks_inside_of_another_is_not_refused(roomy: Sandbox, options: str) -> None:
    job = ended(roomy, options, program=f"env {OUTER} sbatch")
    assert "code=0" in job.output(), job.told()
    # From 24.11 on a SLURM_NTASKS that was handed on is made a task for each node, as if that were asked for.
    assert found(job.folder, "ours") in (Ranks((4, 4), (4, 4)), Ranks((1, 1), (4, 4))), job.told()


@pytest.mark.parametrize(
    ("options", "ours", "words"),
    [
        ("-N2 -n4 --gpus=6", "", "nodes that differ in them"),
        ("-N2 --ntasks-per-gpu=2 --gpus=4", "", "nodes that differ in them"),
        ("-N2 -n2 --gpus=6", "", "nodes that differ in them"),
        ("-N2 --gpus=4", "--recipe torchrun", "nodes that differ in them"),
        ("-N2 -n4 --gpus-per-task=1", "--nproc-per-node 4", "are to run on"),
        ("-N3 -n7", "--spares 1", "who rests would change"),
        ("-N2 -n8", "--group-size 2", "the same number of ranks on each node"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words_and_nothing_starts(
    roomy: Sandbox, options: str, ours: str, words: str
) -> None:
    job = ended(roomy, options, f"deeplink run {ours}")
    assert "code=2" in job.output(), job.told()
    assert words in job.output()
    assert not list(job.folder.glob("ours.*"))
    assert not job.events()


def test_a_spare_rests_with_its_tasks(roomy: Sandbox) -> None:
    job = ended(roomy, "-N3 --ntasks-per-node=2 --gpus-per-task=1 --no-kill", "deeplink run --spares 1")
    assert found(job.folder, "ours") == Ranks((2, 2), (1, 1)), job.told()
    assert found(job.folder, "stock") == Ranks((2, 2, 2), (1, 1, 1))


def test_under_torchrun_one_process_on_each_node_has_all_its_gpus(roomy: Sandbox) -> None:
    job = ended(roomy, "-N2 --ntasks-per-node=4 --gpus-per-task=1", "deeplink run --recipe torchrun")
    assert found(job.folder, "ours") == Ranks((1, 1), (4, 4)), job.told()
    assert job.events("attempt-started")[0]["ranks"] == [4, 4]


@pytest.mark.parametrize("options", ["-N2 -n4", "-N2 --ntasks-per-node=2 --gres=gpu:2", "-n5 --gpus-per-task=1"])
def test_salloc_is_the_same(roomy: Sandbox, options: str) -> None:
    folder = folder_of(roomy)
    (folder / "job.sh").write_text(script(folder))
    done = roomy.run(
        CTL, ["salloc", "-t", "3", *shlex.split(options), "bash", f"{folder}/job.sh"], timeout_s=WAIT_S
    )
    assert "code=0" in done.stdout, (done.stdout, done.stderr)
    assert found(folder, "ours") == found(folder, "stock")


@pytest.mark.parametrize(
    ("options", "step", "same"),
    [
        ("-N3 -n7", "srun", True),
        ("-N3 -n7", "srun -n7", True),
        ("-N2 -n4 --gpus-per-task=1", "srun --gpus-per-task=1", True),
        ("-N2 --gres=gpu:4", "srun", True),
        ("-N2 --ntasks-per-node=1 --gres=gpu:4", "srun --gres=gpu:4", True),
    ],
)
def test_a_stood_in_srun_starts_what_srun_starts(roomy: Sandbox, options: str, step: str, *, same: bool) -> None:
    folder = folder_of(roomy)
    python = (
        "import os; open(f'{}/{}.' + os.environ['SLURM_PROCID'], 'w').write(os.environ['SLURMD_NODENAME'] + ' '"
    )
    python += " + os.environ.get('CUDA_VISIBLE_DEVICES', ''))"
    stock, ours = (shlex.quote(python.format(folder, kind)) for kind in ("stock", "ours"))
    text = f"DEEPLINK_SHIM=off {step} python3 -c {stock}\n{step} python3 -c {ours}\n"
    program = "deeplink sbatch --deeplink-shim --deeplink-place=off"
    job = submit(roomy, f"-t 3 {options}", text, folder=folder, program=program)
    assert job.await_end(WAIT_S).state is JobState.COMPLETED, job.told()
    assert job.events("ended"), "it was left alone"
    assert (found(folder, "ours") == found(folder, "stock")) is same, job.told()


def test_after_a_loss_each_node_that_is_left_runs_its_own_ranks(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape(leaves=1, nodes_per_leaf=3, cpus=8))
    job = submit(cluster, "-N3 -n7 --no-kill", "deeplink run --elastic 2 -- {train} 5000")
    begun = job.await_event("attempt-started", WAIT_S)
    job.await_event("first-step", WAIT_S)
    ranks = dict(zip(begun["nodes"], begun["ranks"], strict=True))
    assert sorted(ranks.values()) == [1, 1, 5]
    batch_host = job.row().batch_host
    victim = next(node for node in ranks if node != batch_host)
    cluster.crash(victim)
    again = job.await_event("attempt-started", WAIT_S, count=2)
    assert dict(zip(again["nodes"], again["ranks"], strict=True)) == {
        node: number for node, number in ranks.items() if node != victim
    }
    assert again["world_size"] == 7 - ranks[victim]
    assert job.let_end().state is JobState.COMPLETED, job.told()
