"""Waits on a node, and runs ranks of one attempt after the other.

`python -m deeplink.scheduler.launch.slot [NODE NUMBER | --mpi] -- COMMAND...`: a task of a step of Slurm's, with
all that Slurm gives a rank: its CPUs and GPUs, its memory, its output. Without Slurm its words say where it is, or
mpiexec does. What it is to run it hears from the agent of its node (`rank_slots`). It is parent and subreaper of
all that its rank starts, so it knows how the rank ended, and ends what is left of it before it says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deeplink.core.clock import SystemClock, wait_until
from deeplink.core.descriptors import try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.prctl import become_subreaper, die_with
from deeplink.rpc.tokens import token_file_of
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.container import entering
from deeplink.scheduler.launch.environment import (
    LAUNCH_VARIABLE,
    SLOTS_VARIABLE,
    Launch,
    RankTask,
    left_launch,
    left_slots,
    members_variable,
    mpi_task,
    not_launched,
    rank_environment,
    slurm_variables,
)
from deeplink.scheduler.launch.preloaded import LOADS_S, NOTHING, PreloadedProcess, PythonCommand, predicted
from deeplink.scheduler.launch.rank_output import OutputRelay, kept_folder
from deeplink.scheduler.node.rank_processes import (
    SLOT_TAG,
    ProcessTable,
    SlotReport,
    agents_socket,
    descendants,
    tagged,
)
from deeplink.scheduler.node.reading import group_oom_kills

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.scheduler.launch.environment import SlotPlace

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells have them
AGENT_S = 60.0  # without its agent for so long a slot ends its rank, and itself: nobody would hear of either
CONNECT_AGAIN_S = 0.1
KILL_AGAIN_S = 0.05  # what is started while others are killed is killed the next time
UNKILLABLE_S = 10.0  # what is left so long after KILL hangs in the kernel; whose turn is next waits for its lock
END_GRACE_S = 0.5
PRELOAD_AFTER_S = 10.0  # beside a rank: its own imports come first
PREDECESSOR_WAIT_S = 30.0  # how long a rank waits for the one it replaces to be gone; Slurm kills it long before
# Slurm sends a step's signals to all of its processes: the rank has them from there, and a slot outlives it.
_OUTLIVED = frozenset(signal.valid_signals()) - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}
_OF_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})  # it ignores them: so would the rank, which is no Python
# What is of the step of slots alone; an srun within a rank would take it for its own.
_OF_SLOTS = (SLOTS_VARIABLE, "SLURM_HOSTFILE", "SLURM_DISTRIBUTION")
_PRELOADED = b"\0"  # what the child says that has let the preloaded process become the rank
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class RankSlot:
    """One slot, in one thread: from its fork on a rank has nothing of a slot's."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        place: SlotPlace,
        said: SlotReport,
        keep_output: Callable[[], object],
    ) -> None:
        self._keep_output = keep_output
        self._command, self._env, self._place, self._said = tuple(command), env, place, said
        self._table, self._here = ProcessTable(), place.here
        self._agent: socket.socket | None = None
        self._rest = b""
        self._connect_at = self._heard = time.monotonic()
        self._kill_at: float | None = None  # the rank is to end; when it is killed
        self._next: dict[str, Any] | None = None  # the rank to run after it
        self._leaves = False
        self._oom_kills = 0
        self._dispositions: dict[int, Any] = {}
        self._told: int | None = None  # where the process that is to become the rank says what came of it
        self._python: PythonCommand | None = None
        self._preloaded: PreloadedProcess | None = None
        self._candidate: PreloadedProcess | None = None  # that may become this very rank
        self._launch, self._preload_at = place.resting, math.inf
        # Who is to have the terminal cannot wait beside another.
        if place.preload is not None and not os.isatty(0):
            self._python = PythonCommand.of(command, env.get("PATH"))
            self._preload_at = self._heard if place.resting else math.inf

    def run(self) -> int:
        """Run ranks until there is to be no more; return the exit code."""
        woken, waking = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in _OUTLIVED:
            self._dispositions[number] = signal.signal(number, self._note)
        while True:
            self._connect()
            self._reap()
            self._advance()
            if self._leaves and not self._said.is_running:
                self._drop_preloaded()
                return 0
            self._preload()
            self._wait(woken)

    def _note(self, number: int, _frame: object) -> None:
        self._leaves = self._leaves or number in _ENDING

    def _wait(self, woken: int) -> None:
        wait_s = CONNECT_AGAIN_S if self._agent is None else AGENT_S
        if self._kill_at is not None:
            wait_s = KILL_AGAIN_S
        wait_s = min(wait_s, max(0.0, self._preload_at - time.monotonic()))
        watched: list[int | socket.socket] = [woken, *filter(None, (self._agent,))]
        if self._preloaded is not None:
            watched.append(self._preloaded.control)
            wait_s = wait_s if self._preloaded.is_ready else min(wait_s, max(0.0, self._preloaded.left_s))
        ready, _, _ = select.select(watched, [], [], wait_s)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 12)
        if self._agent is not None and self._agent in ready:
            self._listen(self._agent)

    # The agent.

    def _connect(self) -> None:
        now = time.monotonic()
        if self._agent is not None or now < self._connect_at:
            return
        self._connect_at = now + CONNECT_AGAIN_S
        agent = socket.socket(socket.AF_UNIX)
        try:
            with agents_socket(self._place.folder) as path:
                agent.connect(path)
        except OSError:
            agent.close()
            if now - self._heard > AGENT_S:
                self._leave()
            return
        self._agent, self._heard, self._rest = agent, now, b""
        self._say()

    def _say(self, **changes: Any) -> None:
        self._said = replace(self._said, **changes)
        if self._agent is not None:
            try:
                self._agent.sendall(json.dumps(asdict(self._said)).encode() + b"\n")
            except OSError:
                self._lose(self._agent)

    def _lose(self, agent: socket.socket) -> None:
        agent.close()
        self._agent, self._heard = None, time.monotonic()

    def _listen(self, agent: socket.socket) -> None:
        try:
            read = agent.recv(1 << 16)
        except OSError:
            read = b""
        if not read:
            self._lose(agent)
            return
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        if "keep" in order:
            self._keep_output()
        elif "leave" in order:
            self._leave()
        elif "end" in order:
            self._end(order["end"])
        elif "signal" in order:
            self._signal(order["signal"])
        elif order["attempt"] != self._said.attempt:
            self._next = order
            self._end(END_GRACE_S)

    def _leave(self) -> None:
        self._leaves, self._next = True, None
        self._end(END_GRACE_S)

    # The rank.

    def _start(self, order: dict[str, Any]) -> None:
        tag = f"{order['attempt']}:{self._said.pid}"
        self._oom_kills = group_oom_kills() or 0
        if self._preloaded is not None and not self._preloaded.is_ready:
            self._drop_preloaded()  # it would load beside what the rank loads
        self._candidate, self._preloaded = self._preloaded, None
        begun = {
            "preloaded": False,
            "attempt": order["attempt"],
            "rank": order["rank"],
            "tag": tag,
            "out_of_memory": False,
        }
        self._kill_at = None
        signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
        try:
            self._told, telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            pid = os.fork()
        except OSError as problem:  # no process, no memory
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
            why = f"no process for it on {self._here}: {problem.strerror}"
            self._say(**begun, rank_pid=0, code=1, exited=time.monotonic(), ended=True, unstarted=why)
            return
        if not pid:
            self._become(order, tag, telling)
        os.close(telling)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
        self._say(**begun, rank_pid=pid, code=None, exited=0.0, ended=False, unstarted="")
        if self._python is not None:
            self._launch, self._preload_at = order["launch"], time.monotonic() + PRELOAD_AFTER_S

    def _become(self, order: dict[str, Any], tag: str, telling: int) -> NoReturn:
        """Turn this child, or what has been preloaded, into the rank."""
        code, why = 1, ""
        try:
            self._be_no_slot()
            env = {**self._own(order["launch"]), SLOT_TAG: tag}
            launch = left_launch(env)
            task = RankTask(order["rank"], self._said.slot, self._here)
            slurm = slurm_variables(launch, task, self._place.of_job)
            program = program_of(self._command, launch, task, {**env, **slurm})
            if self._candidate is not None:
                unlike = self._candidate.hand_over(program.command, program.env, program.locks)
                if not unlike:
                    os.write(telling, _PRELOADED)
                    os._exit(0)
                sys.stderr.write(
                    f"deeplink rank: rank {task.rank} starts without its preloaded imports: {unlike}\n"
                )
                sys.stderr.flush()
            program.start()
        except DeepLinkError as problem:
            sys.stderr.write(f"deeplink rank: {problem}\n  {problem.remedy}\n")
            code, why = problem.exit_code, str(problem)
        except Exception as problem:  # noqa: BLE001 - whatever it is, nobody else would tell
            sys.stderr.write(f"deeplink rank: rank {order['rank']} could not be started on {self._here}:\n")
            traceback.print_exc()
            why = repr(problem)
        finally:
            os.write(telling, why.encode(errors="replace")[:1000])
            sys.stderr.flush()
            os._exit(code)

    def _be_no_slot(self) -> None:
        """Be, in a child, what srun would have started."""
        die_with(self._said.pid)
        if self._place.of_job:  # else who started the slot ends the rank by its group
            _lead_a_group()
        signal.set_wakeup_fd(-1)
        for number, before in self._dispositions.items():
            signal.signal(number, signal.SIG_DFL if number in _OF_PYTHON else before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)

    def _own(self, launch: str) -> dict[str, str]:
        return {
            **{name: value for name, value in self._env.items() if name not in _OF_SLOTS},
            LAUNCH_VARIABLE: launch,
        }

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid == self._said.rank_pid and self._said.code is None:
                    self._has_exited(os.waitstatus_to_exitcode(status))
                elif self._candidate is not None and pid == self._candidate.pid:
                    self._candidate.status = status

    def _has_exited(self, code: int) -> None:
        told = b""
        if self._told is not None:
            with contextlib.suppress(BlockingIOError):
                told = os.read(self._told, 1 << 12)
            os.close(self._told)
            self._told = None
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.control.close()
            if told == _PRELOADED:
                self._say(rank_pid=candidate.pid)
                if candidate.status is None:
                    return
                code, told = os.waitstatus_to_exitcode(candidate.status), b""
        self._say(
            code=128 - code if code < 0 else code,
            exited=time.monotonic(),
            ended=not self._left(),
            out_of_memory=(group_oom_kills() or 0) > self._oom_kills,
            unstarted=told.decode(errors="replace"),
        )

    def _left(self) -> set[int]:
        """Return what the rank started and is still there, the rank, too."""
        waiting = 0 if self._preloaded is None else self._preloaded.pid
        return descendants(self._table, os.getpid(), waiting) | tagged(self._table, self._said.tag)

    # What is preloaded.

    def _preload(self) -> None:
        """Start it when it is time, hear what it says, end it where it takes too long."""
        now, one = time.monotonic(), self._preloaded
        if one is not None:
            one.listen()
            if one.is_ready and not self._said.preloaded:
                self._say(preloaded=True)
            if not (one.failed or one.is_ready) and one.left_s <= 0:
                one.failed = f"not done after {LOADS_S:.0f} s"
            if one.failed:
                self._drop_preloaded()
                if one.failed != NOTHING and not self._leaves:  # else Slurm ends all that is here
                    sys.stderr.write(
                        f"deeplink slot: preloading on {self._here}: {one.failed}; ranks start without\n"
                    )
        if now < self._preload_at or self._leaves or self._python is None:
            return
        self._preload_at = math.inf
        if self._preloaded is not None:
            return
        given = self._own(self._launch)

        def env() -> dict[str, str]:
            return predicted(left_launch(given), self._said.slot, self._place, given)

        signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
        try:
            modules = self._place.preload or ()
            self._preloaded = PreloadedProcess(self._command, self._python, modules, env, self._be_no_slot)
        except OSError as problem:
            sys.stderr.write(f"deeplink slot: preloading on {self._here}: {problem}; ranks start without\n")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)

    def _drop_preloaded(self) -> None:
        if self._preloaded is not None:
            self._preloaded.end()
            self._preloaded = None
            self._say(preloaded=False)

    def _signal(self, number: int) -> None:
        for pid in self._left() if self._said.is_running else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _end(self, grace_s: float) -> None:
        if self._said.is_running:
            kill_at = time.monotonic() + grace_s
            if self._kill_at is None:
                self._signal(signal.SIGTERM)
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _advance(self) -> None:
        """Carry on with what has begun: the end of a rank, then the start of the next."""
        now = time.monotonic()
        if self._kill_at is not None and self._said.is_running:
            self._reap()
            if self._said.code is not None and (not self._left() or now > self._kill_at + UNKILLABLE_S):
                self._say(ended=True)
            elif now >= self._kill_at:
                self._signal(signal.SIGKILL)
        if not self._said.is_running:
            self._kill_at = None
            if self._next is not None:
                order, self._next = self._next, None
                self._start(order)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What a rank's process is to become."""

    command: tuple[str, ...]
    env: dict[str, str]
    locks: tuple[int, ...]  # what it holds to its end, open

    def start(self) -> NoReturn:
        """Become it. Raises LaunchError."""
        try:
            os.execvpe(self.command[0], [*self.command], self.env)  # noqa: S606 - the user's own, a list
        except FileNotFoundError as problem:
            raise self._unstarted("no such command", NOT_FOUND) from problem
        except OSError as problem:
            # Of the command, as a shell has it; or of the node, which has no memory, say, or no such storage.
            code = NOT_EXECUTABLE if problem.errno in {errno.EACCES, errno.ENOEXEC, errno.ENOTDIR} else 1
            raise self._unstarted(problem.strerror or str(problem), code) from problem

    def _unstarted(self, why: str, code: int) -> LaunchError:
        remedy = "Every node must have it, on PATH or where it is named, and room to start it."
        return LaunchError(f"{self.command[0]}: {why} on {self.env['DEEPLINK_NODE']}", remedy, exit_code=code)


