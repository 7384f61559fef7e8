"""Which journals hold the incidents, and reading them: the watchdog's, or those of the user's own jobs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.records import ActionRecord, Incident, RankStack

MOST_COMPLETED = 50

_AGO = re.compile(r"(\d{1,6})([mhdw])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


journal_option = click.option(
    "--journal",
    "journal_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Which journal. [default: the watchdog's, else those of your jobs, below config state]",
)
"""The option of both commands."""


class IncidentUnknownError(DeepLinkError):
    """No incident of this number or id is on record."""

    def __init__(self, name: str, paths: tuple[Path, ...]) -> None:
        where = str(paths[0])
        if len(paths) > 1:
            # One folder per job, all in one.
            where = f"the journals of {len(paths)} jobs below {paths[0].parents[1]}"
        super().__init__(f"no incident {name!r} in {where}", remedy="`deeplink incidents` lists them.")
        self.name, self.paths = name, paths


@dataclass(frozen=True, slots=True)
class IncidentFound:
    """One incident with all that is on record of it, and what it is called here."""

    label: str
    incident: Incident
    actions: tuple[ActionRecord, ...]
    stacks: tuple[RankStack, ...]

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        from deeplink.scheduler.watch.incident_json import whole_document

        return whole_document(self.incident, self.actions, self.stacks)


@dataclass(frozen=True, slots=True)
class JournalSet:
    """The journals to read: one, or one per job; in those of jobs, numbers begin anew."""

    paths: tuple[Path, ...]
    per_job: bool

    @classmethod
    def found(cls, named: Path | None) -> JournalSet:
        """Return what is to be read: the file that was named, the watchdog's, or those of the user's jobs.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        from deeplink.config import load_config
        from deeplink.scheduler.watch.journal import default_journal

        state = load_config().state
        watchdog = default_journal(state)
        if named is None and not watchdog.exists():
            jobs = tuple(filter(_was_begun, sorted((state / "jobs").glob("*/journal.sqlite"))))
            if jobs:
                return cls(jobs, per_job=True)
        return cls(((named or watchdog).absolute(),), per_job=False)

    def label(self, incident: Incident) -> str:
        """Return what people call it: its number, with its job's before it where numbers begin anew."""
        if self.per_job and incident.attempt:
            return f"{incident.attempt.job}.{incident.number}"
        return str(incident.number)

    def one(self, name: str) -> IncidentFound:
        """Return the incident of this label or id.

        Raises:
            IncidentUnknownError: none is on record.
            JournalError: a journal cannot be read.
        """
        from deeplink.scheduler.watch.journal import Journal

        for path in self.paths:
            # "17.2" is number 2 of job 17's own journal; an id is unique in all of them.
            prefix = f"{path.parent.name}."
            number = name.removeprefix(prefix) if self.per_job and name.startswith(prefix) else ""
            with Journal(path, read_only=True) as journal:
                hit = journal.incident(number if number.isdigit() else name)
                if hit is not None and not (self.per_job and name.isdigit()):
                    return IncidentFound(
                        self.label(hit), hit, journal.actions(incident=hit.id), journal.stacks(hit.id)
                    )
        raise IncidentUnknownError(name, self.paths)

    def newest(
        self, *, job: str | None, kind: str | None, node: str | None, since: float, only_open: bool, limit: int
    ) -> list[Incident]:
        """Return the newest incidents of all journals, newest first, as far as they are asked for.

        Raises:
            JobNameError: `job` names no job, or several.
            JournalError: a journal cannot be read.
        """
        from deeplink.scheduler.view.identity import JobName, JobNameError
        from deeplink.scheduler.watch.journal import Journal

        if job is not None and not JobName.parse(job).single:
            raise JobNameError(job, "one job is wanted")
        found: list[Incident] = []
        for path in self.paths:
            with Journal(path, read_only=True) as journal:
                number = _number_of(job, journal)
                if number == 0:
                    continue
                found += journal.incidents(
                    job=number, kind=kind, node=node, since_unix=since, only_open=only_open, limit=limit
                )
        return sorted(found, key=lambda incident: incident.began_unix, reverse=True)[:limit]


def _number_of(job: str | None, journal: Journal) -> int | None:
    """Return the raw id of a job; 0 where the journal does not know it, None where none is asked for."""
    if job is None or job.isdigit():
        return None if job is None else int(job)
    return next((one.job for one in journal.jobs() if one.label == job), 0)


def _was_begun(path: Path) -> bool:
    """Whether a journal holds anything: one without a byte was just made, or its launcher was killed then."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # its job's folder is being removed
        return False


class IncidentName(click.ParamType[str]):
    """A number or id of an incident; the shell offers the newest."""

    name = "incident"

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            readable = JournalSet.found(ctx.params.get("journal_file"))
            newest = readable.newest(
                job=None, kind=None, node=None, since=0.0, only_open=False, limit=MOST_COMPLETED
            )
        except (DeepLinkError, OSError):
            return []  # a shell that completes shows no errors
        labels = {readable.label(each): f"{each.kind} {each.node or ''}".strip() for each in newest}
        return [CompletionItem(label, help=text) for label, text in labels.items() if label.startswith(incomplete)]


class Since(click.ParamType[float]):
    """A moment as Unix time: so long ago (30m, 12h, 7d, 4w), or a day or time (2026-11-22, 2026-11-22T08:30)."""

    name = "since"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from datetime import datetime

        if isinstance(value, float):
            return value
        ago = _AGO.fullmatch(str(value))
        if ago:
            return max(0.0, time.time() - int(ago[1]) * _UNIT_S[ago[2]])
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is neither so long ago (30m, 12h, 7d, 4w) nor a day (2026-11-22)", param, ctx)
