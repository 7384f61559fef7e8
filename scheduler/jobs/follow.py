"""Following what a job writes, over attempts and requeues, until it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, printable
from deeplink.core.types import Attempt, AttemptFormatError
from deeplink.scheduler.jobs.job_folder import (
    EVENTS,
    NOTES,
    Tail,
    expanded,
    folders,
    of_rank,
    ranks_of,
    read_events,
)
from deeplink.scheduler.jobs.job_names import JobName, JobNameError, unknown_job
from deeplink.scheduler.jobs.picture import in_words
from deeplink.scheduler.slurm.nodeset import NodeSetError, fold
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.jobs.job_view import Queued, Viewer

TICK_S = 0.2
ASK_S = 2.0
QUIET_TICKS = 10
"""After the job's end, so many looks without anything new end the following: storage may be behind."""


def _not_there(node: str, nodes: Iterable[str]) -> JobNameError:
    ran = ", ".join(nodes) or "no node that is known"
    return JobNameError(f"{node} runs no ranks of the job", remedy=f"They are on {ran}.")


def _no_output(path: Path | None, problem: str, remedy: str) -> DeepLinkError:
    return DeepLinkError(f"{path}: {problem}" if path else problem, remedy=remedy)


@dataclass(slots=True, kw_only=True)
class OutputFollower:
    """Finds what a job writes, and follows it."""

    viewer: Viewer
    word: str
    clock: Clock
    say: Callable[[str], None]
    _said: str = ""
    _asked: float = field(default=float("-inf"))
    _over: bool = False

    def queued(self) -> Queued | None:
        """Return the job as Slurm tells it; None where it has forgotten it, or does not answer."""
        return self.viewer.find(self.word)

    def _job(self) -> int:
        found = self.queued()
        return int(found.job.id) if found else JobName.parse(self.word).job

    def folder(self) -> Path | None:
        """Return the job's folder; None where it has none."""
        return folders(self.viewer.state).get(self._job())

    def output(self, *, wait: bool) -> Path:
        """Return the job's output file."""
        while True:
            found = self.queued()
            path = self._path(found)
            if path.exists():
                _check(path)
                return path
            state = found.job.state.value if found else "gone"
            why = f" ({in_words(found.job.reason)})" if found and found.job.reason else ""
            if not wait or found is None or found.job.state.final:
                begun = found is None or found.job.state is not JobState.PENDING
                raise _no_output(
                    path,
                    f"there is no such file; the job is {state}{why}",
                    "Is it on a disk of the job's own node?" if begun else "It has not begun; -f waits for it.",
                )
            self._say_once(f"job {self.word} is {state}{why}; waiting for {path}")
            self.clock.sleep(ASK_S)

    def _path(self, found: Queued | None) -> Path:
        if found is not None:
            name = expanded(found.output, found.job)
            if not name:
                raise _no_output(None, f"job {self.word} has no output file", "Is it an srun or salloc?")
            return Path(name)
        folder = self.folder()
        noted = [event for event in read_events(folder) if event.get("output")] if folder else []
        if noted:
            return Path(str(noted[-1]["output"]))
        if folder is None:
            raise unknown_job(self.word, self.viewer.state, asked=not self.viewer.silent)
        raise _no_output(
            None,
            f"where job {self.word} wrote its output is not known: Slurm has forgotten it, or does not answer",
            "`sacct -j` may tell its WorkDir; sbatch's default is slurm-JOB.out there.",
        )

    def events(self, *, wait: bool) -> list[Tail]:
        """Return what holds the job's events, its user's notes among them, as lines."""
        folder = self.folder()
        tails = [Tail(folder / name, lambda _line: True) for name in (EVENTS, NOTES)] if folder else []
        if not tails or not (wait or any(tail.path.exists() for tail in tails)):
            raise _no_output(
                None, f"job {self.word} left no events", "Jobs do that start their ranks with `deeplink run`."
            )
        return tails

    def attempt(self, text: str) -> str:
        """Return the whole name of an attempt."""
        job = self._job()
        try:
            return str(Attempt.parse(text if text.count(".") > 1 else f"{job}.{text}"))
        except AttemptFormatError:
            raise AttemptFormatError(text) from None

    def keep(self, rank: int | None, node: str | None) -> Callable[[bytes], bool] | None:
        """Return what tells the lines that are wanted; None where all are."""
        if node is not None:
            first, last = self._ranks(node)
            if rank is not None and not first <= rank <= last:
                raise _not_there(f"{node} (rank {rank})", [])
            first, last = (first, last) if rank is None else (rank, rank)
            return of_rank(first, last)
        return None if rank is None else of_rank(rank, rank)

    def _ranks(self, node: str) -> tuple[int, int]:
        folder = self.folder()
        started = [one for one in read_events(folder) if one["event"] == "attempt-started"] if folder else []
        nodes = [str(name) for name in started[-1].get("nodes") or ()] if started else []
        if node not in nodes:
            raise _not_there(node, nodes)
        ranks = ranks_of(started[-1]).get(node)
        each, odd = divmod(int(started[-1].get("world_size") or 0), len(nodes))
        if ranks is None and each and not odd:  # a launcher of before spread them evenly
            ranks = range(nodes.index(node) * each, (nodes.index(node) + 1) * each)
        if ranks is None:
            raise _not_there(f"{node} (its launcher does not tell the ranks there)", nodes)
        return ranks[0], ranks[-1]

    def follow(self, tails: Sequence[Tail], write: Callable[[Iterable[bytes]], None]) -> None:
        """Write what is appended, until the job has ended and nothing comes any more."""
        quiet = 0
        while quiet < QUIET_TICKS:
            pieces = [piece for tail in tails for piece in tail.more()]
            for tail in tails:
                if tail.begun_anew:
                    self.say(f"{tail.path} was begun again")
            if pieces:
                write(pieces)
                quiet = 0
                continue
            quiet = quiet + 1 if self._ended() else 0
            self.clock.sleep(TICK_S)
        write([half for tail in tails for half in tail.rest()])

    def _ended(self) -> bool:
        now = self.clock.monotonic()
        if not self._over and now - self._asked >= ASK_S:
            found = self.queued()
            self._asked = self.clock.monotonic()
            self._over = found.job.state.final if found else not self.viewer.silent
            if self.viewer.silent:
                self._say_once("Slurm does not answer; following on")
        return self._over

    def _say_once(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self.say(sentence)


def _check(path: Path) -> None:
    if not path.is_file():
        raise _no_output(path, "it is no file that could be read again", "Give sbatch --output=FILE.")
    try:
        path.open("rb").close()
    except OSError as problem:
        raise _no_output(
            path, problem.strerror or str(problem), "Is it another user's? Ask for their file."
        ) from problem


def event_in_words(event: Mapping[str, Any]) -> str:
    """Return what an event says; one that this version does not know, as it is."""
    name = str(event.get("event", ""))
    said = _WORDS.get(name)
    if said is not None:
        return printable(said(event))
    facts = ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in {"event", "unix", "monotonic"}
    )
    return printable(f"{name}: {facts}" if facts else name)


