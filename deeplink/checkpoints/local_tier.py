"""Checkpoints that go to this node's own disk first: what that takes, put together."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from deeplink.checkpoints.agents import JobAgents
from deeplink.checkpoints.mirror import Mirror, PartsCopy
from deeplink.checkpoints.multirank_save import SaveGroup
from deeplink.checkpoints.recovery_agreement import Council
from deeplink.checkpoints.restore_fetch import Bringer
from deeplink.checkpoints.upload_barrier import Meeting
from deeplink.plainrpc import PlainStatusError, Status
from deeplink.private import PrivateFolderError, private_folder

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.entries import Retention
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.checkpoints.states import StateSaver
    from deeplink.clock import Clock

log = logging.getLogger(__name__)


def refuse_strangers(local: Path | None, *, readonly: bool) -> None:
    """Make the folder on this node's disk, for this user alone: what others put there would be gone on from.

    Where its disk refuses, the nodes agree without it, and a save raises.

    Raises:
        PrivateFolderError: it is another user's, or others may write to it.
    """
    try:
        if local is not None and (not readonly or local.exists()):
            private_folder(local)
    except PrivateFolderError:
        raise
    except OSError as problem:
        log.warning("this node's disk: %s", problem)


def keep_here_first(
    hold: FolderOwnership, local: Path, states: StateSaver, retention: Retention, clock: Clock
) -> tuple[Mirror, Bringer | None]:
    """Return what copies this node's checkpoints to others, and what brings here what others have.

    The latter is there where the job's agents are: through them the nodes agree on what they go on from. Without,
    they meet in the shared folder (`Meeting`).

    Args:
        hold: of the shared folder; is told how its claim is agreed on.
        local: the folder on this node's disk.
        states: saves states; is told what to do with parts.
        retention: what the shared folder keeps.
        clock: where time comes from.
    """
    env = os.environ
    agents = JobAgents.of_environment(env, hold.folder, hold.attempt, clock)
    node = SaveGroup(int(env.get("GROUP_RANK") or 0), int(env.get("GROUP_WORLD_SIZE") or 1))
    mirror = Mirror(hold, local, retention, agents, parts=PartsCopy(hold, node, clock))
    states.is_first_here = env.get("LOCAL_RANK", "0") == "0"
    states.has_time = mirror.has_time
    states.kept = lambda name, goes_on: mirror.offer(name, to_shared=goes_on)
    hold.before_claiming = Meeting(hold, local, env, clock).bring_together
    if agents is None:
        return mirror, None
    council = Council(hold, local, agents, env, clock)
    hold.agents, hold.agreed = agents, lambda: _agreed(hold, council)
    return mirror, Bringer(hold, local, agents, clock, is_first_here=council.is_first_here)


def _agreed(hold: FolderOwnership, council: Council) -> Claim | None:
    if hold.agents is None:
        return None
    try:
        return council.agree()
    except PlainStatusError as refused:
        if refused.code != Status.UNIMPLEMENTED:
            raise
    log.warning("the agents of this job keep no copies of checkpoints")
    hold.agents = None
    return None
