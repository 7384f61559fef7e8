"""What needs a hand, the most urgent first, each with evidence and the command to copy; and all in one line.

Pure. What heals by itself is told, with the command that shows how; what nobody can say is not guessed.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from deeplink.console.collect import SourceState
from deeplink.console.jobs import Mood
from deeplink.console.nodes import STANDING_S, ShownHealth
from deeplink.core.text import counted
from deeplink.scheduler.jobs.picture import in_words
from deeplink.scheduler.liveness.heartbeats import KEEP_S
from deeplink.scheduler.recovery.records import BLAMELESS, IncidentKind, IncidentOutcome
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.console.collect import Readings
    from deeplink.console.jobs import JobView
    from deeplink.console.nodes import NodeView
    from deeplink.console.snapshot import Memo
    from deeplink.scheduler.recovery.records import Incident, JobRecord, NodeRecord
    from deeplink.scheduler.slurm.parse import JobRow

MOST_NAMED = 2  # of a kind in the page's first line
MOST_OF_A_KIND = 20  # in the list
MOST_REASONS = 3
LONGEST_NAMES = 60  # characters of folded names; more than that is counted
HEARD_S = 3 * KEEP_S  # so long after the last report on record, the watchdog hears no sender
LEMON_TIMES, LEMON_S = 3, 7 * 86_400.0  # failures of one node within so long are no chance


class ConcernKind(Enum):
    """Kinds, the most urgent first; `more` is how the first line speaks of those that it does not name."""

    STRANDED = "stranded"
    SOURCE = "source"
    DOWN = "down"
    SILENT = "silent"
    LEAF = "leaf"
    STARVING = "starving"
    HELD = "held"
    RECOVERING = "recovering"
    FINDING = "finding"
    LEMON = "lemon"
    DRAINED = "drained"
    UNKNOWN = "unknown"
    UNHEARD = "unheard"
    INCIDENT = "incident"

    @property
    def more(self) -> str:
        """The thing that is counted."""
        names = {
            ConcernKind.FINDING: "finding",
            ConcernKind.LEAF: "leaf",
            ConcernKind.LEMON: "failing node",
            ConcernKind.INCIDENT: "open incident",
        }
        return names.get(self, f"{self.value} job")

    @property
    def place(self) -> str:
        """Where the page shows all of the kind."""
        places = {
            ConcernKind.FINDING: "fabric?health=findings",
            ConcernKind.LEAF: "fabric?health=down",
            ConcernKind.LEMON: "incidents",
            ConcernKind.INCIDENT: "incidents?state=open",
            ConcernKind.STARVING: "jobs?state=running",
        }
        return places.get(self, f"jobs?state={self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """Something that needs a hand."""

    key: str  # names it as long as it lasts
    kind: ConcernKind
    mood: Mood
    title: str
    evidence: str
    command: str = ""  # to copy; empty where none helps
    help: str = ""  # when, or what for, the command is
    place: str = ""  # where the page shows more of it
    since_unix: float = 0.0  # 0: not known


@dataclass(frozen=True, slots=True)
class Headline:
    """The page in one line."""

    mood: Mood
    text: str


def concerns(
    readings: Readings, nodes: Sequence[NodeView], jobs: Sequence[JobView], memo: Memo
) -> tuple[Concern, ...]:
    """Return what needs a hand: grave things first, then by kind."""
    found = [
        *memo.of("concerns of jobs", (jobs,), lambda jobs: tuple(_of_jobs(jobs))),
        *_of_sources(readings),
        *memo.of("concerns of nodes", (nodes,), lambda nodes: tuple(_of_nodes(nodes))),
        *_lemons(readings),
        *_unheard(readings, memo),
        *_open(readings),
    ]
    urgency = {kind: place for place, kind in enumerate(ConcernKind)}
    return tuple(sorted(found, key=lambda one: (one.mood is not Mood.BAD, urgency[one.kind])))


def listed(found: Iterable[Concern]) -> tuple[Concern, ...]:
    """Return those that a page lists: a bounded number of each kind, and how many more there are."""
    kept: dict[ConcernKind, list[Concern]] = defaultdict(list)
    for one in found:
        kept[one.kind].append(one)
    return tuple(each for some in kept.values() for each in _bounded(some))


def _bounded(some: list[Concern]) -> list[Concern]:
    rest = len(some) - MOST_OF_A_KIND
    if rest <= 0:
        return some
    kind = some[0].kind
    more = Concern(
        key=f"more-{kind.value}",
        kind=kind,
        mood=some[0].mood,
        title=_more(rest, kind),
        evidence="they are not listed one by one",
        place=kind.place,
    )
    return [*some[:MOST_OF_A_KIND], more]


def _more(count: int, kind: ConcernKind) -> str:
    return counted(count, kind.more).replace(" ", " more ", 1)


def headline(found: Sequence[Concern], nodes: int, words: Counter[str], incidents_open: int) -> Headline:
    """Say the most important things first, and how much is running; `words`: the jobs' states."""
    if not found and not nodes and not words:
        return Headline(Mood.UNKNOWN, "Nothing known yet")
    by_kind: dict[ConcernKind, list[Concern]] = defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one)
    says: list[str] = []
    for kind, some in by_kind.items():
        if kind is ConcernKind.INCIDENT:
            says.append(f"{counted(incidents_open, 'incident')} open")
            continue
        if kind is ConcernKind.FINDING and len(some) > 1:
            says.append(counted(len(some), kind.more))
            continue
        says += [one.title for one in some[:MOST_NAMED]]
        if len(some) > MOST_NAMED:
            says.append(_more(len(some) - MOST_NAMED, kind))
    if not says:
        says = [f"all {nodes} nodes well" if nodes else "no nodes known"]
    mood = next((worst for worst in (Mood.BAD, Mood.WARN) if any(one.mood is worst for one in found)), Mood.GOOD)
    text = " · ".join([*dict.fromkeys(says), f"{counted(words['running'], 'job')} running"])
    return Headline(mood, text[0].upper() + text[1:])


