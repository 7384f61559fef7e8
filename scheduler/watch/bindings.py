"""Nodes hinted by name are taken off jobs that wait for them, whoever named them and whatever became of him."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.jobs.job_view import me
from deeplink.scheduler.liveness.watchdog_client import BINDINGS, bindings_of
from deeplink.scheduler.placement.hint.cluster_survey import is_due, read_queue, taking_back
from deeplink.scheduler.slurm.command import CommandMissingError, is_unanswered
from deeplink.scheduler.slurm.settings import NO_ACCOUNTING, parse_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.core.clock import Clock
    from deeplink.scheduler.placement.hint.cluster_survey import Row
    from deeplink.scheduler.slurm.client import Slurm

log = logging.getLogger(__name__)

LOOK_S = 2.0  # how often the waiting jobs are asked for
AGAIN_S = 10.0
"""How long after a look that failed the next one comes: each may hold the watchdog's verdicts for some seconds."""
ACCOUNTING_S = 2.0  # bound on `sacctmgr`, which waits for slurmdbd
ROUND_S = 1.0
"""How long one look may change jobs: the watchdog's verdicts wait for it. The rest come in the next one."""
MOST_REFUSALS = 3
_OPERATORS = ("operator", "administrator")


@dataclass(slots=True, kw_only=True)
class Bindings:
    """Takes nodes hinted by name off waiting jobs. One thread only."""

    slurm: Slurm
    clock: Clock
    say: Callable[[str], None]
    serves: Callable[[str, bool], None] = lambda _service, _well: None
    _user: str | None = None
    _rights: bool = False
    _next: float = float("-inf")
    _since: dict[str, float] = field(default_factory=dict)
    _refusals: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Look at the waiting jobs, where it is time to. Slurm's silence is waited out."""
        now = self.clock.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        try:
            self._learn_rights()
            self._take_back(read_queue(self.slurm.run), now)
        except DeepLinkError as problem:
            log.info("nodes hinted by name are not looked after in this round: %s", problem)
            self._next = self.clock.monotonic() + AGAIN_S
            self._tell(well=False)
        else:
            self._tell(well=True)

    def _learn_rights(self) -> None:
        if self._user is None:
            self._rights = changes_all_jobs(self.slurm)
            self._user = me()

    def unable(self) -> None:
        """Say that nothing is looked after now."""
        self._tell(well=False)

    def _tell(self, *, well: bool) -> None:
        if self._user is not None:
            self.serves(BINDINGS if self._rights else bindings_of(self._user), well)

    def _take_back(self, queue: list[Row], now: float) -> None:
        bound = {row.label: row for row in queue if row.wished and (self._rights or row.user == self._user)}
        self._since = {label: self._since.get(label, now) for label in bound}
        self._refusals = {label: count for label, count in self._refusals.items() if label in bound}
        ends = self.clock.monotonic() + ROUND_S
        for label, row in bound.items():
            if self.clock.monotonic() >= ends:
                break
            if is_due(row.reason, now - self._since[label]) and self._refusals.get(label, 0) < MOST_REFUSALS:
                self._release(row)

    def _release(self, row: Row) -> None:
        try:
            self.slurm.update_job(row.address, **taking_back(row.comment))
        except DeepLinkError as refused:
            if is_unanswered(refused):
                raise
            self._refusals[row.label] = self._refusals.get(row.label, 0) + 1
            self.say(
                f"job {row.label} waits for the nodes hinted for it, and they cannot be taken off it: {refused}"
            )
        else:
            self.say(
                f"job {row.label} may start on any nodes: those hinted for it hold it ({row.reason or 'unseen'})"
            )


def changes_all_jobs(slurm: Slurm) -> bool:
    """Whether Slurm lets us change the jobs of all users."""
    if os.getuid() == 0:
        return True
    said = slurm.run(["scontrol", "show", "config"])
    if re.search(rf"^SlurmUser\s*=.*\({os.getuid()}\)\s*$", said, re.MULTILINE):
        return True
    if parse_settings(said).text("AccountingStorageType") in NO_ACCOUNTING:
        return False  # no one else has rights
    asked = ["sacctmgr", "-n", "-P", "show", "user", me(), "format=AdminLevel"]
    try:
        level = slurm.run(asked, timeout_s=ACCOUNTING_S)
    except CommandMissingError:
        return False
    return level.strip().lower().startswith(_OPERATORS)
