"""The launch and a rank's environment: pure. Imported by every rank, so it imports next to nothing."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deeplink.core.publish import BY_FILE, leave, write_text
from deeplink.core.types import Attempt, Member, NodeName, format_members
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.container import Container
from deeplink.scheduler.slurm.nodeset import fold_for_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.rpc.resolving import InterfaceAddress, Route

    Settings = Callable[["Launch", "RankTask", Mapping[str, str]], dict[str, str]]

# Names the file that carries the launch from `deeplink run` to a rank; the command does not see it.
LAUNCH_VARIABLE = "DEEPLINK_LAUNCH"
SLOTS_VARIABLE = "DEEPLINK_SLOTS"  # the file, of slots: their step, and where their agents listen
SEATS_VARIABLE = "DEEPLINK_AGENT_SEATS"  # the file, of agents that are started again: each finds its port in it
_MEMBERS = ".members"  # beside the launch's file, with its name before it


def not_launched(problem: str) -> LaunchError:
    """Return the error of a rank starter that something else than `deeplink run` called."""
    remedy = "Start ranks with `deeplink run -- COMMAND`, not with this module."
    return LaunchError(f"this is no rank of `deeplink run`: {problem}", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node of a launch, as its agent announced it."""

    node: str
    address: str  # `host:port` that other nodes reach the agent by
    topology_address: str = ""  # SLURM_TOPOLOGY_ADDR on the node; empty where nobody knows
    token_file: str = ""  # node-local file with the run's secret, of which its attempts' tokens are made
    store: str = ""  # node-local folder of shards
    store_why: str = ""  # what chose it
    shares_store: str = ""  # another machine that has the same one
    interface: str = ""  # network interface that carries `address` (for GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)
    pid: int = 0  # process id of what ends the agent on its node
    weight: int = 1  # how large a share of the shards the node is to hold, by the budget of its store
    links: tuple[InterfaceAddress, ...] = ()  # the node's interfaces, until it is settled which are used
    routes: tuple[Route, ...] = ()  # where its routes lead, until then
    hcas: str = ""  # the InfiniBand cards that NCCL is to use, as NCCL_IB_HCA has it; empty where nobody knows
    domain: str = ""  # what the node fails together with; empty where nobody knows

    @classmethod
    def announced(cls, line: bytes | str) -> Self:
        """Read the line an agent says when it is ready."""
        return cls.of(json.loads(line))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Take the fields out of JSON."""
        links, routes = fields.pop("links", ()), fields.pop("routes", ())
        if not (links or routes):
            return cls(**fields)
        from deeplink.rpc.resolving import InterfaceAddress, Route  # noqa: PLC0415 - the launcher's: ranks have none, and no time for it

        return cls(
            **fields,
            links=tuple(InterfaceAddress(**link) for link in links),
            routes=tuple(Route(**route) for route in routes),
        )

    @property
    def announcement(self) -> str:
        """The line that `announced` reads: what an agent knows of its node itself."""
        return json.dumps({name: value for name, value in asdict(self).items() if name not in {"hcas", "domain"}})

    @property
    def member(self) -> Member:
        """The node as a member of the cache."""
        return Member(self.name, self.address, self.weight, self.domain)

    @property
    def name(self) -> NodeName:
        """The node's name, typed."""
        return NodeName(self.node)

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0]


def leave_seats(folder: Path, before: Mapping[NodeName, NodeFacts]) -> Path:
    """Publish the ports and folders of these agents in the job's folder, for `seat_in`; return the file."""
    known = {node: one for node, one in before.items() if one.address}  # others never came up
    seats = {node: [int(one.address.rpartition(":")[2]), one.token_file] for node, one in known.items()}
    return leave(folder, "seats", json.dumps(seats, separators=(",", ":")).encode())


def seat_in(env: Mapping[str, str], node: str) -> tuple[int, Path] | None:
    """Return the port, and the node-local folder, that this node's agent had; None where that cannot be read."""
    try:
        port, token_file = json.loads(Path(env[SEATS_VARIABLE]).read_text(encoding="utf-8"))[node]
        port, folder = int(port), Path(token_file).parent
    except (KeyError, ValueError, TypeError, OSError):
        return None
    return (port, folder) if 0 < port < 1 << 16 and token_file and folder.is_absolute() else None


