"""`deeplink.pack`; and who gets shards: the nodes of a pack, its packed home, the nodes that a prefetch warms."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.cache.catalog import Catalog, checked_name
from deeplink.cache.errors import HomeError, SourceError
from deeplink.cache.membership import configured_members, members_token, node_name
from deeplink.cache.packer import PackResult, check_pack
from deeplink.cache.packer import pack as pack_source
from deeplink.cache.replicate.warming import Moves, for_job, held_by, off_node
from deeplink.cache.source.home import home_beside, make_home_beside
from deeplink.cache.source.selection import Selection
from deeplink.cache.source.source import ITERABLE
from deeplink.cache.source.spool import SpooledSource
from deeplink.cache.source.tables import TableColumns
from deeplink.core.clock import SystemClock
from deeplink.core.config import explained_store, load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.store_place import file_system, is_shared
from deeplink.core.text import listed
from deeplink.core.types import Attempt, NodeName, ShardId
from deeplink.fs.library import DatasetPath
from deeplink.ops.inventory import PackTarget, note_placed
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
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.cache.source.source import Source
    from deeplink.core.config import Config
    from deeplink.core.types import Member

log = logging.getLogger(__name__)


def pack(  # noqa: PLR0913 - as the command has them
    source: str | os.PathLike[str] | Iterable[Any],
    name: str,
    *,
    key: str = "",
    columns: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    follow_links: bool = False,
    skip_bad: bool = False,
    append: bool = False,
    home: str = "",
    replace: bool = False,
    config: Config | None = None,
) -> PackResult:
    """Pack samples as the newest version of dataset `name`, and return what it came to.

    They go to the configured members, to the nodes of the allocation this runs in front of, or into this node's
    store. An iterable is written to a file in that store first; it has no source that could be read again, so that
    its copies at members, and `home`, are all there is of it.

    Args:
        source: a folder, URL, tars or tables, as `deeplink pack` takes them; or an iterable of pairs (key, bytes)
            or (key, {part: bytes}), or of mappings, such as a Hugging Face dataset, whose values are the parts of
            a sample. Text is packed as UTF-8, None is no part, other values as JSON.
        name: of the dataset.
        key: of tables and mappings, the column with the samples' keys; empty for their numbers.
        columns: of tables and mappings, those to pack; empty for all but `key`.
        include: globs of files to pack; empty for all.
        exclude: globs of files and folders to leave out, besides those left out by default.
        follow_links: follow links out of the folder and links to folders.
        skip_bad: leave out files that cannot be packed; the result names them.
        append: share shards of the newest version whose files are as they were.
        home: the packed home, a folder or URL that keeps shards and index besides; "none" for none, empty for what
            the configuration says, which is one where nodes share the catalog.
        replace: let a name whose newest version is of another source be of this one.
        config: settings; None for the configured ones.

    Raises:
        SourceError: the source cannot be packed, or a sample of it.
        CatalogError: the catalog cannot be written, or the name is of another source.
        DeepLinkError: shards cannot be placed, or agents not be started.
    """
    config = config or load_config()
    checked_name(name)
    wanted = Selection(
        include=tuple(include), exclude=tuple(exclude), follow_links=follow_links, skip_bad=skip_bad
    )
    with ExitStack() as stack:
        origin: str | Source
        if isinstance(source, str | os.PathLike):
            origin = TableColumns(key, tuple(columns)).url(os.fspath(source))
        elif append or wanted != Selection():
            raise SourceError(ITERABLE, "append, globs and links are for files", "Filter the iterable itself.")
        else:
            origin = stack.enter_context(SpooledSource(config.store))
        kept = chosen_home(config, home)
        named = kept.url if kept.named else ""
        check_pack(origin, name, config=config, append=append, home=named, replace=replace)
        home = kept.made(config.catalog).url
        if isinstance(origin, SpooledSource):
            origin.take(keyed(source, key, columns))  # type: ignore[arg-type]  # no path: an iterable
        to = stack.enter_context(target(config))
        result = pack_source(
            origin,
            name,
            config=to.config,
            wanted=wanted,
            members=to.members,
            token=to.token,
            append=append,
            home=home,
        )
        index = Catalog(to.config.catalog).open(result.name, result.version)
    note_placed(config.catalog, result.name, index, result.placed)
    copies = min(map(len, result.placed.values()), default=0)
    if isinstance(origin, SpooledSource) and (result.home_lacks or not result.home):
        log.warning(
            "%s has no source: its only copies are %d on nodes' SSDs; home= keeps one on shared storage",
            name,
            copies,
        )
    return result


def keyed(items: Iterable[Any], key: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield samples with their keys: pairs as they are, and of mappings the values of `columns`.

    Raises:
        SourceError: an item is neither, or a mapping lacks a column.
    """
    for number, item in enumerate(_undecoded(items)):
        if isinstance(item, Mapping):
            names = columns or [name for name in item if name != key]
            try:
                stem = str(item[key]) if key else f"{number:08d}"
                yield stem, {name: _with_bytes(item[name]) for name in names}
            except KeyError as missing:
                there = f"There are: {', '.join(map(str, item))}."
                raise SourceError(ITERABLE, f"item {number:,} has no {missing}", there) from None
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):  # noqa: PLR2004 - a pair
            yield item
        else:
            raise SourceError(
                ITERABLE,
                f"item {number:,} is a {type(item).__name__}, neither (key, bytes) nor a mapping",
                "Of several splits, pack one at a time.",
            )


def _undecoded(items: Iterable[Any]) -> Iterable[Any]:
    """Return a Hugging Face dataset whose images and audio come as the bytes they are stored as."""
    features = getattr(items, "features", None)
    if isinstance(features, Mapping):
        for column, feature in features.items():
            if getattr(feature, "decode", False) and dataclasses.is_dataclass(feature):
                stored = dataclasses.replace(feature, decode=False)  # type: ignore[type-var]
                items = items.cast_column(column, stored)  # type: ignore[attr-defined]
    return items


def _with_bytes(value: Any) -> Any:
    if isinstance(value, Mapping) and "bytes" in value and value["bytes"] is None and value.get("path"):
        try:
            return Path(value["path"]).read_bytes()
        except OSError as problem:
            raise SourceError.unreadable(ITERABLE, value["path"], problem.strerror or str(problem)) from problem
    return value


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
