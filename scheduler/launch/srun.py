"""Agents and slots as srun steps of our own job: their environment, their numbers, why they did not come to be."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from typing_extensions import override

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_text
from deeplink.core.text import printable
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.process import AgentProcesses, StartedSlots, abandon_process, end_process
from deeplink.scheduler.recovery.rank_failure import Clue, Failed, hints_in
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.slurm.command import TAKEN, is_unanswered, unstarted_step
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold
from deeplink.scheduler.slurm.sbatch_options import names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.launch.backend import EndOf
    from deeplink.scheduler.launch.process import StartedAgents, StarterProcess
    from deeplink.scheduler.slurm.client import Slurm

log = logging.getLogger(__name__)

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
        self._read, self._killed = self.started.log_start, frozenset[NodeName]()

    @override
    def killed(self) -> frozenset[NodeName]:
        try:
            with self._logfile.open("rb") as log_file:
                log_file.seek(self._read)
                lines = log_file.read(_LONGEST_LINE).rpartition(b"\n")[0]
        except OSError:
            return self._killed
        self._read += len(lines)
        for said in _KILLED.finditer(lines):
            with contextlib.suppress(NodeSetError):
                self._killed |= {*unfold(_text(said["nodes"]))}
        return self._killed


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


class SlotStep:
    """A step of slots: srun in the foreground of the job's output, with what it says overheard.

    An srun that slurmctld did not answer has started no slot, and exits 1 as a script does. It is tried again, for
    `UNANSWERED_S`. So is one that gets no memory, for `TAKEN_S`: the step before may have it still. First Slurm
    is asked whose the job is by then: cut off for a while, we may be what is left of an older run, and our ranks
    would run among those of the newer one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        slurm: Slurm,
        *,
        counts: Mapping[NodeName, int],
        run: tuple[int, int],
        clock: Clock | None = None,
        adopted: StarterProcess | None = None,
    ) -> None:
        """`counts`: slots of each node; `run`: the job's raw id, and how often it was started again before.

        With `adopted`, the srun of a launcher before us, none is started.
        """
        self.counts, self.has_begun = counts, False  # there are slots, or there were
        self._argv, self._env = tuple(argv), env
        self._slurm, self._clock = slurm, clock or SystemClock()
        self._job, self._restart = run
        self._tries_end = self._clock.monotonic() + (UNANSWERED_S if adopted is None else 0.0)
        self._taken_since: float | None = None  # for how long there has been no memory
        self._again_at: float | None = None  # when it is looked whether srun can be tried again
        self._looking: threading.Thread | None = None
        self._may_begin = self._is_elsewhere = False  # what was found
        self._begin(adopted)

    @property
    def pid(self) -> int:
        """That of srun."""
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

    def _try_again(self) -> bool:
        """Start srun once more if it got no step and it is time; whether that is done or to come."""
        now = self._clock.monotonic()
        if self._is_elsewhere or now >= self._tries_end:
            return False
        # Also a rank may say such words, of an srun of its own.
        if self.has_begun or self._process.returncode != 1:
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
            self._is_elsewhere = self._slurm.job(self._job).restarts > self._restart
        except DeepLinkError as problem:
            if is_unanswered(problem):
                self._taken_since = None  # what is taken nobody says by now
                return
            log.info("job %d: %s", self._job, problem)  # srun will be told the same
        self._may_begin = not self._is_elsewhere

    def ended(self) -> int | None:
        """Return the exit code once there are no slots, and none are to come; None before."""
        code = self._process.poll()
        if code is None:
            return None
        self._watcher.finish()
        if code and self._try_again():
            return None
        if self._is_elsewhere:
            return 128 + signal.SIGTERM  # as of ranks that Slurm ended: it is asked why
        return 128 - code if code < 0 else code

    def failed(self) -> Failed:
        """Return why there are none; before, what the ranks' standard error hints at."""
        code = self._process.poll()
        return self._watcher.failed(128 - code if code is not None and code < 0 else code)

    def abandon(self) -> None:
        """Let go of it without a word to Slurm: under the job's number runs something newer."""
        abandon_process(self._process)

    def stop(self, leave_s: float = 0.0) -> None:
        """End it, where its slots have not left within so long; returns in bounded time."""
        with contextlib.suppress(processes.TimeoutExpired):
            self._process.wait(leave_s)
        end_process(self._process)
        self._watcher.finish()


