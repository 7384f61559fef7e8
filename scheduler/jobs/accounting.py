"""Slurm's own accounting of jobs, for those that no journal has."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from deeplink.core.text import printable

if TYPE_CHECKING:
    from collections.abc import Collection

    from deeplink.scheduler.slurm.command import Runner

ASK_S = 60.0
"""slurmdbd may take long over weeks of a large site."""
_FIELDS = ("JobIDRaw", "User", "ElapsedRaw", "AllocNodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedJob:
    """One job, or one of its runs, as Slurm accounts it within the time that was asked for."""

    job: int
    user: str
    elapsed_s: float
    nodes: int

    @property
    def node_s(self) -> float:
        """Seconds of nodes that it held."""
        return self.elapsed_s * self.nodes


def accounted(run: Runner, since_unix: float, until_unix: float, *, user: str = "") -> tuple[AccountedJob, ...]:
    """Return what Slurm accounted between two times, of one user or of all.

    Raises:
        CommandError, CommandTimeoutError, CommandMissingError: it does not answer, or keeps no accounts.
    """
    times = [f"{datetime.fromtimestamp(unix):%Y-%m-%dT%H:%M:%S}" for unix in (since_unix, until_unix)]  # noqa: DTZ006 - Slurm's times are of this host's own zone
    argv = ["sacct", "-n", "-P", "-X", "-T", "-D", "-S", times[0], "-E", times[1], "-o", ",".join(_FIELDS)]
    return parse_accounting(run([*argv, "-u", user] if user else [*argv, "-a"], timeout_s=ASK_S))


def parse_accounting(text: str) -> tuple[AccountedJob, ...]:
    """Read `sacct -n -P -X -o JobIDRaw,User,ElapsedRaw,AllocNodes`; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        job, _, rest = line.partition("|")
        user, elapsed, nodes = rest.split("|") if rest.count("|") == len(_FIELDS) - 2 else ("", "", "")
        if job.isdecimal() and elapsed.isdecimal() and nodes.isdecimal():
            found.append(
                AccountedJob(job=int(job), user=printable(user), elapsed_s=float(elapsed), nodes=int(nodes))
            )
    return tuple(found)


def without(jobs: Collection[AccountedJob], known: Collection[int]) -> dict[str, tuple[int, float]]:
    """Return of each user how many jobs no journal has, and the seconds of nodes that these held."""
    found: dict[str, tuple[int, float]] = {}
    for one in jobs:
        if one.job not in known and one.node_s:
            count, seconds = found.get(one.user, (0, 0.0))
            found[one.user] = count + 1, seconds + one.node_s
    return found
