"""What the rank-hours that jobs held were for: training that went on, or what was lost, by cause.

An attempt's ranks hold their nodes from its first heartbeat to the next attempt's, or to its own last one:

    begin ..... first step ...... steps done again ...... steps ...... last step ..... end
    start, or restart              repeated                moved on      hang, restart, or moved on

What comes before the first step is "start" for a job's first attempt and "restart" for the others. What comes
after the last one is lost where an incident ended the attempt: to "hang" where its ranks hung, else to "restart".
A slow rank holds up the others by its part of each step ("slow"), and nodes that rest are lost to "spare". Where a
job reports no steps, or it is not known when the first one was, its hours are "unknown".
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from deeplink.core.text import printable
from deeplink.scheduler.journal.incident_json import GOES_ON
from deeplink.scheduler.recovery.records import IncidentKind, Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from deeplink.core.types import Attempt
    from deeplink.scheduler.recovery.records import AttemptRecord, Incident, JobRecord
    from deeplink.scheduler.slurm.command import Runner

CAUSES = ("start", "restart", "repeated", "hang", "slow", "spare", "unknown")
HOUR_S = 3_600.0
_NUMBER = r"(\d[\d.]*(?:e[+-]?\d+)?)"
_SLOWER = re.compile(rf"{_NUMBER} ms against {_NUMBER} ms")  # as launchers say it of a straggler
_NOT_ENDING = GOES_ON | {IncidentKind.NODE_BACK}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds of ranks: what was held, and what of it was lost, by cause of `CAUSES`."""

    held_s: float = 0.0
    lost_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def moved_s(self) -> float:
        """What moved training on."""
        return max(0.0, self.held_s - sum(self.lost_s.values()))

    @property
    def share(self) -> float | None:
        """What moved training on, of all of which it is known; None where nothing is."""
        known = self.held_s - self.lost_s.get("unknown", 0.0)
        return self.moved_s / known if known > 0 else None

    def __add__(self, other: Goodput) -> Goodput:
        """Return both together."""
        lost = {cause: self.lost_s.get(cause, 0.0) + other.lost_s.get(cause, 0.0) for cause in CAUSES}
        return Goodput(
            held_s=self.held_s + other.held_s, lost_s={cause: lost[cause] for cause in CAUSES if lost[cause]}
        )

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it, in rank-hours."""
        return {
            "held_h": self.held_s / HOUR_S,
            "moved_h": self.moved_s / HOUR_S,
            "goodput": self.share,
            "lost_h": {cause: self.lost_s.get(cause, 0.0) / HOUR_S for cause in CAUSES},
        }


def goodput(
    job: JobRecord,
    incidents: Iterable[Incident],
    first_steps: Mapping[Attempt, float],
    *,
    since_unix: float,
    until_unix: float,
) -> Goodput:
    """Return what a job's hours between two times were for.

    Args:
        job: with all its attempts.
        incidents: of this job; others are passed over.
        first_steps: when each attempt reported its first step, Unix time, as far as that is known.
        since_unix: what was before is left out.
        until_unix: what came after is left out.
    """
    reports = any(attempt.last_step is not None for attempt in job.attempts)
    by_attempt: defaultdict[Attempt, list[Incident]] = defaultdict(list)
    for incident in incidents:
        if incident.attempt is not None:
            by_attempt[incident.attempt].append(incident)
    whole, best = Goodput(), None
    for number, attempt in enumerate(job.attempts):
        follower = job.attempts[number + 1] if number + 1 < len(job.attempts) else None
        first = first_steps.get(attempt.attempt)
        repeated = 0
        if attempt.first_step is not None and best is not None:
            repeated = max(0, best - attempt.first_step + 1)
        course = _Course(attempt, _end(attempt, follower), first, by_attempt[attempt.attempt], repeated)
        part = course.goodput(since_unix, until_unix, is_first=number == 0, reports=reports)
        whole += part
        best = max(filter(None, (best, attempt.last_step)), default=best)
    return whole


def _end(attempt: AttemptRecord, follower: AttemptRecord | None) -> float:
    """Return until when an attempt held its nodes."""
    # Between two runs of Slurm's the job holds none.
    goes_on = follower is not None and follower.attempt.restart == attempt.attempt.restart
    return max(attempt.beat_unix, follower.began_unix if goes_on and follower else attempt.beat_unix)


@dataclass(frozen=True, slots=True)
class _Course:
    """One attempt from its first heartbeat to its end."""

    attempt: AttemptRecord
    end: float
    first_step_unix: float | None
    incidents: Sequence[Incident]
    repeated: int  # steps done again

    def goodput(self, since: float, until: float, *, is_first: bool, reports: bool) -> Goodput:
        attempt, ranks = self.attempt, self.attempt.world_size
        held = _overlap(attempt.began_unix, self.end, since, until)
        resting = len(attempt.spares) / len(attempt.nodes) if attempt.nodes else 0.0
        lost = dict.fromkeys(CAUSES, 0.0) | {"spare": resting * held}
        for cause, begin, end, share in self._lost(is_first=is_first, reports=reports):
            left = held - sum(lost.values()) + lost["spare"]
            lost[cause] += max(0.0, min(left, share * _overlap(begin, end, since, until)))
        return Goodput(
            held_s=ranks * held * (1 + resting),
            lost_s={cause: ranks * seconds for cause, seconds in lost.items() if seconds},
        )

    def _lost(self, *, is_first: bool, reports: bool) -> list[tuple[str, float, float, float]]:
        """Return what was lost: its cause, from when, until when, and which share of that time."""
        attempt, first = self.attempt, self.first_step_unix
        began, end = attempt.began_unix, self.end
        before = "start" if is_first else "restart"
        cause = self._ended_by()
        if attempt.last_step is None:
            return [(cause or before if reports else "unknown", began, end, 1.0)]
        if first is None:
            return [("unknown", began, end, 1.0)]
        first = min(max(first, began), end)
        last = min(max(attempt.last_step_unix, first), end)
        steps = max(1, attempt.last_step - (attempt.first_step or 0))
        step_s = (last - first) / steps
        lost = [(before, began, first, 1.0), ("repeated", first, min(last, first + self.repeated * step_s), 1.0)]
        if cause:
            lost.append((cause, last, end, 1.0))
        for one in self.incidents:
            found = _SLOWER.search(one.evidence) if one.kind == IncidentKind.STRAGGLER else None
            if found and step_s > 0:
                share = max(0.0, min(1.0, (float(found[1]) - float(found[2])) / 1e3 / step_s))
                lost.append(("slow", max(first, one.began_unix), min(last, one.recovered_unix or end), share))
        return lost

    def _ended_by(self) -> str:
        """Return what the time after its last step is lost to; empty where no incident ended it."""
        if self.attempt.phase is Phase.SUCCEEDED:
            return ""
        # One that was over, or still open, while steps went on did not end it. Not by its beginning: a node's last
        # word may come before the last step.
        last = self.attempt.last_step_unix
        kinds = {one.kind for one in self.incidents if (one.recovered_unix or one.detected_unix) >= last}
        kinds -= _NOT_ENDING
        if IncidentKind.RANKS_HUNG in kinds:
            return "hang"
        return "restart" if kinds else ""


def _overlap(begin: float, end: float, since: float, until: float) -> float:
    return max(0.0, min(end, until) - max(begin, since))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGoodput:
    """One job's part of a report."""

    job: str  # what it is called
    name: str
    user: str
    goodput: Goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """What the jobs of a time held and what of it moved training on: each, by user, by month and together."""

    jobs: tuple[JobGoodput, ...]  # those that lost most first
    users: Mapping[str, Goodput]
    months: Mapping[str, Goodput]  # `2026-11`, in order
    whole: Goodput

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "whole": self.whole.document(),
            "users": {user: one.document() for user, one in self.users.items()},
            "months": {month: one.document() for month, one in self.months.items()},
            "jobs": [
                {"job": one.job, "name": one.name, "user": one.user, **one.goodput.document()} for one in self.jobs
            ],
        }


