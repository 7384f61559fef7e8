"""Chooses nodes again for a job that is about to restart, as its submission did.

The same code places it as `deeplink plan` places waiting jobs: near its data, close together, and by name only
where all those nodes are free and no job before it may be given them. In doubt nothing is wished.
"""

from __future__ import annotations

import logging
import os
import pwd
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.call_with_timeout import call_with_timeout
from deeplink.errors import DeepLinkError
from deeplink.scheduler.planner.cluster_state import wishes_nodes
from deeplink.scheduler.planner.loop import read_queue
from deeplink.scheduler.planner.reconcile import HintChange, Mine, plan
from deeplink.scheduler.wish import record
from deeplink.scheduler.wish.binding import taking_back
from deeplink.scheduler.wish.decision import Decision, HintKind, Recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from deeplink.clock import Clock
    from deeplink.scheduler.planner.cluster_state import PlannerCluster
    from deeplink.scheduler.planner.queue import Row
    from deeplink.scheduler.slurm.command import Runner
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

QUESTION_S = 1.0
"""How long one question to Slurm may take here: a wish is worth no more of a job's recovery."""
WISH_S = 3.0
"""How long all of it may take: a user's record may lie on storage that hangs."""
USUAL_STATE = Path(".local/state/deeplink")


@dataclass(frozen=True, slots=True)
class RequeueHint:
    """What to change about a job before it starts again.

    Attributes:
        changes: in scontrol's words; empty for nothing.
        nodes: those that it is wished to run on now; empty for none.
    """

    changes: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueHints:
    """Makes wishes anew for jobs that were submitted with `deeplink sbatch`.

    Args:
        run: runs Slurm's commands, each for `QUESTION_S` at most.
        state_of: the state folder of a user; None where it cannot be told.
        owner_of: the number of a user whose record it is; None where it is our own.
        longest_s: how long a wish may take.
        ground: surveys the cluster for jobs, in bounded time.
    """

    run: Runner
    state_of: Callable[[str], Path | None]
    ground: Callable[[Sequence[Mine]], PlannerCluster]
    clock: Clock
    owner_of: Callable[[str], int | None] = lambda _user: None
    longest_s: float = WISH_S

    def anew(self, job: int, excluded: AbstractSet[NodeName]) -> RequeueHint | None:
        """Return the wish for a job that waits and is about to be let go; None where nothing is known of it.

        Args:
            job: which.
            excluded: nodes that it will not be given.
        """
        try:
            return call_with_timeout(lambda: self._anew(job, frozenset(excluded)), self.longest_s)
        except (DeepLinkError, OSError) as problem:
            log.info("job %d: no wish for nodes: %s", job, problem)
            return None

    def _anew(self, job: int, excluded: frozenset[NodeName]) -> RequeueHint | None:
        queue = read_queue(self.run)
        row = next((row for row in queue if row.id == job and row.waits), None)
        known = self._known(row.user, row.record_id) if row else None
        if row is None or known is None:
            return None
        folder, last = known
        mine = self._mine(row, last, excluded)
        moves = plan(
            [mine], [mine.row if one is row else one for one in queue], self.ground([mine]), mine.wished_at
        )
        return self._carried(folder, row, last, moves[0]) if moves else None

    def _mine(self, row: Row, last: Recorded, excluded: frozenset[NodeName]) -> Mine:
        # Slurm tells a job that lost nodes by those it had left, and its hold is about to be cleared.
        # Nodes that were wished for its last run count no more.
        nodes, required = max(row.nodes, last.ask.nodes), frozenset() if row.wished else row.required
        wish = last.decision
        if wishes_nodes(wish) and not required:
            wish = replace(wish, kind=HintKind.NOTHING, nodes=())
        row = replace(row, reason="", nodes=nodes, excluded=excluded, required=required)
        return Mine(row=row, ask=last.ask, wish=wish, wished_at=self.clock.unix())

    def _carried(self, folder: Path, row: Row, last: Recorded, move: HintChange) -> RequeueHint:
        nodes = move.decision.nodes if wishes_nodes(move.decision) else ()
        changes = {**(taking_back(row.comment) if row.wished else {}), **move.fields}
        if changes:
            self._append(folder, row.user, last, move.decision)
        return RequeueHint(changes, nodes)

    def _known(self, user: str, job: str) -> tuple[Path, Recorded] | None:
        state = self.state_of(user)
        if state is None:
            return None
        folder = record.job_folder(state, job)
        found = record.read(folder)
        return (folder, found[-1]) if found else None

    def _append(self, folder: Path, user: str, last: Recorded, decision: Decision) -> None:
        line = Recorded(unix=self.clock.unix(), by="watch", ask=last.ask, decision=decision)
        record.append(folder, line, self.owner_of(user))


def other_user(user: str) -> int | None:
    """Return the number of a user, unless it is us, or he is not known (then nothing of his is found either)."""
    try:
        number = pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
    return None if number == os.getuid() else number


def state_folder(own: Path, user: str) -> Path | None:
    """Return where a user's records are: as ours, below his home; where ours are elsewhere, at the usual place."""
    try:
        entry = pwd.getpwnam(user)
        if entry.pw_uid == os.getuid():
            return own
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None
    below = own.relative_to(home) if own.is_relative_to(home) else USUAL_STATE
    return Path(entry.pw_dir) / below
