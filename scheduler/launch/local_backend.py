"""This machine as an allocation: N nodes as process groups, for machines where no Slurm can be had.

Each node has its own agent and its own store folder. There is no fabric, and nobody to ask for another machine.
"""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.clock import SystemClock, wait_until
from deeplink.core.private import private_folder
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.agent_ranks import AgentRanks, Slots
from deeplink.scheduler.launch.backend import AgentStep, Backend, LaunchError, RankStep, ports_for
from deeplink.scheduler.launch.environment import (
    LAUNCH_VARIABLE,
    SLOTS_VARIABLE,
    Launch,
    NodeFacts,
    leave_launch,
    leave_slots,
)
from deeplink.scheduler.launch.launch_spec import Granted
from deeplink.scheduler.launch.process import LEAVE_S, AgentProcesses, end_all, python_command
from deeplink.scheduler.recovery.rank_failure import Failed
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.topology.graph import Fabric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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
    slots: list[LocalSlots] = field(default_factory=list)  # what waits for ranks to run
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
        return _slot_commands(launch, command)[0]

    @override
    def start_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep:
        if launch.recipe.mpi and shutil.which(MPIEXEC, path=self.env.get("PATH")) is None:
            remedy = (
                "Install an MPI (Debian: mpich; pip: mpich). Inside a Slurm job srun starts the ranks without."
            )
            raise LaunchError(f"{MPIEXEC} is not on PATH", remedy, exit_code=127)
        number, file = time.time_ns(), leave_launch(launch, self.folder)
        env = {**self.env, SLOTS_VARIABLE: leave_slots(self.folder, number, launch, ()), LAUNCH_VARIABLE: file}
        for one in self.slots:
            one.stop()  # also those of a lost node, with its ranks
        slots = LocalSlots(number, _slot_commands(launch, command), env)
        self.slots[:] = [slots]
        return AgentRanks(launch, file, reach, slots, make=lambda: slots, use=lambda _: None, are_new=True)

    @override
    def end_slots(self) -> None:
        for one in self.slots:
            one.stop(LEAVE_S)

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


def _slot_commands(launch: Launch, command: Sequence[str]) -> list[list[str]]:
    """Return what starts all slots of a launch; of MPI one program that does."""

    def slot(*words: str) -> list[str]:
        return python_command("deeplink.scheduler.launch.slot", *words, "--", *command)

    if launch.recipe.mpi:
        return [[MPIEXEC, "-n", str(launch.processes), *slot("--mpi")]]
    return [
        slot(facts.node, str(number))
        for facts, count in zip(launch.nodes, launch.started, strict=True)
        for number in range(count)
    ]


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


class LocalSlots(Slots):
    """One process per slot, or mpiexec; each leads the process group of what its ranks start."""

    def __init__(self, number: int, commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
        self.number = number
        self._processes = [processes.spawn(argv, env=env) for argv in commands]

    @override
    def ended(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        code = next(filter(None, codes), None if None in codes else 0)
        return code if code is None or code >= 0 else 128 - code  # of a signal, as a shell tells it

    @override
    def failed(self) -> Failed:
        code = self.ended()
        return Failed(said="" if code is None else f"what runs ranks exited {code}", is_of_rank=False)

    @override
    def abandon(self) -> None:
        self.stop()

    @override
    def stop(self, leave_s: float = 0.0) -> None:
        wait_until(lambda: all(one.poll() is not None for one in self._processes), SystemClock(), leave_s)
        end_all(self._processes)
