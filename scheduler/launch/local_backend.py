"""This machine as an allocation: N nodes as process groups, for machines where no Slurm can be had.

Each node has its own agent and its own store folder. There is no fabric, and nobody to ask for another machine.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.private import private_folder
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.backend import AgentStep, Backend, LaunchError, RankStep, ports_for
from deeplink.scheduler.launch.environment import LAUNCH_VARIABLE, Launch, NodeFacts, leave_launch
from deeplink.scheduler.launch.launch_spec import Granted
from deeplink.scheduler.launch.process import AgentProcesses, end_all, python_command
from deeplink.scheduler.recovery.rank_failure import Failed
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.topology.graph import Fabric

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path
    from signal import Signals

    from deeplink.core.types import Attempt
    from deeplink.scheduler.launch.backend import Reach

MPIEXEC = "mpiexec"


@dataclass(frozen=True, slots=True)
class LocalBackend(Backend):
    """`count` nodes named local0, local1, ... on this machine."""

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
        return _rank_command(launch, 0, command)

    @override
    def adopt_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep | None:
        return None

    @override
    def start_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep:
        if launch.recipe.mpi and shutil.which(MPIEXEC, path=self.env.get("PATH")) is None:
            remedy = (
                "Install an MPI (Debian: mpich; pip: mpich). Inside a Slurm job srun starts the ranks without."
            )
            raise LaunchError(f"{MPIEXEC} is not on PATH", remedy, exit_code=127)
        env = {**self.env, LAUNCH_VARIABLE: leave_launch(launch, self.folder)}
        return LocalRanks(launch, command, env)

    @override
    def end_slots(self) -> None:
        """There are none: ranks are processes of ours."""

    @override
    def port_for(self, attempt: Attempt) -> int:
        for port in ports_for(attempt):
            with socket.socket() as asker, contextlib.suppress(OSError):
                asker.bind(("", port))
                return port
        raise LaunchError("no port is free for rank 0 to listen on", "What else listens? `ss -ltn` tells.")

    @override
    def fabric(self) -> Fabric:
        return Fabric({})

    @override
    def requeue_if_down(self, nodes: Collection[NodeName]) -> bool:
        return False

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


def _rank_command(launch: Launch, rank: int, command: Sequence[str]) -> list[str]:
    group, local_rank = launch.place(rank)
    task = ["--task", str(rank), str(local_rank), launch.nodes[group].node]
    return python_command("deeplink.scheduler.launch.rank", *task, "--", *command)


def _with_mpi(launch: Launch, command: Sequence[str]) -> list[str]:
    starter = python_command("deeplink.scheduler.launch.rank", "--mpi", "--", *command)
    return [MPIEXEC, "-n", str(launch.processes), *starter]


class LocalAgents(AgentProcesses):
    """One agent process per node."""

    starter = "Python"
    doubt = "Is this machine overloaded, or short of memory?"

    def __init__(self, backend: LocalBackend, secret: str, nodes: Sequence[NodeName]) -> None:
        commands = []
        for node in nodes:
            store = backend.store / node
            private_folder(store)
            where = ["--bind", "127.0.0.1:0", "--name", node, "--store", str(store)]
            commands.append(python_command("deeplink", "node", "--job", *where))
        logfile = backend.folder / "agents.log"
        super().__init__(commands, backend.env, secret=secret, logfile=logfile)

    @override
    def abandon(self) -> None:
        self.stop()


class LocalRanks(RankStep):
    """One process per rank; the first that fails ends the others, as srun's --kill-on-bad-exit does."""

    def __init__(self, launch: Launch, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._launch, self._code = launch, 0
        self._failed = Failed()
        self._ranks: dict[int, processes.Process[bytes]] = {}
        if launch.recipe.mpi:
            self._ranks[0] = processes.spawn(_with_mpi(launch, command), env=env)
            return
        for rank in range(launch.processes):
            self._ranks[rank] = processes.spawn(_rank_command(launch, rank, command), env=env)

    @override
    def exit_code(self) -> int | None:
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        failed = next(((rank, code) for rank, code in codes.items() if code), None)
        if failed is not None and not self._code:
            rank, code = failed
            self._code = 128 - code if code < 0 else code
            node = None if self._launch.recipe.mpi else self._launch.nodes[self._launch.place(rank)[0]].name
            who = f"rank {rank} on {node}" if node else MPIEXEC
            self._failed = Failed(said=f"{who}: exit code {self._code}", node=node)
            end_all(self._ranks.values())
        return None if None in codes.values() and not self._code else self._code

    @override
    def failed(self) -> Failed:
        return self._failed

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
        end_all(self._ranks.values())
