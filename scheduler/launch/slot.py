"""A task of the step of slots: waits on its node, and runs ranks of one attempt after the other.

`python -m deeplink.scheduler.launch.slot -- COMMAND...`, started by srun with all that Slurm gives a rank: its
CPUs and GPUs, its memory, its output. What it is to run it hears from the agent of its node (`rank_slots`). It
is parent and subreaper of all that its rank starts, so it knows how the rank ended, and ends what is left of it
before it says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deeplink.core.errors import DeepLinkError
from deeplink.core.prctl import become_subreaper, die_with
from deeplink.scheduler.launch import rank
from deeplink.scheduler.launch.environment import (
    LAUNCH_VARIABLE,
    SLOTS_VARIABLE,
    RankTask,
    left_launch,
    left_slots,
    not_launched,
    slurm_variables,
)
from deeplink.scheduler.launch.rank_output import OutputRelay, kept_by
from deeplink.scheduler.node.rank_processes import SLOT_TAG, ProcessTable, descendants, tagged
from deeplink.scheduler.node.slot_report import SlotReport, agents_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.scheduler.launch.environment import SlotPlace

AGENT_S = 60.0  # without its agent for so long a slot ends its rank, and itself: nobody would hear of either
CONNECT_AGAIN_S = 0.1
KILL_AGAIN_S = 0.05  # what is started while others are killed is killed the next time
UNKILLABLE_S = 10.0  # what is left so long after KILL hangs in the kernel; whose turn is next waits for its lock
END_GRACE_S = 0.5
# Slurm sends a step's signals to all of its processes: the rank has them from there, and a slot outlives it.
_OUTLIVED = frozenset(signal.valid_signals()) - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}
_OF_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})  # it ignores them: so would the rank, which is no Python
# What is of the step of slots alone; an srun within a rank would take it for its own.
_OF_SLOTS = (SLOTS_VARIABLE, "SLURM_HOSTFILE", "SLURM_DISTRIBUTION")
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
        self._table, self._here = ProcessTable(), env.get("SLURMD_NODENAME", "")
        self._agent: socket.socket | None = None
        self._rest = b""
        self._connect_at = self._heard = time.monotonic()
        self._kill_at: float | None = None  # the rank is to end; when it is killed
        self._next: dict[str, Any] | None = None  # the rank to run after it
        self._leaves = False
        self._oom_kills = 0
        self._dispositions: dict[int, Any] = {}

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
                return 0
            self._wait(woken)

    def _note(self, number: int, _frame: object) -> None:
        self._leaves = self._leaves or number in _ENDING

    def _wait(self, woken: int) -> None:
        wait_s = CONNECT_AGAIN_S if self._agent is None else AGENT_S
        if self._kill_at is not None:
            wait_s = KILL_AGAIN_S
        watched: list[int | socket.socket] = [woken] if self._agent is None else [woken, self._agent]
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
        self._oom_kills = oom_kills()
        signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
        pid = os.fork()
        if not pid:
            self._become(order, tag)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
        self._kill_at = None
        self._say(
            attempt=order["attempt"],
            rank=order["rank"],
            rank_pid=pid,
            tag=tag,
            code=None,
            exited=0.0,
            ended=False,
            out_of_memory=False,
        )

    def _become(self, order: dict[str, Any], tag: str) -> NoReturn:
        """Turn this child into the rank."""
        code = 1
        try:
            die_with(self._said.pid)
            _lead_a_group()
            signal.set_wakeup_fd(-1)
            for number, before in self._dispositions.items():
                signal.signal(number, signal.SIG_DFL if number in _OF_PYTHON else before)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
            env = {**self._env, LAUNCH_VARIABLE: order["launch"], SLOT_TAG: tag}
            for name in _OF_SLOTS:
                env.pop(name, None)
            launch = left_launch(env)
            task = RankTask(order["rank"], self._said.slot, self._here)
            code = rank.become(
                self._command, launch, task, {**env, **slurm_variables(launch, task, self._place.of_job)}
            )
        except DeepLinkError as problem:
            sys.stderr.write(f"deeplink rank: {problem}\n  {problem.remedy}\n")
            code = problem.exit_code
        except Exception:  # noqa: BLE001 - whatever it is, nobody else would tell
            sys.stderr.write(f"deeplink rank: rank {order['rank']} could not be started on {self._here}:\n")
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid == self._said.rank_pid and self._said.code is None:
                    self._has_exited(os.waitstatus_to_exitcode(status))

    def _has_exited(self, code: int) -> None:
        self._say(
            code=128 - code if code < 0 else code,
            exited=time.monotonic(),
            ended=not self._left(),
            out_of_memory=oom_kills() > self._oom_kills,
        )

    def _left(self) -> set[int]:
        """Return what the rank started and is still there, the rank, too."""
        return descendants(self._table, os.getpid()) | tagged(self._table, self._said.tag)

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


def _lead_a_group() -> None:
    """Be a process group of one's own, as Slurm's tasks are, and that of the terminal where there is one."""
    os.setpgid(0, 0)
    if os.isatty(0):
        with contextlib.suppress(OSError):  # not the one that controls us
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpid())
            signal.signal(signal.SIGTTOU, before)


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this cgroup (v2) were killed for want of memory; 0 where nobody counts."""
    try:
        name = next(line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
        folder = root / name.lstrip("/")
        # Where the task's own group has no such file, the step's has the limit.
        events = next(found for one in (folder, *folder.parents) if (found := one / "memory.events").exists())
        counts = dict(line.split() for line in events.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, StopIteration, ValueError):
        return 0


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Be a slot to its end; returns the exit code."""
    try:
        if argv[:1] != ["--"] or len(argv) == 1:
            raise not_launched("no command is given")
        place = left_slots(env)
        said = SlotReport(
            step=place.step,
            slot=int(env.get("SLURM_LOCALID", "0")),
            pid=os.getpid(),
            step_id=int(env.get("SLURM_STEP_ID", "-1")),
        )
    except DeepLinkError as problem:
        sys.stderr.write(f"deeplink slot: {problem}\n  {problem.remedy}\n")
        return problem.exit_code
    become_subreaper()
    relay = OutputRelay(kept_by(Path(env[SLOTS_VARIABLE]).parent, env["SLURMD_NODENAME"]))
    try:
        return RankSlot(argv[1:], env, place, said, relay.keep).run()
    finally:
        relay.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