class SlurmSlots:
    """The slots of a run: those of its nodes with ranks are one step, those of its spares another one.

    Slurm ends all of a step when a node of it boots again that it has not called down: a spare's boot must not end
    the ranks.
    """

    def __init__(self, number: int, steps: Sequence[SlotStep], noted: Callable[[int], object]) -> None:
        self.number = number  # greater than that of those before
        self._steps, self._noted, self._step_id = tuple(steps), noted, -1

    def begun(self, step_id: int | None) -> None:
        """Take note that there are slots, and of Slurm's number of their step, where it is told."""
        self._steps[0].has_begun = True
        if step_id is not None and self._step_id < 0:
            self._step_id = step_id + len(self._steps) - 1
            # Of a shared folder, which may hang.
            threading.Thread(target=self._noted, args=(self._step_id,), name="deeplink-step", daemon=True).start()

    def fit(self, counts: Mapping[NodeName, int]) -> bool:
        """Whether they are there, and so many on each node: CPUs and GPUs are bound for just as many."""
        there = [step.counts.items() for step in self._steps if step.ended() is None]
        return self._steps[0].has_begun and counts.items() <= {one for each in there for one in each}

    def started(self) -> StartedSlots:
        """Return what another launcher needs to go on with them."""
        steps = tuple((step.pid, step.counts) for step in self._steps)
        return StartedSlots(self.number, self._steps[0].has_begun, steps)

    def beside(self, nodes: Collection[NodeName]) -> set[NodeName]:
        """Return all nodes of the steps that these nodes have a part in."""
        return {node for step in self._steps if step.counts.keys() & set(nodes) for node in step.counts}

    def ended(self) -> int | None:
        """Return the exit code once there are none where ranks were to run, and none are to come; None before."""
        codes = [step.ended() for step in self._steps]  # all: each is tried again when it is asked
        return codes[0]

    def failed(self) -> Failed:
        """Return why there are none; before, what the ranks' standard error hints at."""
        found = [step.failed() for step in self._steps]
        return replace(found[0], hints=frozenset[Clue]().union(*(one.hints for one in found)))

    def abandon(self) -> None:
        """Let go of them without a word to Slurm."""
        for step in self._steps:
            step.abandon()

    def stop(self, leave_s: float = 0.0) -> None:
        """End those that have not left within so long; returns in bounded time."""
        enders = [threading.Thread(target=step.stop, args=(leave_s,), daemon=True) for step in self._steps]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()


# Srun's standard error, which is the ranks', too, is passed through, and read.

_OWN = re.compile(rb"srun: (?:(?:error|fatal): |(?=(?:unrecognized |invalid )?option ))(?P<why>.*)")
_LAUNCH = re.compile(rb"srun: error: Task launch for \S+ failed on node (?P<node>\S+?):? ")
_KILLED = re.compile(rb"^srun: error: (?P<nodes>\S+): tasks? [\d,-]+: (?!Exited with )", re.MULTILINE)
_LONGEST_LINE = 64 << 10
FINISH_WAIT_S = 2.0
# What was said longer before the end has nothing to do with it: a batch too large that was made smaller, say.
HINT_S = 30.0


class FailureWatcher:
    """Copies `source` to standard error from a thread until it ends, and closes it."""

    def __init__(self, source: IO[bytes], clock: Clock | None = None) -> None:
        # Each is empty while nothing is known: where srun could start nothing; why it may later; why not.
        self.node = self.unstarted = self._own = ""
        self._source, self._clock = source, clock or SystemClock()
        self._hints: dict[Clue, float] = {}
        self._rest = b""
        self._thread = threading.Thread(target=self._copy, name="deeplink-stderr", daemon=True)
        self._thread.start()

    def failed(self, code: int | None = None) -> Failed:
        """Return why an srun that exited so did; before, what is known by now."""
        if code is not None:
            why = f": {self._own}" if self._own else ""
            return Failed(said=f"srun itself exited {code}{why}", node=self._one_node(), is_of_rank=False)
        now = self._clock.monotonic()
        return Failed(hints=frozenset(hint for hint, at in self._hints.copy().items() if now - at < HINT_S))

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
        for line in lines:
            if line.startswith(b"srun: error: Unable to "):
                self.unstarted = self.unstarted or unstarted_step(_text(line))
            self._note_own(line)

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
