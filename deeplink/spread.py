"""The nodes of an allocation as members of a cache, for as long as a pack needs them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.clock import Clock, SystemClock
from deeplink.scheduler.launch.fleet import Fleet
from deeplink.scheduler.launch.local import LocalBackend
from deeplink.scheduler.launch.slurm import SlurmBackend
from deeplink.types import Member, NodeName
from deeplink.wire import new_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.config import Config


@dataclass(frozen=True, slots=True)
class Gathered:
    """Members to place shards on, and the token their calls carry."""

    members: tuple[Member, ...]
    token: str


def in_allocation(env: Mapping[str, str] | None = None) -> bool:
    """Tell whether this process stands in a Slurm job of more than one node, outside of its steps."""
    env = os.environ if env is None else env
    nodes = env.get("SLURM_JOB_NUM_NODES", env.get("SLURM_NNODES", "1"))
    return (
        env.get("SLURM_JOB_ID", "").isdigit() and nodes.isdigit() and int(nodes) > 1 and "SLURM_STEP_ID" not in env
    )


@contextmanager
def gathered(config: Config, *, local: int = 0, clock: Clock | None = None) -> Iterator[Gathered]:
    """Start an agent on every node of this allocation (or `local` ones on this machine), and end them at the end.

    Raises:
        NoAllocationError: this is no allocation.
        AgentsFailedError: an agent did not come up.
    """
    backend: LocalBackend | SlurmBackend
    if local:
        backend = LocalBackend.on_this_machine(local, os.environ, config.store, config.state)
    else:
        backend = SlurmBackend.from_environment(os.environ, config.state)
    folder = backend.folder
    folder.mkdir(parents=True, exist_ok=True)
    token = new_token()
    fleet = Fleet(backend.start_agents(token), token, clock or SystemClock())
    try:
        logs = str(folder / "agents.log")
        fleet.gather(backend.nodes, len(backend.nodes), logs=logs, told_to_end=lambda: False)
        yield Gathered(tuple(Member(NodeName(f.node), f.address) for f in fleet.facts.values()), token)
    finally:
        fleet.close()
