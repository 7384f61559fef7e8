"""Looking at jobs: what Slurm says of all of them, by one shared question of each kind, and what each left."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, TypeVar

from deeplink.core.text import printable
from deeplink.scheduler.jobs.job_folder import EVENTS, folders, read_folder
from deeplink.scheduler.jobs.job_names import JobName, matching, no_job, the_one, unknown_job
from deeplink.scheduler.jobs.picture import Picture, picture
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.cached import CachedRunner, answers_folder
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import JOB_FIELDS, duration_s, fresh_separator, job_row, names_of, raw_rows
from deeplink.scheduler.topology.graph import Fabric, fabric_from_addresses
from deeplink.scheduler.topology.sources.slurm_topology import fabric_from_switches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow

_MORE = ("Partition", "TimeUsed", "TimeLimit", "StartTime", "STDOUT", "ReqNodes")
STALE_S = 3_600.0
"""Slurm's last answer is shown, with its age, for so long while it gives no newer one."""
QUERY_S = 15.0
"""Longer than Slurm's own clients wait for a dead controller with default settings (9 s)."""
ENDED_S = 86_400.0
MOST_ENDED = 10
MOST_SHOWN = 500
T = TypeVar("T")
_SILENCE = (command.CommandError, command.CommandTimeoutError, command.CommandMissingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """One job with what people ask besides. None: Slurm does not say."""

    job: JobRow
    partition: str = ""
    used_s: float | None = None  # how long it has run
    limit_s: float | None = None  # how long it may; infinite where there is no limit
    start_unix: float | None = None  # when it began, or is expected to
    output: str = ""  # where its output goes, as Slurm tells it: patterns may be left in it
    required: tuple[NodeName, ...] = ()  # the nodes that it must have


def queue(slurm: Slurm, *, user: str = "") -> list[Queued]:
    """Return every job Slurm remembers, of all users or of one; raises what `Slurm.jobs` raises."""
    separator = fresh_separator()
    layout = ",".join(f"{name}:{separator}" for name in (*JOB_FIELDS, *_MORE))
    argv = ["squeue", "-h", "-a", "-r", "--states=all", "-O", layout]
    return parse_queue(slurm.run([*argv, "-u", user] if user else argv), separator)


def parse_queue(text: str, separator: str) -> list[Queued]:
    """Read `squeue -h -O` with `separator` behind every field."""
    return [_queued(fields) for fields in raw_rows(text, separator, len(JOB_FIELDS) + len(_MORE))]


def _queued(fields: list[str]) -> Queued:
    partition, used, limit, began, output, required = fields[len(JOB_FIELDS) :]
    return Queued(
        job=job_row(list(map(printable, fields[: len(JOB_FIELDS)]))),  # its output is a file's name, as it is
        partition=partition,
        used_s=duration_s(used),
        # Of a running job without a limit squeue prints a year.
        limit_s=inf if limit == "365-00:00:00" else duration_s(limit),
        start_unix=_unix(began),
        output="" if output in {"(null)", "N/A"} else output,
        required=names_of("" if required in {"(null)", "N/A"} else required.strip(), "squeue"),
    )


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()  # Slurm's times are of this host's own zone
    except ValueError:  # N/A, or SLURM_TIME_FORMAT asks for something else
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """Several jobs."""

    pictures: tuple[Picture, ...]  # the newest last
    hidden: int  # jobs of the user's in the queue that DeepLink knows nothing of, and that were not asked for
    cut: int  # jobs beyond the bound
    problem: str  # why Slurm's word is old, or missing; empty where it is fresh
    told_unix: float  # when Slurm last answered; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOnFabric:
    """One job, with the fabric its nodes hang on."""

    picture: Picture
    fabric: Fabric
    problem: str
    told_unix: float


def me() -> str:
    """Return the name Slurm knows us by."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # squeue takes numbers too
        return str(os.getuid())


def shared(
    state: Path, clock: Clock, interval_s: float, *, stale_s: float = STALE_S, env: Mapping[str, str] | None = None
) -> CachedRunner:
    """Return the way to Slurm that this user's commands share on this host."""
    env = os.environ if env is None else env
    return CachedRunner(
        folder=answers_folder(env, state),
        interval_s=interval_s,
        stale_s=stale_s,
        clock=clock,
        env=env,
        run=command.within(QUERY_S),
    )


@dataclass(slots=True, kw_only=True)
class Viewer:
    """Looks again and again; what Slurm last said is kept. One thread only."""

    asked: CachedRunner
    state: Path
    clock: Clock
    user: str
    _nodes: dict[str, NodeRow] = field(default_factory=dict)
    _fabric: Fabric = field(default_factory=lambda: Fabric({}))
    _problem: str = ""
    _everyone: bool = False
    _gone: str = ""

    @property
    def slurm(self) -> Slurm:
        """Slurm, by answers that are shared."""
        return Slurm(self.asked)

    @property
    def silent(self) -> bool:
        """Whether Slurm gave no answer when it was asked last."""
        return bool(self._problem)

    def table(self, *, everything: bool = False) -> JobTable:
        """Return the user's jobs that DeepLink knows of, or everybody's jobs of every kind."""
        rows = self._queue("" if everything else self.user)
        there, now = folders(self.state), self.clock.unix()
        known = [one for one in rows if everything or self._folder_of(one, there) is not None]
        shown = known[-MOST_SHOWN:]
        made = [self._of(int(one.job.id), one, there, now) for one in shown]
        have = {int(one.job.id) for one in rows} | {_array_of(one.job.label) for one in rows}
        gone = sorted(set(there) - {job for job in have if job is not None})
        ended = [job for job in gone if now - _touched(there[job]) < ENDED_S][-MOST_ENDED:]
        made += [self._of(job, None, there, now) for job in ended]
        return JobTable(
            pictures=tuple(sorted(made, key=lambda one: one.id)),
            hidden=sum(not one.job.state.final for one in rows) - sum(not one.job.state.final for one in known),
            cut=len(known) - len(shown),
            problem=self._problem,
            told_unix=self._told(),
        )

    def one(self, word: str) -> JobOnFabric:
        """Return the job that a word names."""
        queued = self.find(word)
        there, now = folders(self.state), self.clock.unix()
        job = int(queued.job.id) if queued else JobName.parse(word).job
        if queued is None and (job not in there or not JobName.parse(word).single):
            raise unknown_job(word, self.state, asked=not self._problem)
        if not self._problem:
            self._look_around()
        made = self._of(job, queued, there, now)
        if queued is None and not made.watched:
            raise unknown_job(word, self.state, asked=not self._problem)
        return JobOnFabric(
            picture=made, fabric=self._fabric_of(there, job), problem=self._problem, told_unix=self._told()
        )

    def find(self, word: str) -> Queued | None:
        """Return the job that a word names as Slurm tells it, or None; raises what `one` raises."""
        name = JobName.parse(word)
        if name.step:
            raise no_job(word, "a job is wanted, and this is a step of one")
        rows = self._queue("" if self._everyone else self.user)
        row = the_one(word, [one.job for one in rows])
        if row is None and not self._problem and self._gone != word:
            # Just submitted, or another user's: ask once more, for everybody's jobs as they are now.
            self.asked.afresh()
            rows = self._queue("")
            row = the_one(word, [one.job for one in rows])
            self._everyone, self._gone = row is not None, "" if row else word
        return next((one for one in rows if row is not None and one.job == row), None)

    def every(self, words: Iterable[str]) -> dict[str, list[Queued]]:
        """Return for each word the jobs it names, as they are now."""
        names = {word: JobName.parse(word) for word in words}
        self.asked.afresh()
        rows = {one.job.label: one for one in queue(self.slurm)}
        jobs = [one.job for one in rows.values()]
        return {word: [rows[row.label] for row in matching(name, jobs)] for word, name in names.items()}

    def _queue(self, user: str) -> list[Queued]:
        found = self._answer(lambda: queue(self.slurm, user=user)) or []
        told = self.asked.told.get("squeue")
        if told is not None and told.problem:
            self._problem = told.problem
        return found

    def _look_around(self) -> None:
        if (nodes := self._answer(self.slurm.nodes)) is not None:
            self._nodes = {row.name: row for row in nodes}
            if (switches := self._answer(self.slurm.topology)) is not None:
                self._fabric = fabric_from_switches(switches)

    def _answer(self, question: Callable[[], T]) -> T | None:
        """Return Slurm's answer; None where it gives none, and why is noted."""
        self._problem = ""
        try:
            return question()
        except _SILENCE as problem:
            self._problem = str(problem)
        return None

    def _told(self) -> float:
        told = self.asked.told.get("squeue")
        return told.unix if told else 0.0 if self._problem else self.clock.unix()

    def _folder_of(self, one: Queued, there: Mapping[int, Path]) -> Path | None:
        array = _array_of(one.job.label)
        return there.get(int(one.job.id)) or (there.get(array) if array is not None else None)

    def _of(self, job: int, queued: Queued | None, there: Mapping[int, Path], now: float) -> Picture:
        array = _array_of(queued.job.label) if queued else None
        folder = there.get(job) or self.state / "jobs" / str(job)
        left = read_folder(folder, job, of_array=there.get(array) if array is not None else None)
        return picture(job, queued, left, self._nodes, now, asked=not self._problem)

    def _fabric_of(self, there: Mapping[int, Path], job: int) -> Fabric:
        if self._fabric.paths or job not in there:
            return self._fabric
        seen = read_folder(there[job], job).nodes
        return fabric_from_addresses({one.name: one.topology_address for one in seen})


def _array_of(label: str) -> int | None:
    number, underscore, _ = label.partition("_")
    return int(number) if underscore and number.isdigit() else None


def _touched(folder: Path) -> float:
    for path in (folder / EVENTS, folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