def _nodes(event: Mapping[str, Any], name: str = "nodes") -> str:
    listed = event.get(name)
    if not isinstance(listed, list) or not listed:
        return "no node"
    try:
        return fold(map(str, listed))
    except NodeSetError:
        return ", ".join(map(str, listed))


def _because(event: Mapping[str, Any]) -> str:
    return f": {event['because']}" if event.get("because") else ""


def _number(event: Mapping[str, Any], name: str) -> float:
    try:
        return float(event.get(name) or 0)
    except (TypeError, ValueError):
        return 0.0


def _late(event: Mapping[str, Any]) -> str:
    ranks = event.get("ranks")
    named = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "?"
    return f"nothing new of ranks {named} for {_number(event, 'silent_s'):.0f} s: {event.get('answer')}"


def _attempt_started(event: Mapping[str, Any]) -> str:
    spares = f", {_nodes(event, 'spares')} rests" if event.get("spares") else ""
    ranks = counted(int(event.get("world_size") or 0), "rank")
    crossings = f"{event.get('ring_crossings', 'unknown')} ring crossings"
    return f"attempt {event.get('attempt')} started: {ranks} on {_nodes(event)}{spares}, {crossings}"


def _first_step(event: Mapping[str, Any]) -> str:
    again = f" ({event['steps_repeated']} steps done again)" if event.get("steps_repeated") else ""
    return f"attempt {event.get('attempt')} reports step {event.get('step')}{again}"


