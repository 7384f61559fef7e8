"""The launcher's role in a run: who may take it when the launcher's host is dead, and what the next one needs.

    run.json                        the run, and the place of its launcher (`run_state.py`)
    launcher.RUN.TERM               the claim of the TERM-th launcher after the first
    ended.RUN, heard.RUN            how the run ended, for the process that holds the place in the batch script

A claim is made by giving a whole file a name that is not there: of all that try, on any side of a network that is
cut, one has it, and none is ever empty. What cannot be read does not say whose it is. Agents refuse a launcher of
an older term, and tell it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import DRAFT_PREFIX, write_text
from deeplink.scheduler.liveness.probe import TcpProber, slurmd_port
from deeplink.scheduler.recovery.evidence import TAG, ProbeResult
from deeplink.scheduler.recovery.recovery_steps import comment_of, with_our_comment
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import is_unanswered
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.liveness.probe import Prober
    from deeplink.scheduler.slurm.parse import JobRow

log = logging.getLogger(__name__)
FILE = "run.json"
SILENT_S = 3.0  # without a question of the launcher's; one that is started again is back after a second, or four
AGREED_S = SILENT_S - 1.0  # of other nodes, which were not asked at the same moment
HEARD_S = 1.5  # a node that answered what it was asked later than this ago does not agree that nobody asks
SPOKEN_S = 0.5  # how often the holder of a place looks for the run's end
_TOKEN = "SLURM_JWT"  # noqa: S105 - its name
# What Slurm tells a script of its job, and a step of other things: the next launcher is to have the script's.
_SLURMS = ("SLURM", "SRUN_", "SBATCH_", "CUDA_VISIBLE_", "GPU_DEVICE_", "ROCR_VISIBLE_", "ZE_AFFINITY_")

_OURS = os.urandom(8).hex()  # tells claims of this process from those of others


def launcher_on(node: str) -> str:
    """Return how a launcher that has the role, and claims the next term, names itself; agents are `NODE`."""
    return f"{node} launcher"


def run_of(secret: str) -> str:
    """Return what tells the run with this secret from others of the job; no secret."""
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


def may_take(nodes: int, agreeing: int) -> bool:
    """Whether so many of a job's nodes, which no launcher asks, may have one of theirs claim the role.

    Half of them are enough, since a claim is made besides: of two halves one gets it.

    >>> may_take(3, 2), may_take(2, 1), may_take(5, 2)
    (True, True, False)
    """
    return 2 * agreeing >= nodes


def is_undisputed(nodes: int, heard: int) -> bool:
    """Whether a launcher that hears so many of its nodes acts without a claim: no others may take the role."""
    return not may_take(nodes, nodes - heard)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherPlace:
    """Where a launcher runs, and how another one is started in its stead."""

    host: str  # its node; empty where it is none of the job's
    term: int
    command: tuple[str, ...]
    folder: str  # that it works in
    env: Mapping[str, str]  # what Slurm told its script
    output: tuple[str, str]  # the files of its standard output and error; empty where they are none
    monotonic: float  # its host's clock
    unix: float  # and the time of day, then

    @classmethod
    def of_this_process(cls, host: NodeName | None, term: int) -> Self:
        """Return that of the launcher which this process is."""
        return cls(
            host=host or "",
            term=term,
            command=(sys.executable, *sys.orig_argv[1:]),
            folder=_working_folder(),
            env=slurms(os.environ),
            output=(_file_behind(1), _file_behind(2)),
            monotonic=time.monotonic(),
            unix=time.time(),
        )

    @classmethod
    def of(cls, kept: dict[str, Any]) -> Self:
        """Read what `asdict` made."""
        return cls(**{**kept, "command": tuple(kept["command"]), "output": tuple(kept["output"])})

    def as_json(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return {**asdict(self), "env": dict(self.env)}

    def environment(self, env: Mapping[str, str], node: str) -> dict[str, str]:
        """Return the environment of a launcher on `node`, where a step of the job has `env`."""
        own = {name: value for name, value in env.items() if name not in slurms(env)}
        return {**own, **self.env, "SLURMD_NODENAME": node}

    def here_s(self, monotonic: float, unix: float) -> float:
        """Return what is to be added to a moment of its host for one of this, with these clocks now."""
        return (self.unix - self.monotonic) - (unix - monotonic)


def slurms(env: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment Slurm tells of a script, or of a step; no secret."""
    return {name: value for name, value in env.items() if name.startswith(_SLURMS) and name != _TOKEN}


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it has been removed
        return "/"


def _file_behind(descriptor: int) -> str:
    with suppress(OSError):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_file():
            return str(path)
    return ""


@dataclass(frozen=True, slots=True)
class LeftRole:
    """The role as the last launcher left it."""

    place: LauncherPlace
    nodes: Mapping[str, str]  # the job's as of the last attempt, with the addresses of their agents; spares first


def left_role(folder: Path, run: str) -> LeftRole | None:
    """Return the role in this run; None where no attempt of it has begun. Raises OSError, ValueError."""
    kept = json.loads((folder / FILE).read_bytes())
    try:
        if kept["run"] != run or not kept["launcher"] or not kept["nodes"]:
            return None
        return LeftRole(LauncherPlace.of(kept["launcher"]), dict(kept["nodes"]))
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{folder / FILE}: {problem!r}") from problem


