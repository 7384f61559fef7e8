"""One question of a kind to slurmctld per interval, however many processes of a user ask it on this host.

Answers lie in a folder of the user's own, published whole. Time is cut into slots of one interval: the first who
asks in a slot asks Slurm, under a lock that dies with its holder; the others wait for that answer, or read it. So
two hundred who look every two seconds cost slurmctld what one costs, whatever their phases are. A refusal and a
silence are answers too: a controller that is down is asked by one at a time. One that is slow is left alone
afterwards for as long as it took.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.descriptors import try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.publish import write_text
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.parse import PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
SLOW_S = 60.0
"""How long an answer counts that changes with Slurm's configuration only."""
PAUSE_S = 0.02
"""First pause of those who wait for another's answer; later ones are longer."""
LONGEST_PAUSE_S = 0.25
_ANSWER, _FAILURE = ".answer", ".failure"
KEPT_S = 86_400.0
"""Answers that no one asked for during so long are removed."""

_SHOWN = frozenset(
    {"node", "nodes", "job", "jobs", "step", "steps", "topology", "config", "partition", "partitions"}
)
_SLOW = frozenset({"topology", "config"})
# What bends an answer besides the arguments: squeue(1), sinfo(1), scontrol(1), ENVIRONMENT VARIABLES.
_BENDING = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")
_BENDING_FAMILIES = ("SQUEUE_", "SINFO_", "SCONTROL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAnswer:
    """What came of one question."""

    began_unix: float  # when it was asked, and answered
    ended_unix: float
    text: str = ""  # standard output; empty where it failed
    separator: str = ""  # the separator the text was made with; empty where the question has none
    failure: str = ""  # empty, or `exit`, `timeout`, `missing`
    code: int = 0  # of a command that failed
    stderr: str = ""
    timeout_s: float = 0.0  # of one that was stopped

    def good_for(self, now: float, interval_s: float) -> bool:
        """Whether no one need ask again: it was asked for in this slot, or took longer than it is old."""
        age = now - self.ended_unix
        return self.began_unix // interval_s == now // interval_s or age < self.ended_unix - self.began_unix

    def told(self, argv: Sequence[str]) -> str:
        """Return the text, with the separators that `argv` asks for."""
        match self.failure:
            case "":
                own = _separator(argv)
                return self.text.replace(self.separator, own) if own else self.text
            case "timeout":
                raise command.CommandTimeoutError(argv, self.timeout_s)
            case "missing":
                raise command.CommandMissingError(argv[0])
            case _:
                raise command.CommandError(argv, self.code, self.stderr)


@dataclass(frozen=True, slots=True)
class AnswerAge:
    """How old the newest answer to a kind of question is, and why there is no newer one."""

    unix: float
    problem: str = ""


def _separator(argv: Sequence[str]) -> str:
    return next((found[0] for word in argv if (found := PATTERN.search(word))), "")


def kind_of(argv: Sequence[str]) -> str | None:
    """Return the kind of a question that changes nothing and may be answered for many; None for all else.

    >>> kind_of(["scontrol", "show", "node", "--oneliner"]), kind_of(["squeue", "-h"])
    ('node', 'squeue')
    >>> kind_of(["scontrol", "requeue", "7"]), kind_of(["scontrol", "show", "hostnames", "n[0-1]"])
    (None, None)
    """
    words = list(argv[:3])
    if words[:1] in (["squeue"], ["sinfo"]):
        return words[0]
    if words[:2] == ["scontrol", "show"] and words[2:] and words[2] in _SHOWN:
        return words[2]
    return None


def answers_folder(env: Mapping[str, str], state: Path) -> Path:
    """Return where this user's answers lie on this host: in memory where there is a place for it."""
    for named in (env.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        if named and Path(named).is_absolute() and Path(named).is_dir() and os.access(named, os.W_OK):
            return Path(named) / "deeplink" / "slurm"
    return state / "slurm" / socket.gethostname()  # of hosts that share a home each has its own clock


@dataclass(slots=True, kw_only=True)
class CachedRunner:
    """Runs questions of a known kind and shares answers with the user's other processes; all else as it is."""

    folder: Path
    interval_s: float = INTERVAL_S
    stale_s: float = 0.0
    run: command.Runner = command.run
    clock: Clock = field(default_factory=SystemClock)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    told: dict[str, AnswerAge] = field(default_factory=dict)
    _since: float = 0.0
    _usable: bool | None = None

    def afresh(self) -> None:
        """Take no answer any more that was asked for before now: somebody has just changed something."""
        self._since = self.clock.unix()

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = command.COMMAND_TIMEOUT_S) -> str:
        """Return what `command.run` returns, raise what it raises; `told` says how old it is."""
        kind = kind_of(argv)
        if kind is None or not self._ready():
            return self.run(argv, timeout_s=timeout_s)
        entry = self.folder / self._key(argv)
        answer = self._answer(entry, argv, kind, timeout_s)
        if not answer.failure:
            self.told[kind] = AnswerAge(answer.ended_unix)
            return answer.told(argv)
        try:
            return answer.told(argv)
        except DeepLinkError as problem:
            older = _read(entry.with_suffix(_ANSWER))
            if older is None or not 0 <= self.clock.unix() - older.ended_unix <= self.stale_s or _refusal(answer):
                self.told[kind] = AnswerAge(older.ended_unix if older else 0.0, str(problem))
                raise
            self.told[kind] = AnswerAge(older.ended_unix, str(problem))
            return older.told(argv)

    def _key(self, argv: Sequence[str]) -> str:
        bending = sorted(
            (name, value)
            for name, value in self.env.items()
            if name in _BENDING or name.startswith(_BENDING_FAMILIES)
        )
        plain = [PATTERN.sub("~", word) for word in argv]
        return hashlib.sha256(json.dumps([plain, bending]).encode()).hexdigest()[:32]

    def _answer(self, entry: Path, argv: Sequence[str], kind: str, timeout_s: float) -> CachedAnswer:
        """Return a good answer: one that is there, one that another brings meanwhile, or our own."""
        interval_s = max(self.interval_s, SLOW_S) if kind in _SLOW else self.interval_s
        asked, end = self.clock.unix(), self.clock.monotonic() + timeout_s
        pause = PAUSE_S
        while True:
            found = self._found(entry, interval_s, asked)
            if found is not None:
                return found
            with _alone(entry) as mine:
                if mine:
                    # Whoever held the lock before us may have answered between our look and our turn.
                    return self._found(entry, interval_s, asked) or self._ask(entry, argv, timeout_s)
            if self.clock.monotonic() >= end:
                now = self.clock.unix()
                return CachedAnswer(began_unix=asked, ended_unix=now, failure="timeout", timeout_s=timeout_s)
            self.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _found(self, entry: Path, interval_s: float, asked: float) -> CachedAnswer | None:
        now = self.clock.unix()
        there = [
            one
            for one in (_read(entry.with_suffix(_ANSWER)), _read(entry.with_suffix(_FAILURE)))
            if one and one.ended_unix <= now
        ]
        newest = max(there, key=lambda one: one.ended_unix, default=None)
        if newest is None or newest.began_unix < self._since:
            return None
        if newest.good_for(now, interval_s) or newest.ended_unix > asked:
            return newest
        return None

    def _ask(self, entry: Path, argv: Sequence[str], timeout_s: float) -> CachedAnswer:
        began = self.clock.unix()
        facts: dict[str, object] = {}
        try:
            facts = {"text": self.run(argv, timeout_s=timeout_s), "separator": _separator(argv)}
        except command.CommandError as problem:
            facts = {"failure": "exit", "code": problem.code, "stderr": problem.stderr}
        except command.CommandTimeoutError as problem:
            facts = {"failure": "timeout", "timeout_s": problem.timeout_s}
        except command.CommandMissingError:
            facts = {"failure": "missing"}
        answer = CachedAnswer(began_unix=began, ended_unix=self.clock.unix(), **facts)  # type: ignore[arg-type]
        try:
            final = entry.with_suffix(_FAILURE) if answer.failure else entry.with_suffix(_ANSWER)
            write_text(final, json.dumps(asdict(answer)), mode=0o600, durable=False)
            self._sweep()
        except OSError as problem:
            log.info("an answer of Slurm cannot be shared: %s", problem)
        return answer

    def _ready(self) -> bool:
        if self._usable is None:
            problem = _prepared(self.folder)
            if problem:
                log.warning("answers of Slurm are not shared: %s: %s", self.folder, problem)
            self._usable = not problem
        return self._usable

    def _sweep(self) -> None:
        old = self.clock.unix() - KEPT_S
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < old:
                    path.unlink()


def _refusal(answer: CachedAnswer) -> bool:
    """Whether Slurm did answer, with a no: then what it said before is not true any more."""
    return answer.failure == "exit" and "Invalid job id" in answer.stderr


def _prepared(folder: Path) -> str:
    """Make the folder; return why it cannot be used, or an empty text."""
    try:
        private_folder(folder)
    except OSError as problem:
        return problem.strerror or str(problem)
    return "" if os.access(folder, os.W_OK) else "it cannot be written"


def _read(path: Path) -> CachedAnswer | None:
    try:
        return CachedAnswer(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no one asked yet, or a version of ours that wrote something else
        return None


@contextlib.contextmanager
def _alone(entry: Path) -> Iterator[bool]:
    """Hold the lock of a question, if no one else does; the kernel lets go of it for one that is killed."""
    try:
        lock = os.open(entry.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True  # a full disk: rather ask twice than not at all
        return
    try:
        mine = True
        with contextlib.suppress(OSError):  # storage without locks
            if mine := try_lock(lock):
                os.utime(lock)
        yield mine
    finally:
        os.close(lock)
