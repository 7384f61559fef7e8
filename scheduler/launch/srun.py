"""Agents and ranks as srun steps of our own job: their environment, their numbers, their failures."""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from typing_extensions import override

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_text
from deeplink.core.text import printable
from deeplink.scheduler.launch.backend import RankStep
from deeplink.scheduler.launch.process import AgentProcesses, abandon_process, end_process
from deeplink.scheduler.recovery.rank_failure import Clue, Failed, hints_in
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.slurm.command import TAKEN, is_unanswered, unstarted_step
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold
from deeplink.scheduler.slurm.sbatch_options import names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import EndOf
    from deeplink.scheduler.launch.process import StartedAgents, StarterProcess
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobAddress

log = logging.getLogger(__name__)

_MOST_LOOKS, _LOOK_AGAIN_S = 20, 0.5
UNANSWERED_S = 600.0  # for how long an srun that slurmctld does not answer is tried again
TRY_AGAIN_S = 1.0  # how long after its end
TAKEN_S = 60.0  # how long one that gets no memory is: the step before may have it still, or the job has too little

# What Slurm puts into a batch script's environment and srun reads back as options (srun(1), INPUT ENVIRONMENT
# VARIABLES): it describes the script's own job or the user's other steps, and would bend the shape of ours.
# SLURM_GPUS is a total: a step over named nodes is refused it.
_SHAPING = names(
    """SLURM_HOSTFILE SLURM_DISTRIBUTION SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_CORE
    SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_GPU SLURM_GPUS SLURM_NNODES SLURM_JOB_NUM_NODES SLURM_KILL_BAD_EXIT
    SLURM_NO_KILL SLURM_EXCLUSIVE SLURM_EXACT SLURM_OVERLAP SLURM_OVERCOMMIT SLURM_LABELIO SLURM_STDOUTMODE
    SLURM_STDERRMODE SLURM_STDINMODE SLURM_UNBUFFEREDIO SLURM_WAIT SLURM_EXPORT_ENV SLURM_MULTI_PROG"""
)
_OF_TASKS = names("SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_TRES_BIND")
_RESOURCES = _OF_TASKS | names(
    """SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GRES SLURM_GPU_BIND SLURM_CPUS_PER_GPU SLURM_CPUS_PER_TASK
    SRUN_CPUS_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_CPU_BIND SLURM_CPU_BIND_LIST
    SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_MEM_BIND SLURM_THREADS_PER_CORE SLURM_CORE_SPEC"""
)

FILE, BEFORE_FILE = "steps", "steps.before"  # the numbers of the newest run that noted some; of those before it
MOST_PASSED = 64  # each costs about 0.1 s; beyond it the older numbers are those of steps that ended long ago
AT_ONCE = 8
_changing = threading.Lock()  # ranks and agents are started by threads of their own


def step_environment(env: Mapping[str, str], *, resources: bool, tasks: bool = True) -> dict[str, str]:
    """Return `env` without what would bend a step of ours."""
    dropped = {*_SHAPING, *(() if resources else _RESOURCES), *(() if tasks else _OF_TASKS)}
    return {name: value for name, value in env.items() if name not in dropped}


@dataclass(frozen=True, slots=True)
class StepIds:
    """Numbers of a job's steps that an earlier run of it may still be asked to end, in two files of its folder."""

    folder: Path
    restart: int

    def note(self, number: int) -> None:
        """A step of this run has this number; until `forget` says otherwise, a signal for it may be under way."""
        with _changing:
            self._leave(max(number, self._noted()))

    def add(self) -> None:
        """One more step has been started since the last one that was noted."""
        with _changing:
            number = self._noted()
            if number >= 0:
                self._leave(number + 1)

    def _noted(self) -> int:
        """Return the highest number of this run's so far; -1 where none was noted."""
        restart, number = self._read(FILE)
        return number if restart == self.restart else -1

    def _read(self, name: str) -> tuple[int, int]:
        """Return which run a file is of, and the number in it; -1 and -1 where there is none."""
        try:
            restart, number = map(int, (self.folder / name).read_text(encoding="ascii").split())
        except FileNotFoundError:
            return -1, -1
        except (OSError, ValueError) as problem:
            log.warning("%s: %s", self.folder / name, problem)
            return -1, -1
        return restart, number

    def _leave(self, number: int, name: str = FILE) -> None:
        try:
            write_text(self.folder / name, f"{self.restart} {number}")
        except OSError as problem:
            log.warning("%s: %s", self.folder / name, problem)

    def forget(self) -> None:
        """This run ended without having lost a node: no signal of its own is under way."""
        try:
            (self.folder / FILE).unlink(missing_ok=True)
        except OSError as problem:
            log.warning("%s: %s", self.folder / FILE, problem)

    def highest(self) -> int:
        """Return the highest number that a run before this one may still be signalled under; -1 for none."""
        if not self.restart:
            return -1
        last, number = self._read(FILE)
        return max(number if last < self.restart else -1, self._read(BEFORE_FILE)[1])

    def let_pass(self, start_step: Callable[[], int | None]) -> int:
        """Start empty steps until all numbers up to `highest` are used; return how many were."""
        highest = self.highest()
        if highest < 0:
            return 0
        self._leave(highest, BEFORE_FILE)
        first = start_step()
        if first is None:
            return 0
        missing = min(highest - first, MOST_PASSED)
        if missing > 0:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda _: start_step(), range(missing)))
        return 1 + max(0, missing)