@dataclass(frozen=True, slots=True)
class RoleClaims:
    """The claims on the launcher's role in one run. What takes part may hang with the job's folder."""

    folder: Path
    run: str

    def newest(self) -> int:
        """Return the newest term that was claimed; 0 for that of the first launcher. Raises OSError."""
        form = re.compile(rf"launcher\.{self.run}\.(\d+)")
        return max((int(found[1]) for name in self._names() if (found := form.fullmatch(name))), default=0)

    def claimant(self, term: int) -> str:
        """Return who claimed a term. Raises OSError, also where the claim does not say."""
        return self._claim_of(term).splitlines()[0]

    def claim(self, term: int, by: str) -> bool:
        """Claim the role for a term; False where another one has it. Raises OSError where that is not known."""
        final, text = self._of_term(term), f"{by}\n{_OURS}\n"
        draft = final.with_name(f"{DRAFT_PREFIX}{final.name}-{os.urandom(6).hex()}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, final)
        except FileExistsError:
            return self._claim_of(term) == text  # of a try before this one, whose answer was lost
        finally:
            with suppress(OSError):  # else it lies there, and is none
                draft.unlink(missing_ok=True)
        return True

    def _claim_of(self, term: int) -> str:
        path = self._of_term(term)
        if not (text := path.read_text(encoding="utf-8", errors="replace")).strip():
            raise OSError(errno.EAGAIN, "the claim does not say whose it is", str(path))
        return text

    def _of_term(self, term: int) -> Path:
        return self.folder / f"launcher.{self.run}.{term}"

    def leave_end(self, code: int) -> None:
        """Say how the run ended. Raises OSError."""
        write_text(self._ended, f"{code}", mode=0o600)

    def hear_end(self) -> int | None:
        """Return how the run ended, and say that it was heard; None before. Raises OSError, ValueError."""
        if self._ended.name not in self._names():
            return None
        code = int(self._ended.read_text(encoding="ascii"))
        with suppress(OSError):  # of a folder that takes no writes: the other side waits for a while, and goes on
            self._heard.touch(mode=0o600)
        return code

    def is_heard(self) -> bool:
        """Whether somebody heard how the run ended. Raises OSError."""
        return self._heard.name in self._names()

    def _names(self) -> set[str]:
        # Of a single name a network file system remembers for long that it was not there.
        return {path.name for path in self.folder.iterdir()}

    @property
    def _ended(self) -> Path:
        return self.folder / f"ended.{self.run}"

    @property
    def _heard(self) -> Path:
        return self.folder / f"heard.{self.run}"


# The end of a job whose launcher runs on another node than the batch script did. Where the script's host is dead,
# nothing else ends it: with `--no-kill` the job would hold its nodes until its time limit. Where it lives, what
# holds the launcher's place there ends with the run's exit code, and the script goes on.

PROBE_S = 1.0
HEARD_WAIT_S = 20.0  # for the script's host, where it lives: shared folders may show a new file late
ASKED_S, AGAIN_S = 3600.0, 1.0  # for how long Slurm is asked again: nobody else ends the job


def end_job(
    job: int,
    restart: int,
    code: int,
    claims: RoleClaims,
    *,
    slurm: Slurm | None = None,
    clock: Clock | None = None,
    prober: Prober | None = None,
) -> None:
    """End the job with the run's exit code, unless its script does, or Slurm has it in its queue again."""
    slurm, clock = slurm or Slurm(), clock or SystemClock()
    try:
        claims.leave_end(code)
    except OSError as problem:
        log.warning("how the run ended cannot be left for its script: %s", problem)
    deadline = clock.monotonic() + ASKED_S
    while True:
        try:
            row = slurm.job(job)
            is_ours = row.restarts == restart and row.state is JobState.RUNNING
            if is_ours and not _goes_on(row, claims, slurm, clock, prober or TcpProber(clock)):
                _complete(row, code, slurm)
        except DeepLinkError as problem:
            if not is_unanswered(problem) or clock.monotonic() >= deadline:
                log.warning("job %d cannot be ended: %s", job, problem)
                return
        else:
            return
        clock.sleep(AGAIN_S)


def _goes_on(row: JobRow, claims: RoleClaims, slurm: Slurm, clock: Clock, prober: Prober) -> bool:
    """Whether the batch script has heard of the run's end: waits for it while its host answers."""
    deadline = clock.monotonic() + HEARD_WAIT_S
    hosts = slurm.nodes([row.batch_host]) if row.batch_host in row.nodes and row.batch_host else []
    default = slurmd_port(slurm) if any(one.port is None for one in hosts) else 0
    targets = {one.name: (one.address, one.port or default) for one in hosts}
    while ProbeResult.ANSWERS in prober.probe(targets, PROBE_S).values() and clock.monotonic() < deadline:
        try:
            if claims.is_heard():
                return True
        except OSError as problem:
            log.info("%s", problem)
        clock.sleep(SPOKEN_S)
    return False


def _complete(row: JobRow, code: int, slurm: Slurm) -> None:
    try:
        slurm.complete(row.id, code)
    except DeepLinkError as problem:
        if is_unanswered(problem):
            raise
        log.warning("job %s cannot be given its exit code, and is cancelled: %s", row.label, problem)
        said = comment_of(f"{TAG}its batch host died; the run ended with exit code {code}")
        slurm.comment_job(row.address, with_our_comment(slurm.comment(row.id), said))
        slurm.cancel(row.address)
