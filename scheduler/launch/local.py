"""This machine as an allocation: N nodes as process groups, for machines where no Slurm can be had.

Each node has its own agent and its own store folder. There is no fabric, and nobody to ask for another machine.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import queue
import shutil
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.private import private_folder
from deeplink.scheduler.launch.backend import AgentStep, Backend, RankStep
from deeplink.scheduler.launch.environment import LAUNCH_VARIABLE, Launch, NodeFacts
from deeplink.scheduler.launch.failure import Failed
from deeplink.scheduler.launch.process import drained, end_process, last_line, leave_host_file, python_command
from deeplink.scheduler.launch.shape import Granted
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.topology.graph import Fabric
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path
    from signal import Signals

    from deeplink.scheduler.launch.job_status import JobStatus
    from deeplink.types import Attempt

log = logging.getLogger(__name__)

MPIEXEC = "mpiexec"


class MpiMissingError(DeepLinkError):
    """A recipe needs MPI's launcher, and it is not there."""

    exit_code = 127

    def __init__(self) -> None:
        super().__init__(
            f"{MPIEXEC} is not on PATH",
            remedy="Install an MPI (Debian: mpich; pip: mpich). Inside a Slurm job srun starts the ranks without.",
        )


@dataclass(frozen=True, slots=True)
class LocalBackend(Backend):
    """`count` nodes named local0, local1, ... on this machine.

    Args:
        store: folder below which each node has its own store.
        folder: the job's state folder.
    """

    job: int
    user: str
    nodes: tuple[NodeName, ...]
    env: Mapping[str, str]
    store: Path
    folder: Path
    here: NodeName | None = None
    restart: int = 0
    job_name: str = "local"
    name: str = "local"
    granted: Granted = field(default_factory=Granted)
    can_requeue: bool = False

    @classmethod
    def on_this_machine(cls, count: int, env: Mapping[str, str], store: Path, state: Path) -> LocalBackend:
        """Return `count` nodes. The job's id is the time in milliseconds, so that a later run is a later job."""
        job = time.time_ns() // 1_000_000
        nodes = tuple(NodeName(f"local{number}") for number in range(count))
        return cls(job, getpass.getuser(), nodes, env, store, state / "jobs" / str(job))

    @override
    def start_agents(self, secret: str, again: Mapping[NodeName, NodeFacts] | None = None) -> AgentStep:
        return LocalAgents(self, secret, tuple(again or self.nodes))

    @override
    def rank_command(self, launch: Launch, command: Sequence[str]) -> list[str]:
        if launch.recipe.mpi:
            return _with_mpi(launch, command)
        return python_command("deeplink.scheduler.launch.rank", "--", *command)

    @override
    def start_ranks(self, launch: Launch, command: Sequence[str]) -> RankStep:
        if launch.recipe.mpi and shutil.which(MPIEXEC, path=self.env.get("PATH")) is None:
            raise MpiMissingError
        leave_host_file(launch)
        return LocalRanks(launch, command, self.env)

    @override
    def port_for(self, attempt: Attempt) -> int:
        with socket.socket() as asker:
            asker.bind(("127.0.0.1", 0))
            return int(asker.getsockname()[1])

    @override
    def fabric(self) -> Fabric:
        return Fabric({})

    @override
    def requeue_if_down(self, nodes: Collection[NodeName]) -> bool:
        return False

    @override
    def standing(self) -> JobStatus | None:
        return None

    @override
    def requeue(self, lost: Collection[NodeName]) -> bool:
        return False

    @override
    def hold(self, because: str, lost: Collection[NodeName]) -> bool:
        return False

    @override
    def unheard(self, nodes: Collection[NodeName]) -> Mapping[NodeName, bool]:
        return {}  # without its agent there is no node

    @override
    def ended_whole(self) -> None:
        """Nothing is left behind here."""


def _with_mpi(launch: Launch, command: Sequence[str]) -> list[str]:
    return [
        MPIEXEC,
        "-n",
        str(launch.processes),
        *python_command("deeplink.scheduler.launch.rank", "--mpi", "--", *command),
    ]


class LocalAgents(AgentStep):
    """One agent process per node."""

    starter = "Python"
    doubt = "Is this machine overloaded, or short of memory?"

    def __init__(self, backend: LocalBackend, secret: str, nodes: Sequence[NodeName]) -> None:
        self._said: queue.Queue[NodeFacts] = queue.Queue(maxsize=len(nodes))
        self._processes = []
        self._logfile = backend.folder / "agents.log"
        with self._logfile.open("ab") as errors:
            self._log_start = errors.tell()
            for node in nodes:
                store = backend.store / node
                private_folder(store)
                agent = ["node", "--job", "--bind", "127.0.0.1:0", "--name", node, "--store", str(store)]
                self._processes.append(
                    processes.spawn(
                        python_command("deeplink", *agent),
                        env=backend.env,
                        stdin=processes.PIPE,
                        stdout=processes.PIPE,
                        stderr=errors,
                    )
                )
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), name="deeplink-announcement", daemon=True).start()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f"{secret}\n".encode())
                    process.stdin.flush()

    def _read(self, process: processes.Process[bytes]) -> None:
        for line in process.stdout or ():
            try:
                self._said.put_nowait(NodeFacts.announced(line))
            except (ValueError, TypeError, queue.Full):
                log.warning("not an announcement: %.200r", line)

    @override
    def announced(self) -> list[NodeFacts]:
        return drained(self._said)

    @override
    def ended(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        return None if None in codes else max(code or 0 for code in codes)

    @override
    def last_words(self) -> str:
        return last_line(self._logfile, self._log_start)

    @override
    def abandon(self) -> None:
        self.stop()

    @override
    def stop(self) -> None:
        _end_all(self._processes)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _end_all(running: Sequence[processes.Process[bytes]]) -> None:
    enders = [threading.Thread(target=end_process, args=(process,), daemon=True) for process in running]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


class LocalRanks(RankStep):
    """One process per rank; the first that fails ends the others, as srun's --kill-on-bad-exit does."""

    def __init__(self, launch: Launch, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._code = 0
        self._said = ""
        self._node: NodeName | None = None
        self._launch = launch
        self._has_mpi = launch.recipe.mpi
        self._ranks: dict[int, processes.Process[bytes]] = {}
        packed = {**env, LAUNCH_VARIABLE: launch.packed()}
        if launch.recipe.mpi:
            self._ranks[0] = processes.spawn(_with_mpi(launch, command), env=packed)
            return
        for rank in range(launch.processes):
            group, local_rank = launch.place(rank)
            task = ["--task", str(rank), str(local_rank), launch.nodes[group].node]
            argv = python_command("deeplink.scheduler.launch.rank", *task, "--", *command)
            self._ranks[rank] = processes.spawn(argv, env=packed)

    @override
    def exit_code(self) -> int | None:
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        failed = [(rank, code) for rank, code in codes.items() if code]
        if failed and not self._code:
            rank, code = failed[0]
            self._code = 128 - code if code < 0 else code
            if not self._has_mpi:
                self._node = self._launch.nodes[self._launch.place(rank)[0]].name
            who = f"rank {rank} on {self._node}" if self._node else MPIEXEC
            self._said = f"{who}: exit code {self._code}"
            _end_all(list(self._ranks.values()))
        return None if None in codes.values() and not self._code else self._code

    @override
    def failed(self) -> Failed:
        return Failed(said=self._said, node=self._node)

    @override
    def send(self, number: Signals) -> None:
        for process in self._ranks.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    @override
    def abandon(self) -> None:
        self.kill()

    @override
    def kill(self) -> None:
        _end_all(list(self._ranks.values()))