class Start(Enum):
    """The processes that a recipe starts on a node."""

    RANKS = "one process for each rank"
    NODE = "one process, which starts the node's ranks itself"


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
    return {"CROSS_RANK": str(group), "CROSS_SIZE": str(len(launch.nodes)), "LOCAL_SIZE": str(launch.ranks[group])}


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
    free: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(launch.master_port))
    hosts = [facts.host for facts, ranks in zip(launch.nodes, launch.ranks, strict=True) for _ in range(ranks)]
    workers = [f"{host}:{next(free[host])}" for host in hosts]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": task.rank}}
    return {"TF_CONFIG": json.dumps(config)}


def _horovod(_launch: Launch, _task: RankTask, _env: Mapping[str, str]) -> dict[str, str]:
    # Its other controller, Gloo, needs a server that only horovodrun starts.
    return {"HOROVOD_CONTROLLER": "mpi"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Start of one framework."""

    name: str  # what `--recipe` calls it
    what: str  # for whom it is, one line
    start: Start = Start.RANKS  # what is started on a node
    settings: Settings = lambda _launch, _task, _env: {}  # besides torch.distributed's
    mpi: bool = False  # the ranks find each other through MPI: a launcher that speaks PMI must start them

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
DEFAULT = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One attempt as every rank of it must know it."""

    attempt: Attempt
    nodes: tuple[NodeFacts, ...]  # the nodes that run ranks, in rank order; the first ranks run on the first node
    spares: tuple[NodeFacts, ...]  # the nodes whose agents serve shards but that run no ranks
    ranks: tuple[int, ...]  # how many each of `nodes` runs
    master_port: int  # where rank 0 listens for the others
    passed_on: Mapping[str, str]  # DEEPLINK_* settings that are the same on all nodes (catalog, watchdog)
    recipe_name: str = DEFAULT  # which framework the ranks are of
    host_file: str = ""  # file with the nodes in rank order; empty for none
    container: Container | None = None  # what the ranks run in; None for the node itself
    restarts: int = 0  # how often the job's ranks were started before, by Slurm or by us
    max_restarts: int = 0  # how often they may be

    @property
    def recipe(self) -> Recipe:
        """The recipe of the ranks' framework."""
        return RECIPES[self.recipe_name]

    @property
    def started(self) -> tuple[int, ...]:
        """Processes that are started on each node: its ranks, or one that starts them."""
        return tuple(map(self.recipe.started, self.ranks))

    @property
    def starters(self) -> bool:
        """Whether one process on each node starts its ranks."""
        return self.recipe.start is Start.NODE

    @property
    def processes(self) -> int:
        """Processes that are started in all."""
        return sum(self.started)

    def place(self, process: int) -> tuple[int, int]:
        """Return which node, by its number, runs a process, and the process's number on it."""
        left = process
        for number, count in enumerate(self.started):
            if 0 <= left < count:
                return number, left
            left -= count
        raise not_launched(f"there is no rank {process} of {self.processes}")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(self.ranks)

    @property
    def master_address(self) -> str:
        """Rank 0's host."""
        return self.nodes[0].host

    @property
    def members(self) -> tuple[Member, ...]:
        """Every node with an agent, those that run ranks first, in rank order."""
        return tuple(facts.member for facts in (*self.nodes, *self.spares))

    def packed(self) -> bytes:
        """Return the content of the launch's file: about 50 bytes for each node."""
        return zlib.compress(json.dumps(asdict(self)).encode())

    @classmethod
    def unpacked(cls, content: bytes) -> Launch:
        """Read what `packed` wrote."""
        try:
            fields = json.loads(zlib.decompress(content))
            container = fields.pop("container")
            if fields["recipe_name"] not in RECIPES:
                raise not_launched(f"this version has no recipe {fields['recipe_name']!r}")
            return cls(
                attempt=Attempt(**fields.pop("attempt")),
                nodes=tuple(map(NodeFacts.of, fields.pop("nodes"))),
                spares=tuple(map(NodeFacts.of, fields.pop("spares"))),
                ranks=tuple(fields.pop("ranks")),
                container=None if container is None else _container(container),
                **fields,
            )
        except (ValueError, TypeError, KeyError, zlib.error) as problem:
            raise not_launched(f"{LAUNCH_VARIABLE} does not hold a launch ({problem})") from problem


def _container(fields: dict[str, Any]) -> Container:
    return Container(**{**fields, "mounts": tuple(fields["mounts"]), "options": tuple(fields["options"])})


def host_file(launch: Launch) -> str:
    """Return the nodes in rank order as DeepSpeed's and Open MPI's launchers read them: `NODE slots=RANKS`."""
    return "".join(
        f"{facts.node} slots={ranks}\n" for facts, ranks in zip(launch.nodes, launch.ranks, strict=True)
    )


def leave_launch(launch: Launch, folder: Path) -> str:
    """Leave in the job's folder what an attempt's ranks are to know; return what LAUNCH_VARIABLE is to be.

    Besides the launch: its members, and the nodes in rank order for users who start something on them.
    """
    if launch.host_file:
        Path(launch.host_file).write_text(host_file(launch), encoding="utf-8")
    path = leave(folder, "launch", launch.packed())
    write_text(path.with_name(path.name + _MEMBERS), format_members(launch.members), mode=0o600, durable=False)
    return str(path)


def left_launch(env: Mapping[str, str]) -> Launch:
    """Return the launch that a rank's environment names."""
    where = env.get(LAUNCH_VARIABLE)
    if where is None:
        raise not_launched(f"{LAUNCH_VARIABLE} is not set")
    try:
        content = Path(where).read_bytes()
    except OSError as problem:
        raise LaunchError(
            f"the launch cannot be read: {where}: {problem.strerror or problem}",
            "All nodes must see the job's folder: let `state` (DEEPLINK_STATE) name one on shared storage.",
        ) from problem
    return Launch.unpacked(content)


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """What a slot is told of itself: which step it is of, and where."""

    step: int  # as the launcher numbers them
    here: str  # its node
    folder: Path  # of its node's agent
    of_job: tuple[NodeName, ...]  # the job's nodes, in Slurm's own order; none outside of Slurm
    run: str  # that it is of
    # Modules to import for the ranks of the next attempt; empty: what the script begins with; None: nothing
    preload: tuple[str, ...] | None = None
    resting: str = ""  # the launch in which its node is a spare; empty where it is none


def leave_slots(
    folder: Path,
    step: int,
    launch: Launch,
    of_job: Sequence[NodeName],
    preload: Sequence[str] | None = None,
    *,
    run: str = "",
) -> str:
    """Leave in the job's folder what the slots of a step are to know; return what SLOTS_VARIABLE is to be."""
    folders = {facts.node: str(Path(facts.token_file).parent) for facts in (*launch.nodes, *launch.spares)}
    told: dict[str, Any] = {"step": step, "folders": folders, "of_job": of_job, "run": run}
    if preload is not None:
        spares = [facts.node for facts in launch.spares]
        told |= {"preload": preload, "spares": spares, "launch": leave_launch(launch, folder)}
    return str(leave(folder, "slots", json.dumps(told).encode()))


def left_slots(env: Mapping[str, str], here: str) -> SlotPlace:
    """Return what a slot on this node is told."""
    try:
        told = json.loads(Path(env[SLOTS_VARIABLE]).read_text(encoding="utf-8"))
        folder, in_slurms = Path(told["folders"][here]), tuple(told["of_job"])
        place = SlotPlace(int(told["step"]), here, folder, in_slurms, told["run"])
        if "preload" not in told:
            return place
        resting = told["launch"] if here in told["spares"] else ""
        return replace(place, preload=tuple(told["preload"]), resting=resting)
    except (KeyError, ValueError, TypeError, OSError) as problem:
        raise not_launched(f"nothing tells this slot of its agent ({problem!r})") from problem


def members_variable(env: Mapping[str, str]) -> str:
    """Return what DEEPLINK_MEMBERS is to be for a rank with this environment: the file of its launch's members."""
    return f"{BY_FILE}{env[LAUNCH_VARIABLE]}{_MEMBERS}"


@dataclass(frozen=True, slots=True)
class RankTask:
    """One of the started processes: `rank` of all, the `local_rank`-th on `node`."""

    rank: int
    local_rank: int
    node: str


def slurm_variables(launch: Launch, task: RankTask, of_job: Sequence[NodeName]) -> dict[str, str]:
    """Return what srun would tell a rank of its step, were that the attempt's own; nothing outside of Slurm.

    `of_job`: the job's nodes in Slurm's own order, which is not the ranks'.
    """
    if not of_job:
        return {}
    started = dict(zip((facts.node for facts in launch.nodes), launch.started, strict=True))
    nodes = [node for node in of_job if node in started]
    group, local = launch.place(task.rank)
    count, tasks = str(len(nodes)), str(launch.processes)
    runs = [(number, len([*same])) for number, same in itertools.groupby(started[node] for node in nodes)]
    each = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)
    first = task.rank - local
    return {
        "SLURM_PROCID": str(task.rank),
        "SLURM_NODEID": str(nodes.index(NodeName(task.node))),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + launch.started[group]))),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), count),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
        "SLURM_STEP_NODELIST": fold_for_files(nodes),
        "SLURM_TASK_PID": str(os.getpid()),
    }


