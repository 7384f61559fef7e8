"""Chooses who gets shards: the nodes of a pack, its packed home besides, and the nodes that a prefetch warms."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import HomeError
from deeplink.cache.membership import configured_members, members_token, node_name
from deeplink.cache.replicate.warming import Moves, for_job, held_by, off_node
from deeplink.cache.source.home import home_beside, make_home_beside
from deeplink.core.clock import SystemClock
from deeplink.core.config import explained_store
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.store_place import file_system, is_shared
from deeplink.core.text import listed
from deeplink.core.types import Attempt, NodeName, ShardId
from deeplink.fs.library import DatasetPath
from deeplink.ops.topology_reading import site_of
from deeplink.rpc.daemon import is_loopback
from deeplink.rpc.tokens import new_token, token_of
from deeplink.scheduler.launch.agent_monitor import Unheard
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.local_backend import LocalBackend
from deeplink.scheduler.launch.shared_network import fabric_below, with_domains
from deeplink.scheduler.launch.slurm_backend import SlurmBackend
from deeplink.scheduler.placement.hint import decision
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.submission import is_in_step
from deeplink.scheduler.topology.graph import failure_domains
from deeplink.scheduler.topology.sources.slurm_topology import fabric_from_switches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.core.config import Config
    from deeplink.core.types import Member, ShardId


@dataclass(frozen=True, slots=True)
class PackTarget:
    """Members and settings of a pack."""

    config: Config  # the store is this node's own, or where shards wait on their way
    members: tuple[Member, ...]  # none: this node's store alone
    token: str
    stores: str  # where the shards go, in words


def in_allocation(env: Mapping[str, str]) -> bool:
    """Tell whether this process stands in a Slurm job, outside of its steps, of which other hosts are nodes.

    Under `salloc` it is on the login host; a batch script is on a node, which Slurm names.

    >>> in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"})
    True
    >>> in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"})
    True
    >>> in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n0"})
    False
    >>> in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_ID": "0"})
    False
    """
    nodes = env.get("SLURM_JOB_NUM_NODES", "")
    is_elsewhere = nodes.isdigit() and (int(nodes) > 1 or not env.get("SLURMD_NODENAME"))
    return env.get("SLURM_JOB_ID", "").isdigit() and is_elsewhere and not is_in_step(env)


def member_count(config: Config, *, local: int = 0, here: bool = False) -> int:
    """Return how many members `target` would give."""
    if here or local:
        return 0 if here else local
    if not config.members and in_allocation(os.environ):
        return int(os.environ["SLURM_JOB_NUM_NODES"])
    return len(configured_members(config))


@contextmanager
def target(config: Config, *, local: int = 0, here: bool = False) -> Iterator[PackTarget]:
    """Give where to pack to: standing agents if any are configured, else the allocation's nodes, else this node.

    Agents that are started for it run until the end of the `with`.
    """
    if here:
        yield PackTarget(config, (), "", _own_store(config))
    elif local or (not config.members and in_allocation(os.environ)):
        yield from _gathered(config, local)
    else:
        standing = configured_members(config)
        token = members_token(config, standing)
        if standing:
            said = f"stores of the configured agents on {listed([member.name for member in standing])}"
            yield PackTarget(_staged(config, standing), standing, token, said)
        else:
            yield PackTarget(config, (), token, _own_store(config))


def _own_store(config: Config) -> str:
    return f"store {config.store} ({explained_store().why})"


def _gathered(config: Config, local: int) -> Iterator[PackTarget]:
    clock = SystemClock()
    backend: LocalBackend | SlurmBackend
    if local:
        backend = LocalBackend.on_this_machine(local, os.environ, config.store, config.state)
    else:
        backend = SlurmBackend.from_environment(os.environ, config.state)
    private_folder(backend.folder)
    secret = new_token()
    token = token_of(secret, Attempt(backend.job, backend.restart, 0))
    pool = AgentPool(backend.start_agents(secret), lambda _: token, clock)
    try:
        logs = str(backend.folder / "agents.log")
        unheard = Unheard(backend.unheard, clock, 0.0)
        pool.gather(backend.nodes, len(backend.nodes), logs=logs, told_to_end=lambda: False, unheard=unheard)
        addresses = {node: one.topology_address for node, one in pool.facts.items()}
        fabric = fabric_below(addresses, None if local else site_of(config), backend.fabric)
        members = tuple(facts.member for facts in with_domains(pool.facts, fabric).values())
        places: dict[str, list[NodeName]] = {}
        for node, one in pool.facts.items():
            places.setdefault(f"{one.store} ({one.store_why})", []).append(node)
        said = "; ".join(f"store {place} on {listed(sorted(nodes))}" for place, nodes in places.items())
        said = f"stores of {local} local nodes below {config.store}" if local else said
        yield PackTarget(_staged(config, () if local else members), members, token, said)
    finally:
        pool.close()


def _staged(config: Config, members: Sequence[Member]) -> Config:
    """Return the configuration with a folder for what waits to be placed, where this host is none of the members.

    A login node has no SSD of the cluster's; what waits there is gone once it is placed.
    """
    if node_name(config) in {member.name for member in members}:
        return config
    folder = Path(tempfile.gettempdir()) / f"deeplink-staging-{os.getuid()}"
    return replace(config, store=private_folder(folder))


@dataclass(frozen=True, slots=True)
class StandingAgents:
    """The standing agents, and what they hold."""

    members: tuple[Member, ...]
    token: str
    held: Mapping[NodeName, Mapping[ShardId, bool] | None]

    @classmethod
    def of(cls, config: Config) -> StandingAgents:
        """Return the configured ones."""
        members = configured_members(config)
        if not members:
            raise DeepLinkError(
                "no standing agents are configured (members): nothing can be warmed before the job starts",
                remedy="The job's own agents bring its data when it starts; or run agents as a service "
                "(ansible/).",
            )
        token = members_token(config, members)
        return cls(members, token, held_by(members, token, SystemClock()))


def _no_nodes(job: str, problem: str) -> DeepLinkError:
    return DeepLinkError(
        f"job {job}: {problem}", remedy="Name nodes and datasets: --nodes LIST DATASET.", exit_code=2
    )


def _not_member(node: str, problem: str) -> DeepLinkError:
    return DeepLinkError(f"{node} {problem}", remedy="`deeplink warm NAME --dry-run` lists the members.")


def chosen(
    words: Sequence[str], nodes: str | None, config: Config
) -> tuple[tuple[NodeName, ...], tuple[str, ...]]:
    """Return nodes and datasets: as they are named, or those of a job."""
    if nodes is not None:
        if not words:
            raise _no_nodes("-", "which DATASET?")
        return unfold(nodes), tuple(words)
    if not words or not words[0].isdigit():
        raise _no_nodes(words[0] if words else "-", "give a job's number, or --nodes LIST")
    return _of_job(words[0], tuple(words[1:]), config)


def _of_job(job: str, named: tuple[str, ...], config: Config) -> tuple[tuple[NodeName, ...], tuple[str, ...]]:
    known = decision.read(decision.job_folder(config.state, job))
    if not known:
        raise _no_nodes(job, "it has no record here: was it submitted with `deeplink sbatch`?")
    datasets = named or known[-1].ask.data
    if not datasets:
        raise _no_nodes(job, "which DATASET? it was submitted without --deeplink-data")
    hint = known[-1].decision
    nodes: tuple[NodeName, ...] = ()
    with suppress(DeepLinkError):  # without Slurm the record has to do
        nodes = Slurm().job(int(job)).nodes
    nodes = nodes or hint.nodes or hint.expected
    if not nodes:
        raise _no_nodes(job, f"its nodes are not known yet: {hint.words}")
    return nodes, datasets


def moves_to(
    nodes: Sequence[NodeName], datasets: Sequence[str], agents: StandingAgents, config: Config, *, replicas: int
) -> list[Moves]:
    """Return what nodes are to bring of datasets."""
    catalog, domains = Catalog(config.catalog), _domains(nodes, agents, config)
    found = []
    for dataset in datasets:
        place = DatasetPath.parse(dataset)
        index = catalog.open(place.name, place.version)
        moves = for_job(place.name, index, nodes, agents.members, agents.held, replicas=replicas, domains=domains)
        found.append(moves)
    return found


def _domains(nodes: Sequence[NodeName], agents: StandingAgents, config: Config) -> dict[NodeName, str]:
    """Return what each node fails together with, as `deeplink run` finds it when it stands on them."""
    weight = {member.name: member.weight for member in agents.members}
    fabric = fabric_below(
        dict.fromkeys(nodes, ""), site_of(config), lambda: fabric_from_switches(Slurm().topology())
    )
    return failure_domains(fabric, {node: weight.get(node, 1) for node in nodes})


def moves_off(node: str, datasets: Sequence[str], agents: StandingAgents, config: Config) -> list[Moves]:
    """Return what is to be copied away from a node: of the datasets named, or of every version there is."""
    name = NodeName(node)
    if name not in agents.held:
        raise _not_member(node, "is no member")
    if agents.held[name] is None:
        raise _not_member(node, "does not answer")
    if not any(held is not None for other, held in agents.held.items() if other != name):
        raise _not_member(node, "is the only member that answers: no other could take what it holds")
    catalog = Catalog(config.catalog)
    if datasets:
        places = [DatasetPath.parse(dataset) for dataset in datasets]
        versions = [(one.name, catalog.resolved(one.name, one.version)) for one in places]
    else:
        versions = [(one, version) for one in catalog.names() for version in catalog.versions(one)]
    found = [
        off_node(one, catalog.open(one, version), name, agents.members, agents.held) for one, version in versions
    ]
    return [moves for moves in found if moves.copies or datasets]


AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class HomeChoice:
    """Where a pack keeps the shards besides, and why."""

    url: str  # empty for nowhere
    why: str
    named: bool = False  # in the command or the configuration, else by the rule

    def made(self, catalog: Path) -> HomeChoice:
        """Return the choice once its folder is there; nowhere, where the rule's cannot be written to."""
        if self.named or not self.url:
            return self
        try:
            make_home_beside(catalog)
        except HomeError as problem:
            return HomeChoice("", str(problem))
        return self