def program_of(command: Sequence[str], launch: Launch, task: RankTask, given: Mapping[str, str]) -> RankProgram:
    """Return what this process is to become as a rank; waits for its predecessor's end. Raises DeepLinkError."""
    env = rank_environment(launch, task, given)
    env["DEEPLINK_MEMBERS"] = members_variable(given)
    env["DEEPLINK_TOKEN_FILE"] = str(token_file_of(Path(env["DEEPLINK_TOKEN_FILE"]), launch.attempt))
    if launch.container is not None and not launch.container.is_entered_by_srun:
        command = entering(launch.container, command, env, here=str(Path.cwd()), exists=os.path.exists)
    locks = _outwait_predecessor(Path(env["DEEPLINK_TOKEN_FILE"]).parent, env["LOCAL_RANK"])
    return RankProgram(tuple(command), env, locks)


def _outwait_predecessor(folder: Path, local_rank: str) -> tuple[int, ...]:
    # The attempt before may still be dying here, with its GPU memory and its ports. Its ranks hold this lock until
    # the last of their processes is gone; the kernel lets go of it for them.
    try:
        held = os.open(folder / f"rank-{local_rank}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return ()  # no agent's folder, no predecessor to know of
    os.set_inheritable(held, True)  # noqa: FBT003 - its only form
    if not wait_until(lambda: try_lock(held), SystemClock(), PREDECESSOR_WAIT_S):
        sys.stderr.write(f"deeplink rank: an earlier rank still runs here after {PREDECESSOR_WAIT_S:g} s\n")
    return (held,)


def _lead_a_group() -> None:
    """Be a process group of one's own, as Slurm's tasks are, and that of the terminal where there is one."""
    os.setpgid(0, 0)
    if os.isatty(0):
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # not the one that controls us
            os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, before)