class SlurmAgents(AgentProcesses):
    """One srun step with an agent per node."""

    starter = "srun"
    doubt = "Does `scontrol ping` answer, and what does `squeue --steps` say of the job?"

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        secret: str,
        logfile: Path,
        gone: frozenset[NodeName] = frozenset(),
        adopted: tuple[StartedAgents, EndOf] | None = None,
    ) -> None:
        self.gone = gone
        super().__init__([argv], env, secret=secret, logfile=logfile, adopted=adopted)


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step of the job we run in."""

    job: int  # its raw id
    address: JobAddress  # how commands that change the job name it
    name: str


def unbroken_pipe() -> tuple[int, int]:
    """Return the ends of a pipe; what writes to it reads it as well, so that it outlives the reader here.

    A later reader finds it as the writer's standard error (`errors_of`). While there is none, it fills up.
    """
    read, write = os.pipe()
    try:
        return read, os.open(f"/proc/self/fd/{write}", os.O_RDWR)
    finally:
        os.close(write)


def errors_of(pid: int) -> IO[bytes]:
    """Return what a process has written to its `unbroken_pipe`, and will; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/fd/2").open("rb", buffering=0)
    except OSError:
        return Path(os.devnull).open("rb", buffering=0)


class SlurmRanks(RankStep):
    """The rank step: srun in the foreground of the job's output, its failures read from srun's messages.

    An srun that slurmctld did not answer has started no rank, and exits 1 as a script does. It is tried again, for
    `UNANSWERED_S`: ranks that were not started have not failed. So is one that gets no memory, for `TAKEN_S`: the
    step before may have it still. First Slurm is asked whose the job is by then: cut off for a while, we may be
    what is left of an older run, and our ranks would run among those of the newer one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        slurm: Slurm,
        step: OwnStep,
        noted: Callable[[int], None],
        *,
        restart: int,
        clock: Clock | None = None,
        adopted: StarterProcess | None = None,
    ) -> None:
        self._argv, self._env, self._noted = tuple(argv), env, noted
        self._slurm, self._clock = slurm, clock or SystemClock()
        self._own, self._restart = step, restart
        self._tries_end = self._clock.monotonic() + UNANSWERED_S
        self._taken_since: float | None = None  # for how long there has been no memory
        self._has_begun = False  # Slurm knows the step: there are ranks, or there were
        self._again_at: float | None = None  # when it is looked whether srun can be tried again
        self._looking: threading.Thread | None = None
        self._may_begin = self._is_elsewhere = False  # what was found
        self._tries = True  # whether it may be tried again: nobody has ended us yet
        self._begin(adopted)

    @property
    @override
    def pid(self) -> int:
        return self._process.pid

    def _begin(self, adopted: StarterProcess | None = None) -> None:
        self._process: StarterProcess
        if adopted is not None:
            self._process, errors = adopted, errors_of(adopted.pid)
        else:
            read, write = unbroken_pipe()
            try:
                self._process = processes.spawn(self._argv, env=self._env, stderr=write)
            finally:
                os.close(write)
            errors = os.fdopen(read, "rb", buffering=0)
        self._watcher = FailureWatcher(errors)
        threading.Thread(target=self._note, name="deeplink-step", daemon=True).start()

    def _try_again(self) -> bool:
        """Start srun once more if it got no step and it is time; whether that is done or to come."""
        now = self._clock.monotonic()
        if not self._tries or self._is_elsewhere or now >= self._tries_end:
            return False
        # Also a rank may say such words, of an srun of its own.
        if self._has_begun or self._process.returncode != 1 or self._watcher.code is not None:
            return False
        if not self._watcher.unstarted or self._is_taken_for_long(now):
            return False
        if self._again_at is None:
            log.warning("srun could not start the ranks: %s; trying again", self._watcher.unstarted)
            self._again_at = now + TRY_AGAIN_S
        elif self._may_begin:
            self._again_at, self._may_begin = None, False
            self._begin()
        elif now >= self._again_at and (self._looking is None or not self._looking.is_alive()):
            self._again_at = now + TRY_AGAIN_S
            self._looking = threading.Thread(target=self._look, name="deeplink-again", daemon=True)
            self._looking.start()
        return True

    def _is_taken_for_long(self, now: float) -> bool:
        self._taken_since = (self._taken_since or now) if self._watcher.unstarted == TAKEN else None
        return self._taken_since is not None and now - self._taken_since >= TAKEN_S

    def _look(self) -> None:
        try:
            self._is_elsewhere = self._slurm.job(self._own.job).restarts > self._restart
        except DeepLinkError as problem:
            if is_unanswered(problem):
                self._taken_since = None  # what is taken nobody says by now
                return
            log.info("job %s: %s", self._own.address, problem)  # srun will be told the same
        self._may_begin = not self._is_elsewhere

    def _note(self) -> None:
        try:
            number = self._number()
        except DeepLinkError as problem:
            log.info("the number of step %s: %s", self._own.name, problem)
        else:
            if number is not None:
                self._has_begun = True
                self._noted(number)

    @override
    def exit_code(self) -> int | None:
        code = self._code()
        if code is None:
            return None
        self._watcher.finish()
        if code and self._try_again():
            return None
        if self._is_elsewhere:
            return 128 + signal.SIGTERM  # as of ranks that Slurm ended: it is asked why
        if code and self._watcher.code is not None:
            # srun's own code is the greatest of all ranks': those it ended for the first one's sake hide its code.
            return self._watcher.code
        return code

    @override
    def failed(self) -> Failed:
        return self._watcher.failed(self._code() or 0)

    def _code(self) -> int | None:
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @override
    def send(self, number: signal.Signals) -> None:
        if number in {signal.SIGUSR1, signal.SIGUSR2}:
            # srun passes these on; others it takes as meant for itself. One that has ended has no ranks.
            self._process.send_signal(number)
        else:
            self._tries = False
            threading.Thread(target=self._signal_step, args=(number,), name="deeplink-signal", daemon=True).start()

    def _number(self) -> int | None:
        # A step that was only just started is not known yet; a signal that came so early must not be lost.
        for _ in range(_MOST_LOOKS):
            step = self._slurm.steps(self._own.job).get(self._own.name)
            if step is not None or self._process.poll() is not None:
                return step
            SystemClock().sleep(_LOOK_AGAIN_S)
        return None

    def _signal_step(self, number: signal.Signals | None) -> None:
        try:
            step = self._number()
            if step is None:
                log.warning("step %s of job %s is not known to Slurm", self._own.name, self._own.address)
            else:
                signal_name = number.name.removeprefix("SIG") if number else ""
                self._slurm.cancel_step(self._own.address, step, signal=signal_name)
        except DeepLinkError as problem:
            log.info("scancel of step %s: %s", self._own.name, problem)  # also said where the step ended meanwhile

    @override
    def abandon(self) -> None:
        self._tries = False
        abandon_process(self._process)

    @override
    def kill(self) -> None:
        self._tries = False
        if self._process.poll() is not None:
            return
        # In the background, for what srun cannot do: a node that comes back finds that its step was cancelled.
        threading.Thread(target=self._signal_step, args=(None,), name="deeplink-scancel", daemon=True).start()
        end_process(self._process)
        self._watcher.finish()


# Srun's standard error is passed through, and read: which rank failed first. With --kill-on-bad-exit srun ends the
# other ranks and then exits with the greatest code of all: 143 of those it ended hides the 5 of the one that
# failed (measured, 22.05.8). Its messages tell them apart.

# Behind what a rank wrote without a line break, too: a bar of progress, say.
_EXITED = re.compile(rb"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.*)")
_OWN = re.compile(rb"srun: (?:(?:error|fatal): |(?=(?:unrecognized |invalid )?option ))(?P<why>.*)")
_LAUNCH = re.compile(rb"srun: error: Task launch for \S+ failed on node (?P<node>\S+?):? ")
_WITH_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {(signal.strsignal(number) or "").lower(): number for number in signal.valid_signals()}
_LONGEST_LINE = 64 << 10
FINISH_WAIT_S = 2.0
# What was said longer before the end has nothing to do with it: a batch too large that was made smaller, say.
HINT_S = 30.0


def exit_code_of(how: str) -> int | None:
    """Return the exit code behind srun's words; None if they say nothing of the kind.

    >>> exit_code_of("Exited with exit code 5"), exit_code_of("Segmentation fault (core dumped)")
    (5, 139)
    >>> exit_code_of("Out Of Memory")  # the kernel's doing
    137
    """
    if how == "Out Of Memory":
        return 128 + signal.SIGKILL
    found = _WITH_CODE.fullmatch(how)
    if found:
        return int(found[1])
    number = _SIGNALS.get(how.removesuffix(" (core dumped)").strip().lower())
    return None if number is None else 128 + number


class FailureWatcher:
    """Copies `source` to standard error from a thread until it ends, and closes it."""

    def __init__(self, source: IO[bytes], clock: Clock | None = None) -> None:
        # Each is empty while nothing is known: exit code of the first rank that failed, srun's words about it, and
        # where it ran, or srun could start none; why srun could start no rank, where it may be able to later.
        self.code: int | None = None
        self.said = self.node = self.unstarted = self._own = ""
        self.is_rank_named = (
            False  # srun told of the end of a rank, as it does of each that fails, also with --quiet
        )
        self._source, self._clock = source, clock or SystemClock()
        self._hints: dict[Clue, float] = {}
        self._rest = b""
        self._thread = threading.Thread(target=self._copy, name="deeplink-stderr", daemon=True)
        self._thread.start()

    def failed(self, code: int = 0) -> Failed:
        """Return what is known of the first rank that failed; of an srun that exited so, if it named no rank."""
        if code and not self.is_rank_named:
            why = f": {self._own}" if self._own else ""
            return Failed(said=f"srun itself exited {code}{why}", node=self._one_node(), is_of_rank=False)
        now = self._clock.monotonic()
        recent = frozenset(hint for hint, at in self._hints.copy().items() if now - at < HINT_S)
        return Failed(said=self.said, node=self._one_node(), hints=recent)

    def _one_node(self) -> NodeName | None:
        try:
            nodes = unfold(self.node)
        except NodeSetError:
            nodes = ()
        return nodes[0] if len(nodes) == 1 else None

    def finish(self) -> None:
        """Wait, not long, until all that was written has been passed on."""
        self._thread.join(FINISH_WAIT_S)

    def _copy(self) -> None:
        passing = True
        with self._source:
            while chunk := os.read(self._source.fileno(), 1 << 16):
                if passing:
                    try:
                        _pass_on(chunk)
                    except OSError as problem:  # a full disk may have room again; what is gone is gone
                        passing = problem.errno == errno.ENOSPC
                self._scan(chunk)
            self._scan(b"\n")  # a last line without an end

    def _scan(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for hint in hints_in(b"\n".join(lines)):
            self._hints[hint] = self._clock.monotonic()
        for line in lines if self.code is None else ():
            if line.startswith(b"srun: error: Unable to "):
                self.unstarted = self.unstarted or unstarted_step(_text(line))
            found = _EXITED.search(line)
            if not found:
                self._note_own(line)
                continue
            self.is_rank_named = True
            how = _text(found["how"].strip())
            code = exit_code_of(how)
            if code:
                self.node = _text(found["node"])
                self.said = f"rank {_text(found['tasks'])} on {self.node}: {how}"
                self.code = code
                return

    def _note_own(self, line: bytes) -> None:
        found = _OWN.match(line)
        if found and not self._own:
            self._own = _text(found["why"].strip())
        if (launch := _LAUNCH.match(line)) and not self.node:
            self.node = _text(launch["node"])


def _pass_on(chunk: bytes) -> None:
    """Write to standard error; where another process made it non-blocking, what it takes in no time is dropped."""
    while chunk:
        try:
            chunk = chunk[os.write(2, chunk) :]
        except BlockingIOError:
            if not select.select([], [2], [], FINISH_WAIT_S)[1]:
                return


def _text(said: bytes) -> str:
    """Return what goes into records and onto terminals: a rank may write what looks like srun's words."""
    return printable(said.decode(errors="replace"))