def _of_jobs(jobs: Iterable[JobView]) -> Iterator[Concern]:
    for job in jobs:
        said = _of_job(job)
        if said:
            kind, mood, title, evidence, command, help_ = said
            yield Concern(
                key=f"{kind.value}-{job.id}",
                kind=kind,
                mood=mood,
                title=f"job {job.label} {title}",
                evidence=evidence,
                command=command,
                help=help_,
                place=f"jobs/{job.id}",
            )


def _of_job(job: JobView) -> tuple[ConcernKind, Mood, str, str, str, str] | None:
    label = shlex.quote(job.label)  # it is its launcher's word
    match job.word:
        case "stranded":
            evidence = job.detail or "its launcher has no node to go on with, and waits for the watchdog"
            command, why = f"deeplink incidents --job {label}", "what happened, and what was tried"
            return ConcernKind.STRANDED, Mood.BAD, "is stranded", evidence, command, why
        case "recovering":
            evidence = job.detail or "its launcher starts it again; nothing is to be done"
            command = f"deeplink status {label} --watch"
            return ConcernKind.RECOVERING, Mood.WARN, "is recovering", evidence, command, "how it goes on"
        case "running" if job.starved:
            command, why = f"deeplink status {label}", "what binds it, and what would help"
            return ConcernKind.STARVING, Mood.WARN, "waits for its data", job.starved, command, why
        case "held" if job.watched or not job.pending_reason.startswith("JobHeldUser"):
            # A job that its user holds, and that nobody watches, is its user's affair.
            evidence = "; ".join(filter(None, (in_words(job.pending_reason), job.detail, job.user)))
            why = "lets it start" if "administrator" not in job.remedy else "lets it start; an operator's"
            return ConcernKind.HELD, Mood.WARN, "is held", evidence, _command_in(job.remedy), why
    return None