def mpi_task(launch: Launch, env: Mapping[str, str]) -> RankTask:
    """Return which rank an mpiexec started this process as."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):  # MPICH and its kin; Open MPI
        if env.get(name, "").isdigit():
            node, local_rank = launch.place(int(env[name]))
            return RankTask(int(env[name]), local_rank, launch.nodes[node].node)
    raise not_launched("mpiexec does not say which rank it is")


def rank_environment(launch: Launch, task: RankTask, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment a rank's command gets: `env` and all that DeepLink and torch.distributed read."""
    # The node's own `SLURM_NODEID` is not used: it follows the node list, not the order of the ranks.
    group, _ = launch.place(task.rank)
    if launch.nodes[group].node != task.node:
        raise not_launched(f"rank {task.rank} is not meant for {task.node}")
    here = launch.nodes[group]
    settings = {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(launch.processes),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.started[group]),
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(len(launch.nodes)),
        **({} if launch.starters else _as_torchrun(launch, task, env)),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "DEEPLINK_ATTEMPT": str(launch.attempt),
        "DEEPLINK_NODE": here.node,
        "DEEPLINK_AGENT": here.address,
        "DEEPLINK_TOKEN_FILE": here.token_file,
        "DEEPLINK_STORE": here.store,
        "DEEPLINK_HOSTFILE": launch.host_file,
        **launch.passed_on,
    }
    # The user's own choice of interface stands; ours is the one the agents reach each other by.
    networks = {
        "GLOO_SOCKET_IFNAME": here.interface,
        "TP_SOCKET_IFNAME": here.interface,  # torch.distributed.rpc
        # Without the sign NCCL would take eth1 for the beginning of eth10, too.
        "NCCL_SOCKET_IFNAME": here.interface and f"={here.interface}",
        "NCCL_IB_HCA": here.hcas,
    }
    wanted = {name: value for name, value in networks.items() if value and not env.get(name)}
    inherited = {name: value for name, value in env.items() if name != LAUNCH_VARIABLE}
    return {**inherited, **wanted, **settings, **launch.recipe.settings(launch, task, env)}


def _as_torchrun(launch: Launch, task: RankTask, env: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun sets besides, and code reads; the user's own choices stand."""
    group, _ = launch.place(task.rank)
    settings = {
        "ROLE_NAME": "default",
        "ROLE_RANK": str(task.rank),
        "ROLE_WORLD_SIZE": str(launch.world_size),
        "TORCHELASTIC_RUN_ID": str(launch.attempt.job),
        "TORCHELASTIC_RESTART_COUNT": str(launch.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 itself listens at MASTER_PORT
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if launch.started[group] > 1 and not env.get("OMP_NUM_THREADS"):
        settings["OMP_NUM_THREADS"] = env.get("SLURM_CPUS_PER_TASK") or "1"
    return settings