def _ended(event: Mapping[str, Any]) -> str:
    return f"ended with exit code {event.get('code')}{_because(event)}"


def _network(event: Mapping[str, Any]) -> str:
    interfaces = event.get("interfaces")
    listed = ", ".join(map(str, interfaces)) if isinstance(interfaces, list) else ""
    return f"ranks speak over {event.get('network')}" + (f" ({listed})" if listed else "")


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "job-started": lambda event: f"`deeplink run` started on {_nodes(event)} (restart {event.get('restart', 0)})",
    "network": _network,
    "agents-ready": lambda event: f"{counted(len(event.get('agents') or ()), 'agent')} ready",
    "attempt-started": _attempt_started,
    "first-step": _first_step,
    "node-silent": lambda event: f"{_nodes(event)} silent for {_number(event, 'silent_s'):.1f} s",
    "relaunch": lambda event: f"ranks start again{_because(event)}",
    "stranded": lambda event: f"stranded, waits for a rescue{_because(event)}",
    "drained": lambda event: f"{_nodes(event)} is out of service, as Slurm reports{_because(event)}",
    "taken": lambda event: f"{_nodes(event)} was taken from the job by Slurm{_because(event)}",
    "nodes-unknown": lambda _event: "Slurm did not say how the nodes stand",
    "spare-lost": lambda event: f"spare {_nodes(event)} lost",
    "agents-again": lambda event: f"agents start once more on {_nodes(event)}",
    "back": lambda event: f"{_nodes(event)} answers again",
    "launcher-restarted": lambda _: "the launcher was ended and started again",
    "parent-lost": lambda _: "`deeplink run` itself was killed; Slurm does not start the job again",
    "requeue": lambda _: "Slurm was asked to start the job again",
    "held": lambda _: "Slurm was asked to hold the job",
    "waiting": lambda event: f"waits{_because(event)}",
    "elsewhere": lambda event: f"runs elsewhere by now{_because(event)}",
    "late": _late,
    "stacks": lambda event: f"ranks were asked where they are: {event.get('file')}",
    "straggler": lambda event: (
        f"rank {event.get('rank')} is {_number(event, 'factor'):.1f} times as slow as others"
    ),
    "straggler-over": lambda event: f"rank {event.get('rank')} is as fast as the others again",
    "save-wanted": lambda event: (
        f"a save is wanted at step {event.get('step')}, {_number(event, 'left_s'):.0f} s before the time limit"
    ),
    "storage-frozen": lambda event: f"the job's folder could not be written for {_number(event, 'stuck_s'):.0f} s",
    "storage-back": lambda _: "the job's folder can be written again",
    "signal": lambda event: f"{event.get('signal')} passed on to the ranks",
    "ended": _ended,
    "resubmitted": lambda event: f"submitted again as job {event.get('as')} by {event.get('by')}",
    "resubmission": lambda event: f"submitted in place of job {event.get('of')}",
    "cancelled": lambda event: f"cancelled by {event.get('by')}",
    "requeued": lambda event: (
        f"requeued by {event.get('by')}"
        + (f", not to run on {_nodes(event, 'exclude')}" if event.get("exclude") else "")
    ),
}
