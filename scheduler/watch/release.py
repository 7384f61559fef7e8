"""Letting a requeued job go: without its hold, off the nodes that are suspected, onto the best of the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.silence import is_unanswered
from deeplink.scheduler.watch.exclusion import bounded, required_without, still_suspected

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.requeue_placement import RequeueHint, RequeueHints
    from deeplink.types import NodeName


@dataclass(slots=True, kw_only=True)
class Releaser:
    """Lets jobs go. One thread only.

    Args:
        say: told where a job was wished to run.
        wishes: says on which nodes a job should run; None: Slurm alone says it.
    """

    slurm: Slurm
    journal: Journal
    observer: Observer
    clock: Clock
    say: Callable[[str], None]
    wishes: RequeueHints | None = None

    def release(
        self, row: JobRow, exclude: tuple[NodeName, ...], *, carry: bool = True, held: bool = False
    ) -> None:
        """Clear the hold of a waiting job; its own exclusions stay, ours are as few as there is reason for.

        Args:
            row: the job.
            exclude: nodes that it is not to run on again.
            carry: whether those of its earlier restarts that are suspected still are among them.
            held: it is held as by a user, so that an earlier start alone changes nothing.
        """
        job = row.id
        place, before, now_unix = self.slurm.place(job), self.journal.excluded(job), self.clock.unix()
        users = {*place.excluded} - before.keys()
        older = (
            still_suspected(before, {node.name: node for node in self.journal.nodes()}, now_unix) if carry else ()
        )
        known = self.journal.job(job)
        size = len(known.newest.nodes) + len(known.newest.spares) if known else 0
        asks = replace(place, nodes=max(place.nodes, size), excluded=tuple(users))
        partition = self.slurm.partition_nodes(place.partitions) if exclude or older else frozenset()
        silent = self.observer.silent((*exclude, *older))
        ours = bounded((*exclude, *older), asks, partition, self.observer.cluster.nodes, silent)
        since = {name: now_unix if name in exclude else before[name] for name in ours if name not in users}
        # Before the command both, after it what is true: killed in between, ours are never taken for the user's.
        self.journal.set_excluded(job, {**before, **since})
        wanted = users | {*ours}
        changes = {} if wanted == {*place.excluded} else {"ExcNodeList": fold(sorted(wanted)) if wanted else ""}
        # It starts nowhere if it must run on a node that it must not run on.
        required = required_without(asks, {*ours})
        if required is not None:
            changes["ReqNodeList"] = fold(required) if required else ""
        wish = self.wishes.anew(job, wanted) if self.wishes and carry else None
        if not wish or not self._let_go(row, changes, wish):
            self.slurm.update_job(row.address, **changes, StartTime="now")
        if held:
            self.slurm.release(row.address)
        self.journal.set_excluded(job, since)

    def _let_go(self, job: JobRow, changes: Mapping[str, str], wish: RequeueHint) -> bool:
        """Let a job go with a wish; False where Slurm refuses that, which is no reason to keep it waiting."""
        try:
            self.slurm.update_job(job.address, **{**changes, **wish.changes}, StartTime="now")
        except CommandError as refused:
            if is_unanswered(refused):
                raise
            self.say(f"job {job.label}: its wish is refused: {refused.stderr.strip()}")
            return False
        if wish.nodes:
            self.say(f"job {job.label} is wished to run on {fold(wish.nodes)}")
        return True

    def look_ahead(self, exclude: tuple[NodeName, ...]) -> None:
        """Ask what a release will soon want to know of these nodes: a dead one says nothing for half a second."""
        self.observer.silent(exclude)
