"""Following what a job writes, over attempts and requeues, until it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.view.folder import EVENTS, folders, ranks_of, read_events
from deeplink.scheduler.view.identity import JobName
from deeplink.scheduler.view.look import JobUnknownError
from deeplink.scheduler.view.notes import NOTES
from deeplink.scheduler.view.output import OutputMissingError, Tail, expanded, of_rank
from deeplink.scheduler.view.reasons import in_words
from deeplink.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.view.look import Viewer
    from deeplink.scheduler.view.queue import Queued

TICK_S = 0.2
ASK_S = 2.0
QUIET_TICKS = 10
"""After the job's end, so many looks without anything new end the following: storage may be behind."""


class NoSuchNodeError(DeepLinkError):
    """A node runs no ranks of the job."""

    exit_code = 2

    def __init__(self, node: str, nodes: Iterable[str]) -> None:
        self.node, self.nodes = node, tuple(nodes)
        ran = ", ".join(self.nodes) or "no node that is known"
        super().__init__(f"{node} runs no ranks of the job", remedy=f"They are on {ran}.")


@dataclass(slots=True, kw_only=True)
class OutputFollower:
    """Finds what a job writes, and follows it.

    Args:
        word: the job as it was named.
        say: told what keeps it waiting, one sentence.
    """

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

    def folder(self) -> Path | None:
        """Return the job's folder; None where it has none."""
        found = self.queued()
        job = int(found.job.id) if found else JobName.parse(self.word).job
        return folders(self.viewer.state).get(job)

    def output(self, *, wait: bool) -> Path:
        """Return the job's output file.

        Args:
            wait: until there is one.

        Raises:
            JobUnknownError: nobody knows the job.
            OutputMissingError: it cannot be read here.
        """
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
                raise OutputMissingError(
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
                raise OutputMissingError(None, f"job {self.word} has no output file", "Is it an srun or salloc?")
            return Path(name)
        folder = self.folder()
        noted = [event for event in read_events(folder) if event.get("output")] if folder else []
        if noted:
            return Path(str(noted[-1]["output"]))
        if folder is None:
            raise JobUnknownError(self.word, self.viewer.state, asked=not self.viewer.silent)
        raise OutputMissingError(
            None,
            f"where job {self.word} wrote its output is not known: Slurm has forgotten it, or does not answer",
            "`sacct -j` may tell its WorkDir; sbatch's default is slurm-JOB.out there.",
        )

    def events(self, *, wait: bool) -> list[Tail]:
        """Return what holds the job's events, its user's notes among them, as lines.

        Args:
            wait: also where there are none yet.

        Raises:
            OutputMissingError: it has none.
        """
        folder = self.folder()
        tails = [Tail(folder / name, lambda _line: True) for name in (EVENTS, NOTES)] if folder else []
        if not tails or not (wait or any(tail.path.exists() for tail in tails)):
            raise OutputMissingError(
                None, f"job {self.word} left no events", "Jobs do that start their ranks with `deeplink run`."
            )
        return tails

    def attempt(self, text: str) -> str:
        """Return the whole name of an attempt.

        Raises:
            AttemptFormatError: the text names none.
        """
        found = self.queued()
        job = int(found.job.id) if found else JobName.parse(self.word).job
        try:
            return str(Attempt.parse(text if text.count(".") > 1 else f"{job}.{text}"))
        except AttemptFormatError:
            raise AttemptFormatError(text) from None

    def keep(self, rank: int | None, node: str | None) -> Callable[[bytes], bool] | None:
        """Return what tells the lines that are wanted; None where all are.

        Raises:
            NoSuchNodeError: no ranks run on the node.
        """
        if node is not None:
            first, last = self._ranks(node)
            if rank is not None and not first <= rank <= last:
                raise NoSuchNodeError(f"{node} (rank {rank})", [])
            first, last = (first, last) if rank is None else (rank, rank)
            return of_rank(first, last)
        return None if rank is None else of_rank(rank, rank)

    def _ranks(self, node: str) -> tuple[int, int]:
        folder = self.folder()
        started = [one for one in read_events(folder) if one["event"] == "attempt-started"] if folder else []
        nodes = [str(name) for name in started[-1].get("nodes") or ()] if started else []
        if node not in nodes:
            raise NoSuchNodeError(node, nodes)
        ranks = ranks_of(started[-1]).get(node)
        each, odd = divmod(int(started[-1].get("world_size") or 0), len(nodes))
        if ranks is None and each and not odd:  # a launcher of before spread them evenly
            ranks = range(nodes.index(node) * each, (nodes.index(node) + 1) * each)
        if ranks is None:
            raise NoSuchNodeError(f"{node} (its launcher does not tell the ranks there)", nodes)
        return ranks[0], ranks[-1]

    def follow(self, tails: Sequence[Tail], write: Callable[[Iterable[bytes]], None]) -> None:
        """Write what is appended, until the job has ended and nothing comes any more."""
        quiet = 0
        while quiet < QUIET_TICKS:
            pieces = [piece for tail in tails for piece in tail.more()]
            for tail in tails:
                if tail.begun_anew:
                    self.say(f"{tail.path} was begun anew")
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
        raise OutputMissingError(path, "it is no file that could be read again", "Give sbatch --output=FILE.")
    try:
        path.open("rb").close()
    except OSError as problem:
        raise OutputMissingError(
            path, problem.strerror or str(problem), "Is it another user's? Ask for their file."
        ) from problem
