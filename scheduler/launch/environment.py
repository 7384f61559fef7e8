"""What a rank finds in its environment: pure. Imported by every rank, so it imports next to nothing."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from deeplink.errors import DeepLinkError
from deeplink.scheduler.launch.container import Container
from deeplink.scheduler.launch.recipes import DEFAULT, RECIPES, Recipe, Start
from deeplink.types import Attempt, Member, NodeName, format_members

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.links import InterfaceAddress, Route

LAUNCH_VARIABLE = "DEEPLINK_LAUNCH"
"""Carries the launch from `deeplink run` to `deeplink.scheduler.launch.rank`; the command does not see it."""


class NotLaunchedError(DeepLinkError):
    """The rank starter was called by something else than `deeplink run`."""

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"this is no rank of `deeplink run`: {problem}",
            remedy="Start ranks with `deeplink run -- COMMAND`, not with this module.",
        )
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node of a launch, as its agent announced it.

    Attributes:
        address: `host:port` of the agent.
        topology_address: SLURM_TOPOLOGY_ADDR on the node; empty where nobody knows.
        token_file: node-local file with the run's secret, of which its attempts' tokens are made.
        store: node-local folder of shards.
        interface: network interface that carries `address`.
        pid: process id of the agent on its node.
        weight: how large a share of the shards the node is to hold.
        data_port: where the agent serves samples besides; 0 for nowhere.
        links: the node's interfaces, until it is settled which are used.
        routes: where its routes lead, until then.
        hcas: the InfiniBand cards that NCCL is to use, as NCCL_IB_HCA has it; empty where nobody knows.
        domain: what the node fails together with; empty where nobody knows.
    """

    node: str
    address: str
    topology_address: str = ""
    token_file: str = ""
    store: str = ""
    interface: str = ""
    pid: int = 0
    weight: int = 1
    data_port: int = 0
    links: tuple[InterfaceAddress, ...] = ()
    routes: tuple[Route, ...] = ()
    hcas: str = ""
    domain: str = ""

    @classmethod
    def announced(cls, line: bytes | str) -> Self:
        """Read the line an agent says when it is ready.

        Raises:
            ValueError, TypeError: it is none.
        """
        return cls.of(json.loads(line))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Take the fields out of JSON."""
        links, routes = fields.pop("links", ()), fields.pop("routes", ())
        if not (links or routes):
            return cls(**fields)
        from deeplink.links import InterfaceAddress, Route  # noqa: PLC0415 - the launcher's: ranks have none, and no time for it

        return cls(
            **fields,
            links=tuple(InterfaceAddress(**link) for link in links),
            routes=tuple(Route(**route) for route in routes),
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One attempt as every rank of it must know it.

    Attributes:
        nodes: the nodes that run ranks, in rank order; the first ranks run on the first node.
        spares: the nodes whose agents serve shards but that run no ranks.
        ranks: how many each of `nodes` runs.
        master_port: where rank 0 listens for the others.
        passed_on: DEEPLINK_* settings that are the same on all nodes (catalog, watchdog).
        recipe_name: which framework the ranks are of.
        host_file: file with the nodes in rank order; empty for none.
        container: what the ranks run in; None for the node itself.
        restarts: how often the job's ranks were started before, by Slurm or by us.
        max_restarts: how often they may be.
    """

    attempt: Attempt
    nodes: tuple[NodeFacts, ...]
    spares: tuple[NodeFacts, ...]
    ranks: tuple[int, ...]
    master_port: int
    passed_on: Mapping[str, str]
    recipe_name: str = DEFAULT
    host_file: str = ""
    container: Container | None = None
    restarts: int = 0
    max_restarts: int = 0

    @property
    def recipe(self) -> Recipe:
        """How the ranks' framework is started."""
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
        """Return which node, by its number, runs a process, and the process's number on it.

        Raises:
            NotLaunchedError: there is no such process.
        """
        left = process
        for number, count in enumerate(self.started):
            if 0 <= left < count:
                return number, left
            left -= count
        raise NotLaunchedError(f"there is no rank {process} of {self.processes}")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(self.ranks)

    @property
    def master_address(self) -> str:
        """Where rank 0 runs."""
        return self.nodes[0].host

    def packed(self) -> str:
        """Return a text for one environment variable (which Linux bounds to 128 KiB: some thousands of nodes)."""
        return base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()

    @classmethod
    def unpacked(cls, text: str) -> Launch:
        """Read what `packed` wrote.

        Raises:
            NotLaunchedError: the text is something else.
        """
        try:
            fields = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
            if fields["recipe_name"] not in RECIPES:
                raise NotLaunchedError(f"this version has no recipe {fields['recipe_name']!r}")
            return cls(
                attempt=Attempt(**fields.pop("attempt")),
                nodes=tuple(map(NodeFacts.of, fields.pop("nodes"))),
                spares=tuple(map(NodeFacts.of, fields.pop("spares"))),
                ranks=tuple(fields.pop("ranks")),
                container=_container(fields.pop("container")),
                **fields,
            )
        except (ValueError, TypeError, KeyError, zlib.error) as problem:
            raise NotLaunchedError(f"{LAUNCH_VARIABLE} does not hold a launch ({problem})") from problem


def _container(fields: dict[str, Any] | None) -> Container | None:
    if fields is None:
        return None
    return Container(**{**fields, "mounts": tuple(fields["mounts"]), "options": tuple(fields["options"])})


@dataclass(frozen=True, slots=True)
class RankTask:
    """Which of the started processes one is: `rank` of all, the `local_rank`-th on `node`."""

    rank: int
    local_rank: int
    node: str


def slurm_task(env: Mapping[str, str]) -> RankTask:
    """Return which rank Slurm started this process as.

    Raises:
        NotLaunchedError: Slurm did not start it.
    """
    try:
        return RankTask(int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), env["SLURMD_NODENAME"])
    except (KeyError, ValueError) as problem:
        raise NotLaunchedError(f"Slurm did not start it ({problem})") from problem


def mpi_task(launch: Launch, env: Mapping[str, str]) -> RankTask:
    """Return which rank an mpiexec started this process as.

    Raises:
        NotLaunchedError: none did, or it started more than it was told to.
    """
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):  # MPICH and its kin; Open MPI
        if env.get(name, "").isdigit():
            node, local_rank = launch.place(int(env[name]))
            return RankTask(int(env[name]), local_rank, launch.nodes[node].node)
    raise NotLaunchedError("mpiexec does not say which rank it is")


def rank_environment(launch: Launch, task: RankTask, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment a rank's command gets: `env` and all that DeepLink and torch.distributed read.

    The node's own `SLURM_NODEID` is not used: it follows the node list, not the order of the ranks.

    Raises:
        NotLaunchedError: the launch does not place this task here.
    """
    group, _ = launch.place(task.rank)
    if launch.nodes[group].node != task.node:
        raise NotLaunchedError(f"rank {task.rank} is not meant for {task.node}")
    here = launch.nodes[group]
    everyone = tuple(facts.member for facts in (*launch.nodes, *launch.spares))
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
        "DEEPLINK_MEMBERS": format_members(everyone),
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