def _arguments(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, int, Sequence[str]]:
    """Return this slot's node, its number there, and the command of its ranks."""
    dashes = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:dashes], argv[dashes + 1 :]
    if not command:
        raise not_launched("no command is given")
    if words == ["--mpi"]:
        task = mpi_task(left_launch(env), env)
        return task.node, task.local_rank, command
    if words:
        node, number = words
        return node, int(number), command
    return env.get("SLURMD_NODENAME", ""), int(env.get("SLURM_LOCALID", "0")), command


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Be a slot to its end; returns the exit code."""
    try:
        here, number, command = _arguments(argv, env)
        place = left_slots(env, here)
        step_id = int(env.get("SLURM_STEP_ID", "-1"))
        said = SlotReport(step=place.step, slot=number, pid=os.getpid(), step_id=step_id)
    except DeepLinkError as problem:
        sys.stderr.write(f"deeplink slot: {problem}\n  {problem.remedy}\n")
        return problem.exit_code
    become_subreaper()
    # Only srun goes away while ranks run, and only its pipe is this slot's alone.
    relayed = (1, 2) if place.of_job else ()
    relay = OutputRelay(kept_folder(Path(env[SLOTS_VARIABLE]).parent, place.run), here, relayed)
    try:
        return RankSlot(command, env, place, said, relay.keep).run()
    finally:
        relay.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