def chosen_home(config: Config, given: str = "", *, local: int = 0, here: bool = False) -> HomeChoice:
    """Return the home of a pack onto what `target` would give; writes nothing.

    `given` is a folder, a URL, "none", or empty for what the configuration says. Its "auto" is the folder beside a
    catalog that nodes share: one on a file system of that kind, and that of a pack in a Slurm job or onto agents
    of other hosts, which will look for it there.
    """
    asked = given or config.home
    if asked != AUTO:
        where = "as the command says" if given else "as the setting `home` says"
        path = asked if "://" in asked else os.path.expandvars(Path(asked).expanduser())
        return HomeChoice("" if asked == NONE else path, where, named=True)
    kind = file_system(config.catalog)
    if is_shared(kind):
        return HomeChoice(home_beside(config.catalog), f"the catalog lies on {kind}, which nodes share")
    members = () if here or local else configured_members(config)
    if not all(is_loopback(member.address.rpartition(":")[0].strip("[]")) for member in members):
        return HomeChoice(home_beside(config.catalog), "agents of other hosts read the catalog")
    if not (here or local or members) and os.environ.get("SLURM_JOB_ID"):
        return HomeChoice(home_beside(config.catalog), "the nodes of jobs read the catalog")
    return HomeChoice("", f"the catalog lies on {kind or 'an unknown file system'}, which no other node sees")
