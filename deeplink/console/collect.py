"""The sources: Slurm, the journal and the catalog, each asked at its own interval and each with its own age."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from deeplink.cache.catalog import Catalog
from deeplink.cache.replicate.residency import UnknownHoldingError, held
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.metrics import CONSOLE_QUERIES, CONSOLE_QUERY_SECONDS, CONSOLE_READ, CONSOLE_UP
from deeplink.scheduler.journal.journal import Journal, JournalMissingError
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.client import Slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.types import Version
    from deeplink.scheduler.recovery.records import Incident, JobRecord, NodeRecord, ProgressPoint
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow, SwitchRow

log = logging.getLogger(__name__)

QUERY_S = 5.0  # Slurm's own clients wait 9 s for a dead controller; the page wants to know sooner
SLOW_PERIOD_S = 60.0  # the switch tree and the cluster's name change with slurm.conf only
MOST_INCIDENTS = 200
MOST_FRESH = 200  # jobs heard of last: read whenever somebody wrote, as are all that were heard within `HEARD_S`
HEARD_S = 2 * SLOW_PERIOD_S  # whoever was heard before the others were last read is silent, or has ended
MOST_WATCHED = 10_000
MOST_READ = 200  # jobs whose reports are read at once; those that have waited the longest
CATALOG_PERIOD_S = 60.0
MOST_DATASETS = 500
MOST_VERSIONS = 10  # of each, the newest
REPORTS_S = 900.0  # of a job's reports those of its last quarter of an hour tell its loss and its pace


class SourceState(Enum):
    """State of a source of facts."""

    OK = "ok"
    FAILING = "failing"  # the last question was not answered; older facts may still be shown, with their age
    WAITING = "waiting"  # not answered yet
    OFF = "off"  # it is not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """A source of facts."""

    name: str
    title: str  # on the page; sources with one title are shown as one
    state: SourceState
    period_s: float  # how often it is asked
    at_unix: float = 0.0  # when it last answered; 0: never
    problem: str = ""
    remedy: str = ""

    def answered(self, unix: float) -> FactSource:
        """Return it after a good answer."""
        return replace(self, state=SourceState.OK, at_unix=unix, problem="", remedy="")

    def failed(self, problem: DeepLinkError) -> FactSource:
        """Return it after a question that was not answered."""
        said = str(problem).strip().splitlines()
        # Slurm's commands end with what was fatal; the lines before are its way there.
        return replace(self, state=SourceState.FAILING, problem=said[-1] if said else "", remedy=problem.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetView:
    """One version of a dataset. None and the empty text mean that it is not known."""

    key: str  # name@version
    name: str
    version: str
    newest: bool
    files: int | None
    bytes: int | None  # of samples
    shards: int | None
    packed_unix: float
    source: str
    home: str  # where a copy of all shards is kept besides
    total: int | None  # bytes of its shards
    nodes: (
        tuple[tuple[str, int], ...] | None
    )  # verified bytes on each, as last noted; None: nobody has looked lately
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """Slurm's last answers, each kind from its own last good one."""

    cluster: str = ""
    nodes: tuple[NodeRow, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    switches: tuple[SwitchRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """Contents of the journal: jobs, the newest incidents, and the last reports of jobs that go on."""

    jobs: tuple[JobRecord, ...] = ()
    reports: Mapping[int, tuple[ProgressPoint, ...]] = field(default_factory=dict)
    nodes: tuple[NodeRecord, ...] = ()
    incidents: tuple[Incident, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything a snapshot is made from."""

    unix: float
    interval_s: float
    sources: tuple[FactSource, ...]
    slurm: SlurmFacts = SlurmFacts()
    journal: JournalFacts = field(default_factory=JournalFacts)
    datasets: tuple[DatasetView, ...] = ()
    demo: bool = False  # it was recorded

    def source(self, name: str) -> FactSource:
        """Return one source."""
        return {source.name: source for source in self.sources}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """Sources to read, and how often."""

    journal: Path
    interval_s: float = 2.0
    slurm: bool = True
    catalog: Path | None = None  # of the datasets; None: it is not read
    demo: bool = False  # what is read was recorded, and is said to be on the page


class SlurmReader:
    """Asks Slurm, kind by kind. `refresh` may take as long as Slurm does; `facts` never waits for it."""

    def __init__(self, settings: ConsoleSettings, clock: Clock, slurm: Slurm) -> None:
        self._clock, self._slurm = clock, slurm
        self._lock = threading.Lock()
        self._facts = SlurmFacts()
        state = SourceState.WAITING if settings.slurm else SourceState.OFF
        fast, slow = settings.interval_s, max(settings.interval_s, SLOW_PERIOD_S)
        self._sources = {
            "nodes": FactSource(name="nodes", title="Slurm", state=state, period_s=fast),
            "jobs": FactSource(name="jobs", title="Slurm", state=state, period_s=fast),
            "switches": FactSource(name="switches", title="switch tree", state=state, period_s=slow),
        }
        self._next_slow = clock.monotonic()

    def facts(self) -> tuple[SlurmFacts, tuple[FactSource, ...]]:
        """Return what is known, and how old it is."""
        with self._lock:
            return self._facts, tuple(self._sources.values())

    def refresh(self) -> None:
        """Ask Slurm once for each kind that is due; where it does not answer, leave it alone until next time."""
        if not self._ask("nodes", lambda: {"nodes": tuple(self._slurm.nodes())}):
            self._same_for("jobs")
            if not self._sources["switches"].at_unix:
                self._same_for("switches")  # else what is known of it is as old as it was to be
            return
        self._ask("jobs", lambda: {"jobs": tuple(self._slurm.jobs())})
        due = self._clock.monotonic() >= self._next_slow or self._sources["switches"].state is not SourceState.OK
        if due and self._ask("switches", self._slow):
            self._next_slow = self._clock.monotonic() + self._sources["switches"].period_s

    def _slow(self) -> dict[str, object]:
        return {"switches": tuple(self._slurm.topology()), "cluster": self._slurm.cluster_name()}

    def _ask(self, kind: str, question: Callable[[], dict[str, object]]) -> bool:
        began = self._clock.monotonic()
        try:
            answer = question()
        except DeepLinkError as problem:
            source, answer = self._sources[kind].failed(problem), {}
        else:
            source = self._sources[kind].answered(self._clock.unix())
        with self._lock:
            self._facts = replace(self._facts, **answer)  # type: ignore[arg-type]
            self._sources[kind] = source
        count(source, self._clock.monotonic() - began)
        return source.state is SourceState.OK

    def _same_for(self, kind: str) -> None:
        first, other = self._sources["nodes"], self._sources[kind]
        with self._lock:
            self._sources[kind] = replace(other, state=first.state, problem=first.problem, remedy=first.remedy)


class JournalReader:
    """The watchdog's journal, opened to read only; read again only when somebody wrote."""

    def __init__(self, settings: ConsoleSettings, clock: Clock) -> None:
        self._path, self._clock = settings.journal, clock
        self._journal: Journal | None = None
        self._file = 0
        self._revision = -1
        self._facts = JournalFacts()
        self._reports: dict[int, tuple[object, tuple[ProgressPoint, ...]]] = {}
        self._older: tuple[JobRecord, ...] = ()
        self._next_older = 0.0
        self._source = FactSource(
            name="journal", title="journal", state=SourceState.WAITING, period_s=settings.interval_s
        )

    def refresh(self) -> tuple[JournalFacts, FactSource]:
        """Return what the journal holds now; what it last held, with its age, where it cannot be read."""
        began = self._clock.monotonic()
        try:
            self._facts = self._read()
        except DeepLinkError as problem:
            self.close()
            self._source = self._source.failed(problem)
            if isinstance(problem, JournalMissingError) and not self._source.at_unix:  # nothing was ever watched
                self._source = replace(self._source, state=SourceState.WAITING)
        else:
            self._source = self._source.answered(self._clock.unix())
        count(self._source, self._clock.monotonic() - began)
        return self._facts, self._source

    def close(self) -> None:
        """Close the file; `refresh` opens it again."""
        if self._journal is not None:
            self._journal.close()
        self._journal, self._revision = None, -1
        self._reports, self._older, self._next_older = {}, (), 0.0  # another journal may be there by then

    def _read(self) -> JournalFacts:
        journal = self._opened()
        revision = journal.revision()
        if revision == self._revision:
            return self._facts
        fresh = journal.jobs(limit=MOST_FRESH, since_unix=self._clock.unix() - HEARD_S)
        if len(fresh) < MOST_FRESH:  # that is all of them
            self._older, self._next_older = (), 0.0
        elif self._clock.monotonic() >= self._next_older:
            self._older = journal.jobs(limit=MOST_WATCHED)
            self._next_older = self._clock.monotonic() + SLOW_PERIOD_S
        have = {record.job for record in fresh}
        facts = JournalFacts(
            jobs=(*fresh, *(record for record in self._older if record.job not in have)),
            reports=self._of(journal, fresh),
            nodes=journal.nodes(),
            incidents=journal.incidents(limit=MOST_INCIDENTS),
        )
        self._revision = revision
        return facts

    def _opened(self) -> Journal:
        try:
            file = self._path.stat().st_ino
        except OSError:
            file = 0
        if self._journal is not None and file != self._file:
            self.close()  # moved aside, or made again
        if self._journal is None:
            self._journal, self._file = Journal(self._path, read_only=True), file
        return self._journal

    def _of(self, journal: Journal, fresh: Sequence[JobRecord]) -> dict[int, tuple[ProgressPoint, ...]]:
        prints = {
            record.job: tuple((each.attempt, each.last_step, each.last_step_unix) for each in record.attempts)
            for record in fresh
        }
        # In the order in which they were read: of more than can be read at once, each has its turn.
        self._reports = {job: known for job, known in self._reports.items() if job in prints}
        waiting = [job for job in prints if job not in self._reports]
        waiting += [job for job, known in self._reports.items() if known[0] != prints[job]]
        for job in waiting[:MOST_READ]:
            last = max((unix for _, _, unix in prints[job]), default=0.0)
            points = journal.points(job, after_unix=last - REPORTS_S) if last else ()
            self._reports.pop(job, None)
            self._reports[job] = (prints[job], points)
        return {job: points for job, (_, points) in self._reports.items()}


class DatasetReader:
    """Reads the catalog, which may hang with its file system: `refresh` waits for it, `facts` never."""

    def __init__(self, catalog: Path | None, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._lock = threading.Lock()
        self._facts: tuple[DatasetView, ...] = ()
        state = SourceState.OFF if catalog is None else SourceState.WAITING
        self._source = FactSource(name="catalog", title="catalog", state=state, period_s=CATALOG_PERIOD_S)

    def facts(self) -> tuple[tuple[DatasetView, ...], FactSource]:
        """Return what is known, and how old it is."""
        with self._lock:
            return self._facts, self._source

    def refresh(self) -> None:
        """Read the catalog once."""
        if self._catalog is None:
            return
        try:
            found = tuple(
                replace(each, order=order) for order, each in enumerate(self._read(Catalog(self._catalog)))
            )
        except (DeepLinkError, OSError) as problem:
            said = problem if isinstance(problem, DeepLinkError) else DeepLinkError(f"the catalog: {problem}")
            with self._lock:
                self._source = self._source.failed(said)
            return
        with self._lock:
            self._facts, self._source = found, self._source.answered(self._clock.unix())

    def _read(self, catalog: Catalog) -> Iterator[DatasetView]:
        for name in catalog.names()[:MOST_DATASETS]:
            try:
                newest = catalog.latest(name)
            except DeepLinkError:
                newest = None
            for version in reversed(catalog.versions(name)[-MOST_VERSIONS:]):
                try:
                    yield self._view(catalog, name, version, newest=version == newest)
                except (DeepLinkError, OSError):
                    raise
                except Exception as problem:  # noqa: BLE001 - of one record: the others are shown
                    log.warning(
                        "dataset %s@%s is not shown: its record cannot be read (%r)", name, version, problem
                    )

    def _view(self, catalog: Catalog, name: str, version: Version, *, newest: bool) -> DatasetView:
        record, key = catalog.record(name, version), f"{name}@{version}"
        try:
            where = held(catalog.root, key, unix=self._clock.unix())
        except UnknownHoldingError:
            where = None
        return DatasetView(
            key=key,
            name=name,
            version=version,
            newest=newest,
            files=_number(record.files) if record else None,
            bytes=_number(record.bytes) if record else None,
            shards=_number(record.shards) if record else None,
            packed_unix=(_number(record.packed_unix) if record else None) or 0.0,
            source=_text(record.source) if record else "",
            home=_text(record.home) if record else "",
            total=where.total if where else None,
            nodes=tuple(sorted((_text(node), size) for node, size in where.bytes.items())) if where else None,
        )


# A record is JSON that anybody who may write to the catalog may have changed.


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: object) -> str:
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def count(source: FactSource, seconds: float) -> None:
    """Note in the metrics how a question went."""
    good = source.state is SourceState.OK
    CONSOLE_UP.labels(source.name).set(good)
    CONSOLE_READ.labels(source.name).set(source.at_unix)
    CONSOLE_QUERIES.labels(source.name, "good" if good else "bad").inc()
    CONSOLE_QUERY_SECONDS.labels(source.name).observe(seconds)


class Collector:
    """All sources of one console. `readings`, `refresh_slurm` and `refresh_datasets`: one thread for each."""

    def __init__(
        self, settings: ConsoleSettings, *, clock: Clock | None = None, slurm: Slurm | None = None
    ) -> None:
        self.settings = settings
        self._clock = clock or SystemClock()
        self._slurm = SlurmReader(settings, self._clock, slurm or Slurm(command.within(QUERY_S)))
        self._journal = JournalReader(settings, self._clock)
        self._datasets = DatasetReader(settings.catalog, self._clock)
        self.refresh_datasets = self._datasets.refresh

    def refresh_slurm(self) -> None:
        """Ask Slurm, unless the settings forbid it."""
        if self.settings.slurm:
            self._slurm.refresh()

    def readings(self) -> Readings:
        """Return what is known now: the journal as it is, Slurm as it last answered."""
        journal, journal_source = self._journal.refresh()
        slurm, sources = self._slurm.facts()
        datasets, catalog = self._datasets.facts()
        return Readings(
            unix=self._clock.unix(),
            interval_s=self.settings.interval_s,
            sources=(*sources, journal_source, catalog),
            slurm=slurm,
            journal=journal,
            datasets=datasets,
            demo=self.settings.demo,
        )

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
