"""What each framework must find so that it takes this launch's ranks, in this launch's order; pure.

A rank always finds what torch.distributed reads (`environment.py`). A recipe adds what another framework reads,
and says what is started on a node. Imported by every rank, so it imports next to nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.scheduler.launch.environment import Launch, RankTask

    Settings = Callable[[Launch, RankTask, Mapping[str, str]], dict[str, str]]


class Start(Enum):
    """What is started on a node."""

    RANKS = "one process for each rank"
    NODE = "one process, which starts the node's ranks itself"


def _nothing(_launch: Launch, _task: RankTask, _env: Mapping[str, str]) -> dict[str, str]:
    return {}


def _torchrun(launch: Launch, task: RankTask, _env: Mapping[str, str]) -> dict[str, str]:
    # torchrun takes each of its options from PET_<OPTION> where its command line has none. The static rendezvous
    # is the one that numbers the nodes as told: c10d sorts them by host name.
    return {
        "PET_NNODES": str(len(launch.nodes)),
        "PET_NODE_RANK": str(task.rank),
        "PET_NPROC_PER_NODE": str(launch.ranks[task.rank]),
        "PET_MASTER_ADDR": launch.master_address,
        "PET_MASTER_PORT": str(launch.master_port),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": str(launch.attempt),
    }


def _deepspeed(launch: Launch, task: RankTask, _env: Mapping[str, str]) -> dict[str, str]:
    # What its own launcher sets besides torch's variables.
    group, _ = launch.place(task.rank)
    return {
        "CROSS_RANK": str(group),
        "CROSS_SIZE": str(len(launch.nodes)),
        "LOCAL_SIZE": str(launch.ranks[group]),
    }


def _jax(launch: Launch, task: RankTask, env: Mapping[str, str]) -> dict[str, str]:
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    count = len(visible.split(",")) if visible else 0
    if launch.ranks[launch.place(task.rank)[0]] == 1:
        # All of the node are its own. Told nothing, JAX would take the first one only, inside a Slurm job.
        devices = ",".join(map(str, range(count)))
    else:
        # A rank that Slurm shows one GPU only (--gpus-per-task) calls it 0, whatever its number among the ranks.
        devices = "0" if count == 1 else str(task.local_rank)
    coordinator = {"JAX_COORDINATOR_ADDRESS": f"{launch.master_address}:{launch.master_port}"}
    return {**coordinator, "JAX_LOCAL_DEVICE_IDS": devices} if devices else coordinator


def _tensorflow(launch: Launch, task: RankTask, _env: Mapping[str, str]) -> dict[str, str]:
    # Every worker listens, so those on one host need a port each.
    taken: Counter[str] = Counter()
    workers = []
    for facts, ranks in zip(launch.nodes, launch.ranks, strict=True):
        for _ in range(ranks):
            workers.append(f"{facts.host}:{launch.master_port + taken[facts.host]}")
            taken[facts.host] += 1
    return {
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": task.rank}})
    }


def _horovod(_launch: Launch, _task: RankTask, _env: Mapping[str, str]) -> dict[str, str]:
    # Its other controller, Gloo, needs a server that only horovodrun starts.
    return {"HOROVOD_CONTROLLER": "mpi"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one framework is started.

    Attributes:
        name: what `--recipe` calls it.
        what: for whom it is, one line.
        start: what is started on a node.
        settings: what a process finds in its environment besides the variables of torch.distributed.
        mpi: whether the ranks find each other through MPI, so that a launcher that speaks PMI must start them.
    """

    name: str
    what: str
    start: Start = Start.RANKS
    settings: Settings = _nothing
    mpi: bool = False

    def started(self, per_node: int) -> int:
        """Return how many processes are started on a node that is to have so many ranks."""
        return per_node if self.start is Start.RANKS else 1


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("torch", "PyTorch DDP or FSDP with init_method env://; the default"),
        Recipe("torchrun", "torchrun, once per node, which starts the node's ranks", Start.NODE, _torchrun),
        # Lightning looks for torchelastic before it looks for Slurm, by TORCHELASTIC_RUN_ID alone. As torchelastic
        # it reads RANK and GROUP_RANK; as Slurm it would take SLURM_NODEID, which follows the names of the nodes,
        # and would ask for a job to be requeued that we relaunch.
        Recipe("lightning", "Lightning, Trainer or Fabric"),
        Recipe("accelerate", "Hugging Face accelerate, without its launcher"),
        Recipe("deepspeed", "DeepSpeed, without its launcher", settings=_deepspeed),
        Recipe("jax", "JAX, jax.distributed.initialize()", settings=_jax),
        Recipe("tensorflow", "TensorFlow, MultiWorkerMirroredStrategy", settings=_tensorflow),
        Recipe("mpi", "programs that call MPI_Init", mpi=True),
        Recipe("horovod", "Horovod built with MPI", settings=_horovod, mpi=True),
    )
}
"""Every recipe by its name."""
DEFAULT = "torch"


def host_file(launch: Launch) -> str:
    """Return the nodes in rank order as DeepSpeed's and Open MPI's launchers read them: `NODE slots=RANKS`."""
    return "".join(
        f"{facts.node} slots={ranks}\n" for facts, ranks in zip(launch.nodes, launch.ranks, strict=True)
    )
