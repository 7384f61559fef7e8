"""What a job that submits another one leaves behind in that one's environment; pure.

sbatch hands its environment on, and of these Slurm sets only what the new job itself asks for: the rest is the
outer job's (measured with 22.05.8). None of them is an input of sbatch's: those begin with SBATCH_.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.command import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.scheduler.slurm.client import Allocation
    from deeplink.scheduler.slurm.command import Process

_FIRST_SPECIAL = 0xFFFF_FFF0
"""Step numbers from here on are those of the batch script, of salloc's shell and the like (slurm.h)."""
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
_OF_GPUS = {
    "SLURM_GPUS": "Job",
    "SLURM_GPUS_PER_NODE": "Node",
    "SLURM_GPUS_PER_SOCKET": "Socket",
    "SLURM_GPUS_PER_TASK": "Task",
}
LEFT_BEHIND = frozenset(
    (
        "SLURM_RESTART_COUNT",
        *_TASKS,
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_PER_GPU",
        *_OF_GPUS,
        "SLURM_TRES_PER_TASK",
        "SLURM_GPU_BIND",
        "SLURM_TRES_BIND",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_DISTRIBUTION",
        "SLURM_OVERCOMMIT",
        "SLURM_THREADS_PER_CORE",
    )
)
FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CHUNK = 1 << 16


def is_in_step(env: Mapping[str, str]) -> bool:
    """Whether the process belongs to a step that srun made.

    From 26.05 on batch scripts have a step's number, too: -5.

    >>> [is_in_step({"SLURM_STEP_ID": number}) for number in ("0", "7", "-5", "4294967290")], is_in_step({})
    ([True, True, False, False], False)
    """
    number = env.get("SLURM_STEP_ID", "")
    return number.isascii() and number.isdigit() and int(number[:20]) < _FIRST_SPECIAL


def without_outer(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit a job with: inside of a job, without what that one would leave behind."""
    return {name: value for name, value in env.items() if name not in LEFT_BEHIND or "SLURM_JOB_ID" not in env}


def not_contradicted(env: Mapping[str, str], told: Allocation, nodes: int) -> dict[str, str]:
    """Return a job's environment without what Slurm's record of the job contradicts.

    What the record cannot tell from the job's own stays: one task of an outer job and one node, say.
    """
    if is_in_step(env):
        return dict(env)
    tasks = _number(env, "SLURM_NTASKS")
    # With --ntasks-per-node it tells the most there may be. And of nodes that were lost their tasks are gone.
    fitting = {told.tasks, *range(nodes, nodes * told.tasks_per_node + 1)}
    stale = {name for name, kind in _OF_GPUS.items() if kind not in told.gpus_asked}
    if not told.restarts:  # Slurm sets any other count itself
        stale.add("SLURM_RESTART_COUNT")
    if told.tasks and told.nodes == nodes and tasks not in fitting:
        stale |= {*_TASKS}
    if told.cpus_per_task not in {0, _number(env, "SLURM_CPUS_PER_TASK")}:
        stale.add("SLURM_CPUS_PER_TASK")
    if told.tasks_per_node != _number(env, "SLURM_NTASKS_PER_NODE"):
        stale.add("SLURM_NTASKS_PER_NODE")
    return {name: value for name, value in env.items() if name not in stale}


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def run_passing_on(argv: Sequence[str], *, env: Mapping[str, str], write: Callable[[bytes], None]) -> int:
    """Run a command to its end and return its exit code, or minus the signal that ended it.

    Standard input and error are ours. It ends when the command ends, whenever that is: `sbatch --wait` waits for a
    job. Must be called from the main thread.
    """
    with _forwarding() as started:
        ours, theirs = _channel()
        try:
            try:
                process = spawn(argv, env=env, stdin=None, stdout=theirs, new_session=False)
            finally:
                os.close(theirs)
            started(process)
            while data := _read(ours):
                write(data)
        finally:
            os.close(ours)
        return process.wait()


def _channel() -> tuple[int, int]:
    """Return both ends of a terminal: into a pipe a program writes only when it ends, or has written much.

    Where there are no terminals to be had (a container without devpts) it is a pipe all the same.
    """
    try:
        ours, theirs = os.openpty()
    except OSError:
        return os.pipe()
    plain = termios.tcgetattr(theirs)
    plain[1] &= ~termios.OPOST  # a newline stays a newline
    termios.tcsetattr(theirs, termios.TCSANOW, plain)
    return ours, theirs


def _read(reading: int) -> bytes:
    try:
        return os.read(reading, _CHUNK)
    except OSError:  # how a terminal says that no one holds its other end
        return b""


@contextlib.contextmanager
def _forwarding() -> Iterator[Callable[[Process[bytes]], None]]:
    """Pass signals on to the process that is handed to what this gives; those that came before, then."""
    waiting: list[int] = []
    running: list[Process[bytes]] = []

    def note(number: int, _frame: object) -> None:
        if running:
            running[0].send_signal(number)
        else:
            waiting.append(number)

    def started(process: Process[bytes]) -> None:
        running.append(process)
        for number in waiting:
            process.send_signal(number)

    # What our caller ignores (nohup, a shell's background job) we and the command go on ignoring.
    caught = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_as(code: int) -> int:
    """Return the exit code to end with; where a signal ended the command, end by the same one."""
    if code >= 0:
        return code
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code
