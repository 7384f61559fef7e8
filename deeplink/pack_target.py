"""Where a pack puts its shards: on the nodes of its allocation, on standing agents, or here alone."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.membership import configured_members, members_token, node_name
from deeplink.clock import Clock, SystemClock
from deeplink.private import private_folder
from deeplink.runtokens import token_of
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.local import LocalBackend
from deeplink.scheduler.launch.network_discovery import fabric_below
from deeplink.scheduler.launch.site import with_domains
from deeplink.scheduler.launch.slurm import SlurmBackend
from deeplink.scheduler.launch.unheard import Unheard
from deeplink.scheduler.slurm.within import is_in_step
from deeplink.tokens import new_token
from deeplink.types import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deeplink.config import Config
    from deeplink.scheduler.launch.site import SiteFabric
    from deeplink.types import Member


@dataclass(frozen=True, slots=True)
class PackTarget:
    """Where to pack to.

    Attributes:
        config: the settings to pack with: the store is this node's own, or where shards wait on their way.
        members: the agents to place shards on; none: this node's store alone.
        token: what calls to them carry.
    """

    config: Config
    members: tuple[Member, ...]
    token: str


def in_allocation(env: Mapping[str, str] | None = None) -> bool:
    """Tell whether this process stands in a Slurm job of more than one node, outside of its steps.

    >>> in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"})
    True
    >>> in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_ID": "0"})
    False
    """
    env = os.environ if env is None else env
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    return env.get("SLURM_JOB_ID", "").isdigit() and nodes.isdigit() and int(nodes) > 1 and not is_in_step(env)


def member_count(
    config: Config, *, local: int = 0, here: bool = False, env: Mapping[str, str] | None = None
) -> int:
    """Return how many members `target` would give.

    Raises:
        ConfigError: the list of members cannot be read.
    """
    env = os.environ if env is None else env
    if here or local:
        return 0 if here else local
    if not config.members and in_allocation(env):
        return int(env["SLURM_JOB_NUM_NODES"])
    return len(configured_members(config))


@contextmanager
def target(
    config: Config,
    *,
    local: int = 0,
    here: bool = False,
    clock: Clock | None = None,
    site_of: Callable[[Config], SiteFabric | None] = lambda _: None,
) -> Iterator[PackTarget]:
    """Give where to pack to: standing agents if any are configured, else the allocation's nodes, else this node.

    Agents that are started for it run until the end of the `with`.

    Args:
        config: the settings; `members` names standing agents.
        local: start so many agents on this machine instead, as `deeplink run --local` does.
        here: this node's store alone, whatever there is.
        clock: for every wait.
        site_of: reads the site's description of the fabric, for copies to lie apart; asked in an allocation alone.

    Raises:
        AgentsFailedError: the agent of a node did not come up.
        NoAllocationError: what Slurm says of the allocation is incomplete.
        PrivateFolderError: the folder for shards on their way is not this user's alone.
        TokenFileError: the token of standing agents cannot be read.
    """
    if here:
        yield PackTarget(config, (), "")
    elif local or (not config.members and in_allocation()):
        yield from _gathered(config, local, clock or SystemClock(), site_of)
    else:
        standing = configured_members(config)
        yield PackTarget(config, standing, members_token(config, standing))


def _gathered(
    config: Config, local: int, clock: Clock, site_of: Callable[[Config], SiteFabric | None]
) -> Iterator[PackTarget]:
    backend: LocalBackend | SlurmBackend
    if local:
        backend = LocalBackend.on_this_machine(local, os.environ, config.store, config.state)
    else:
        backend = SlurmBackend.from_environment(os.environ, config.state)
    private_folder(backend.folder)
    secret = new_token()
    token = token_of(secret, Attempt(backend.job, backend.restart, 0))
    fleet = AgentPool(backend.start_agents(secret), lambda _: token, clock)
    try:
        logs = str(backend.folder / "agents.log")
        unheard = Unheard(backend.unheard, clock, 0.0)
        fleet.gather(backend.nodes, len(backend.nodes), logs=logs, told_to_end=lambda: False, unheard=unheard)
        told = {node: one.topology_address for node, one in fleet.facts.items()}
        fabric = fabric_below(told, None if local else site_of(config), backend.fabric)
        members = tuple(facts.member for facts in with_domains(fleet.facts, fabric).values())
        among = not local and node_name(config) in {member.name for member in members}
        yield PackTarget(config if among else replace(config, store=_staging_folder()), members, token)
    finally:
        fleet.close()


def _staging_folder() -> Path:
    # A login node has no SSD of the cluster's; what waits there is gone once it is placed.
    return private_folder(Path(tempfile.gettempdir()) / f"deeplink-staging-{os.getuid()}")