def _of_sources(readings: Readings) -> Iterator[Concern]:
    failing = {each.name: each for each in readings.sources if each.state is SourceState.FAILING}
    # Slurm is one thing that is asked several questions: one line for it is enough.
    slurm = failing.get("nodes") or failing.get("jobs")
    said = []
    if slurm:
        title = "Slurm stopped answering" if slurm.at_unix else "Slurm does not answer"
        said.append((slurm, Mood.BAD if slurm.at_unix else Mood.WARN, title, "scontrol ping"))
    elif "switches" in failing:
        said.append(
            (failing["switches"], Mood.WARN, "Slurm's switch tree cannot be read", "scontrol show topology")
        )
    if "journal" in failing:
        said.append((failing["journal"], Mood.BAD, "the watchdog's journal cannot be read", "deeplink incidents"))
    if "catalog" in failing:
        said.append((failing["catalog"], Mood.WARN, "the catalog cannot be read", "deeplink info"))
    for source, mood, title, command in said:
        yield Concern(
            key=f"source-{source.name}",
            kind=ConcernKind.SOURCE,
            mood=mood,
            title=title,
            evidence=". ".join(part.rstrip(".") for part in (source.problem, source.remedy) if part),
            command=command,
            help="asks it by hand",
            since_unix=source.at_unix,
        )


_UNWELL = {
    ShownHealth.DOWN: (ConcernKind.DOWN, Mood.BAD, "down"),
    ShownHealth.SILENT: (ConcernKind.SILENT, Mood.BAD, "not answering"),
    ShownHealth.DRAINING: (ConcernKind.DRAINED, Mood.WARN, "draining"),
    ShownHealth.DRAINED: (ConcernKind.DRAINED, Mood.WARN, "drained"),
    ShownHealth.UNKNOWN: (ConcernKind.UNKNOWN, Mood.WARN, "in an unknown state"),
}


def _of_nodes(nodes: Sequence[NodeView]) -> Iterator[Concern]:
    by_health: dict[ShownHealth, list[NodeView]] = defaultdict(list)
    by_leaf: dict[str, list[NodeView]] = defaultdict(list)
    for node in nodes:
        by_health[node.health].append(node)
        by_leaf[node.switch].append(node)
    for health, (kind, mood, word) in _UNWELL.items():
        some = by_health[health]
        if not some:
            continue
        mended = health in {ShownHealth.DOWN, ShownHealth.DRAINED, ShownHealth.DRAINING}
        names = fold([node.name for node in some])
        yield Concern(
            key=f"nodes-{health.value}",
            kind=kind,
            mood=mood,
            title=f"{counted(len(some), 'node')} {word}",
            evidence=_reasons(some),
            command=f"scontrol update nodename={names} state=resume" if mended else f"scontrol show node {names}",
            help="takes them back, once they are mended" if mended else "what Slurm knows of them",
            place=f"fabric?health={health.value}",
        )
    for leaf, some in by_leaf.items():
        if len(some) > 1 and len(by_leaf) > 1 and all(node.health in _LOST for node in some):
            yield Concern(
                key=f"leaf-{leaf}",
                kind=ConcernKind.LEAF,
                mood=Mood.BAD,
                title=f"every node of {leaf} is lost",
                evidence=f"all {len(some)} nodes below it are down or do not answer: is it the switch?",
                command=f"deeplink incidents --node {some[0].name}",
                help="what the watchdog made of it",
                place=f"fabric?{urlencode({'leaf': leaf})}",
            )
    for node in nodes:
        if node.unfit:
            yield Concern(
                key=f"finding-{node.name}",
                kind=ConcernKind.FINDING,
                mood=Mood.WARN,
                title=f"{node.name}: {node.findings[0]}",
                evidence="; ".join(node.findings[1:]) or "found by the node's own checks",
                command=_command_in(node.remedy) or f"ssh {node.name} deeplink health",
                help="once it is mended" if "once" in node.remedy else "looks again",
                place=f"fabric?{urlencode({'leaf': node.switch, 'node': node.name})}",
                since_unix=node.found_unix,
            )


_LOST = {ShownHealth.DOWN, ShownHealth.SILENT}


def _command_in(remedy: str) -> str:
    command = remedy.partition("`")[2].partition("`")[0]
    return command if command.startswith("scontrol") else ""


