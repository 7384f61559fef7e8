"""What `deeplink prefetch` does: whose nodes, which shards, and having them brought."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog
from deeplink.cache.holding.prefetch_plan import Moves, for_job, off_node
from deeplink.cache.holding.prefetching import Prefetched, prefetch
from deeplink.cache.holding.warming import held_by
from deeplink.cache.membership import configured_members, members_token
from deeplink.clock import SystemClock
from deeplink.errors import DeepLinkError
from deeplink.path import DatasetPath, resolved_version
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.config import Config
    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.types import Member, ShardId


class NoStandingAgentsError(DeepLinkError):
    """There is nobody on the nodes who could bring anything before the job starts."""

    def __init__(self) -> None:
        super().__init__(
            "no standing agents are configured (members): nothing can be warmed before the job starts",
            remedy="The job's own agents bring its data when it starts; or run agents as a service (ansible/).",
        )


class NotMemberError(DeepLinkError):
    """A node to be drained is no member, or does not answer."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(f"{node} {problem}", remedy="`deeplink warm NAME --dry-run` lists the members.")
        self.node, self.problem = node, problem


class NoNodesError(DeepLinkError):
    """It is not known which nodes a job will get."""

    exit_code = 2

    def __init__(self, job: str, problem: str) -> None:
        super().__init__(f"job {job}: {problem}", remedy="Name nodes and datasets: --nodes LIST DATASET.")
        self.job, self.problem = job, problem


@dataclass(frozen=True, slots=True)
class StandingAgents:
    """The standing agents, and what they hold."""

    members: tuple[Member, ...]
    token: str
    held: Mapping[NodeName, Mapping[ShardId, bool] | None]

    @classmethod
    def of(cls, config: Config) -> StandingAgents:
        """Return the configured ones.

        Raises:
            NoStandingAgentsError: there are none.
            ConfigError, TokenFileError: the configuration cannot be used.
        """
        members = configured_members(config)
        if not members:
            raise NoStandingAgentsError
        token = members_token(config, members)
        return cls(members, token, held_by(members, token, SystemClock()))


def chosen(
    words: Sequence[str], nodes: str | None, config: Config
) -> tuple[tuple[NodeName, ...], tuple[str, ...]]:
    """Return nodes and datasets: as they are named, or those of a job.

    Raises:
        NoNodesError: the job has no nodes and no wish for any, or no dataset is named.
        NodeSetError: the list of nodes is none.
    """
    if nodes is not None:
        if not words:
            raise NoNodesError("-", "which DATASET?")
        return unfold(nodes), tuple(words)
    if not words or not words[0].isdigit():
        raise NoNodesError(words[0] if words else "-", "give a job's number, or --nodes LIST")
    return _of_job(words[0], tuple(words[1:]), config)


def _of_job(job: str, named: tuple[str, ...], config: Config) -> tuple[tuple[NodeName, ...], tuple[str, ...]]:
    from deeplink.scheduler.wish import record

    known = record.read(record.job_folder(config.state, job))
    if not known:
        raise NoNodesError(job, "it has no record here: was it submitted with `deeplink sbatch`?")
    datasets = named or known[-1].ask.data
    if not datasets:
        raise NoNodesError(job, "which DATASET? it was submitted without --deeplink-data")
    wish = known[-1].decision
    nodes = _running_on(job) or wish.nodes or wish.expected
    if not nodes:
        raise NoNodesError(job, f"its nodes are not known yet: {wish.words}")
    return nodes, datasets


def _running_on(job: str) -> tuple[NodeName, ...]:
    from deeplink.scheduler.slurm.client import Slurm

    try:
        return Slurm().job(int(job)).nodes
    except DeepLinkError:  # without Slurm the record has to do
        return ()


def moves_to(
    nodes: Sequence[NodeName], datasets: Sequence[str], fleet: StandingAgents, config: Config, *, replicas: int
) -> list[Moves]:
    """Return what nodes are to bring of datasets."""
    catalog, domains = Catalog(config.catalog), _domains(nodes, fleet, config)
    found = []
    for dataset in datasets:
        place = DatasetPath.parse(dataset)
        index = catalog.open(place.name, resolved_version(catalog, place.name, place.version))
        moves = for_job(place.name, index, nodes, fleet.members, fleet.held, replicas=replicas, domains=domains)
        found.append(moves)
    return found


def _domains(nodes: Sequence[NodeName], fleet: StandingAgents, config: Config) -> dict[NodeName, str]:
    """Return what each node fails together with, as `deeplink run` finds it when it stands on them."""
    from deeplink.cli.topology_site import site_of
    from deeplink.scheduler.launch.network_discovery import fabric_below
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.topology.domains import failure_domains
    from deeplink.scheduler.topology.graph import fabric_from_switches

    def asked() -> Fabric:
        return fabric_from_switches(Slurm().topology())

    weight = {member.name: member.weight for member in fleet.members}
    fabric = fabric_below(dict.fromkeys(nodes, ""), site_of(config), asked)
    return failure_domains(fabric, {node: weight.get(node, 1) for node in nodes})


def moves_off(node: str, datasets: Sequence[str], fleet: StandingAgents, config: Config) -> list[Moves]:
    """Return what is to be copied away from a node: of the datasets named, or of every version there is.

    Raises:
        NotMemberError: nobody can tell what the node holds, or nobody else could take it.
    """
    name = NodeName(node)
    if name not in fleet.held:
        raise NotMemberError(node, "is no member")
    if fleet.held[name] is None:
        raise NotMemberError(node, "does not answer")
    if not any(held is not None for other, held in fleet.held.items() if other != name):
        raise NotMemberError(node, "is the only member that answers: nobody could take what it holds")
    catalog = Catalog(config.catalog)
    if datasets:
        places = [DatasetPath.parse(dataset) for dataset in datasets]
        versions = [(one.name, resolved_version(catalog, one.name, one.version)) for one in places]
    else:
        versions = [(one, version) for one in catalog.names() for version in catalog.versions(one)]
    found = [
        off_node(one, catalog.open(one, version), name, fleet.members, fleet.held) for one, version in versions
    ]
    return [moves for moves in found if moves.copies or datasets]


def moved(moves: Moves, fleet: StandingAgents) -> Prefetched:
    """Have it brought, with progress on standard error."""
    from deeplink.cli.warm import shown_progress

    with shown_progress() as progress:
        return prefetch(moves, fleet.members, fleet.token, progress=progress)
