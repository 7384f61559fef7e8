"""Agents and ranks as srun steps of our own job."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.clock import SystemClock
from deeplink.errors import DeepLinkError
from deeplink.scheduler.launch.backend import AgentStep, RankStep
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.process import abandon_process, drained, end_process, last_line
from deeplink.scheduler.launch.relay import FailureWatcher
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.slurm.silence import TAKEN, is_unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.failure import Failed
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.job_address import JobAddress
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

_MOST_LOOKS, _LOOK_AGAIN_S = 20, 0.5
UNANSWERED_S, TRY_AGAIN_S = 600.0, 1.0
"""For how long an srun that slurmctld does not answer is tried again, and how long after its end."""
TAKEN_S = 60.0
"""For how long one that gets no memory is: the step before may have it still, or the job has too little."""


class SlurmAgents(AgentStep):
    """One srun step with an agent per node; the secret goes in by standard input, the announcements come out.

    Args:
        argv: the srun command.
        env: its environment.
        secret: what the agents are told.
        logfile: where they and srun log.
        count: how many agents there will be.
        gone: nodes that were left out.
    """

    starter = "srun"
    doubt = "Does `scontrol ping` answer, and what does `squeue --steps` say of the job?"

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        secret: str,
        logfile: Path,
        count: int,
        gone: frozenset[NodeName] = frozenset(),
    ) -> None:
        self.gone = gone
        self._said: queue.Queue[NodeFacts] = queue.Queue(maxsize=count)  # each says one line
        self._logfile = logfile
        with logfile.open("ab") as errors:
            self._log_start = errors.tell()
            self._process = processes.spawn(
                argv, env=env, stdin=processes.PIPE, stdout=processes.PIPE, stderr=errors
            )
        self._reader = threading.Thread(target=self._read, name="deeplink-announcements", daemon=True)
        self._reader.start()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # srun failed at once; `ended` will tell
                self._process.stdin.write(f"{secret}\n".encode())
                self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            try:
                self._said.put_nowait(NodeFacts.announced(line))
            except (ValueError, TypeError, queue.Full):
                log.warning("not an announcement: %.200r", line)

    @override
    def announced(self) -> list[NodeFacts]:
        return drained(self._said)

    @override
    def ended(self) -> int | None:
        return self._process.poll()

    @override
    def last_words(self) -> str:
        return last_line(self._logfile, self._log_start)

    @override
    def abandon(self) -> None:
        abandon_process(self._process)

    @override
    def stop(self) -> None:
        end_process(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step of the job we run in.

    Attributes:
        job: the job's raw id.
        address: how commands that change the job name it.
        name: the step's.
    """

    job: int
    address: JobAddress
    name: str


class SlurmRanks(RankStep):
    """The rank step: srun in the foreground of the job's output, its failures overheard.

    An srun that slurmctld did not answer has started no rank, and exits 1 as a script does. It is tried again, for
    `UNANSWERED_S`: ranks that nobody started have not failed. So is one that gets no memory, for `TAKEN_S`: the
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
        self._begin()

    def _begin(self) -> None:
        self._process = processes.spawn(self._argv, env=self._env, stderr=processes.PIPE)
        if self._process.stderr is None:
            raise AssertionError("a pipe was asked for")
        self._watcher = FailureWatcher(self._process.stderr)
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
        if self._watcher.unstarted != TAKEN:
            self._taken_since = None
            return False
        since = self._taken_since
        if since is None:
            self._taken_since = since = now
        return now - since >= TAKEN_S

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
        code = self._process.poll()
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
        return 128 - code if code < 0 else code

    @override
    def failed(self) -> Failed:
        code = self._process.poll()
        if code and not self._watcher.is_rank_named:
            return self._watcher.failed_itself(128 - code if code < 0 else code)
        return self._watcher.failed()

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