def _reasons(nodes: Sequence[NodeView]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        by_reason[node.reason or node.state or "no reason known"].append(node.name)
    told = sorted(by_reason.items(), key=lambda one: -len(one[1]))
    said = [f"{_named(names)}: {reason}" for reason, names in told[:MOST_REASONS]]
    if len(told) > MOST_REASONS:
        said.append(f"{len(told) - MOST_REASONS} more reasons")
    return "; ".join(said)


def _named(names: list[str]) -> str:
    folded = fold(names)
    return folded if len(folded) <= LONGEST_NAMES else counted(len(names), "node")


def _lemons(readings: Readings) -> Iterator[Concern]:
    """Name the nodes that failed again and again of late."""
    failed: dict[str, list[Incident]] = defaultdict(list)
    for each in readings.journal.incidents:
        if each.node and each.kind not in _NO_FAILURE and readings.unix - each.began_unix <= LEMON_S:
            failed[each.node].append(each)
    for node, some in failed.items():
        if len(some) >= LEMON_TIMES:
            kinds = ", ".join(dict.fromkeys(each.kind for each in some))
            yield Concern(
                key=f"lemon-{node}",
                kind=ConcernKind.LEMON,
                mood=Mood.WARN,
                title=f"{node} fails again and again",
                evidence=f"{len(some)} times in {LEMON_S / 86_400:.0f} days: {kinds}",
                command=f"scontrol update nodename={shlex.quote(node)} state=drain reason='fails again and again'",
                help="keeps jobs off it until it is mended",
                place=f"incidents?{urlencode({'node': node})}",
                since_unix=max(each.began_unix for each in some),
            )


_NO_FAILURE = BLAMELESS | {IncidentKind.NODE_BACK, IncidentKind.REQUEUE_HELD}


def _unheard(readings: Readings, memo: Memo) -> Iterator[Concern]:
    """Say that the watchdog hears no caller, though one should call: a standing agent of late, a job on record."""
    journal = readings.journal
    parts = (journal.nodes, journal.jobs, readings.slurm.jobs)
    attended, heard, runs = memo.of("callers", parts, _callers)
    is_read = any(each.name == "journal" and each.state is SourceState.OK for each in readings.sources)
    if not is_read or not (runs or readings.unix - attended <= STANDING_S):
        return
    if readings.unix - heard <= HEARD_S:
        return
    since = f" for {counted(round((readings.unix - heard) / 60), 'minute')}" if heard else ""
    yield Concern(
        key="unheard",
        kind=ConcernKind.UNHEARD,
        mood=Mood.WARN,
        title=f"the watchdog has heard no agent and no launcher{since}",
        evidence="name, firewall, token or MUNGE between the nodes and the watchdog; or it does not run",
        command="deeplink doctor",
        help="asks it from each node as an agent would",
        since_unix=heard,
    )


def _callers(
    nodes: Iterable[NodeRecord], records: Iterable[JobRecord], slurm_jobs: Iterable[JobRow]
) -> tuple[float, float, bool]:
    """Return when a standing agent was last heard, when any caller was, and whether a job on record runs."""
    running = {int(row.id) for row in slurm_jobs if row.state is JobState.RUNNING}
    heard = [*(node.seen_unix for node in nodes), *(job.newest.beat_unix for job in records)]
    runs = any(job.job in running and not job.newest.phase.ended for job in records)
    return max((node.attended_unix for node in nodes), default=0.0), max(heard, default=0.0), runs


def _open(readings: Readings) -> Iterator[Concern]:
    for each in readings.journal.incidents:
        if each.outcome is IncidentOutcome.OPEN:
            about = " · ".join(filter(None, (each.node, f"job {each.job}" if each.job else "")))
            yield Concern(
                key=f"incident-{each.id}",
                kind=ConcernKind.INCIDENT,
                mood=Mood.WARN,
                title=f"incident {each.number}: {each.kind}{f' · {about}' if about else ''}",
                evidence=each.evidence or "no evidence recorded",
                command=f"deeplink incident {each.number}",
                help="its course so far",
                place=f"incidents/{each.number}",
                since_unix=each.began_unix,
            )