def site_report(
    jobs: Iterable[tuple[JobRecord, Sequence[Incident], Mapping[Attempt, float]]],
    months: Sequence[tuple[str, float, float]],
) -> SiteReport:
    """Return the report of jobs over a time.

    Args:
        jobs: each with its incidents and when its attempts reported their first steps.
        months: the time, cut where months begin: the month, from when, until when.
    """
    found: list[JobGoodput] = []
    by_user: defaultdict[str, Goodput] = defaultdict(Goodput)
    by_month = {month: Goodput() for month, _, _ in months}
    for record, incidents, first_steps in jobs:
        made = JobGoodput(job=record.label, name=record.name, user=record.user, goodput=Goodput())
        for month, since, until in months:
            part = goodput(record, incidents, first_steps, since_unix=since, until_unix=until)
            by_month[month] += part
            by_user[record.user] += part
            made = replace(made, goodput=made.goodput + part)
        if made.goodput.held_s:
            found.append(made)
    found.sort(key=lambda one: (one.goodput.moved_s - one.goodput.held_s, one.job))
    users = {user: one for user, one in sorted(by_user.items(), key=lambda item: -item[1].held_s) if one.held_s}
    whole = Goodput()
    for one in by_month.values():
        whole += one
    return SiteReport(jobs=tuple(found), users=users, months=by_month, whole=whole)


# Slurm's own accounting of jobs, for those that no journal has.

ASK_S = 60.0
"""slurmdbd may take long over weeks of a large site."""
_ACCOUNTED = ("JobIDRaw", "User", "ElapsedRaw", "AllocNodes")


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
    argv = ["sacct", "-n", "-P", "-X", "-T", "-D", "-S", times[0], "-E", times[1], "-o", ",".join(_ACCOUNTED)]
    return parse_accounting(run([*argv, "-u", user] if user else [*argv, "-a"], timeout_s=ASK_S))


def parse_accounting(text: str) -> tuple[AccountedJob, ...]:
    """Read `sacct -n -P -X -o JobIDRaw,User,ElapsedRaw,AllocNodes`; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        job, _, rest = line.partition("|")
        user, elapsed, nodes = rest.split("|") if rest.count("|") == len(_ACCOUNTED) - 2 else ("", "", "")
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
