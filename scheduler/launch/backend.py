"""The interface of an allocation that supervision uses; `slurm_backend.py` and `local_backend.py` implement it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path
    from signal import Signals

    from grpc import Channel

    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.environment import Launch, NodeFacts
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.launch_spec import Granted, LaunchSpec
    from deeplink.scheduler.launch.process import StartedAgents, StartedSlots
    from deeplink.scheduler.launch.run_state import Handover
    from deeplink.scheduler.recovery.rank_failure import Failed
    from deeplink.scheduler.recovery.relaunch import RelaunchPolicy
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.topology.graph import Fabric

    EndOf = Callable[[int], int | None]  # how a process ended, by its id; None while it runs
    Reach = Callable[[NodeName], Channel]  # opens a channel to a node's agent, wherever that is by now

OVER_S = 1.0  # with so little time left the limit has been reached
_PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports, which the kernel gives to whoever connects


def ports_for(attempt: Attempt) -> Iterator[int]:
    """Yield the ports that rank 0 of an attempt may listen on; the first differs from those of other attempts."""
    first = attempt.job * 7919 + attempt.restart * 101 + attempt.relaunch
    return (_PORTS[(first + more) % len(_PORTS)] for more in range(len(_PORTS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesStatus:
    """The nodes of the job that Slurm has withdrawn, and why."""

    out: Mapping[NodeName, str] = field(default_factory=dict)  # drained or down
    taken: Mapping[NodeName, str] = field(default_factory=dict)  # no longer the job's: others may run there

    @classmethod
    def of(cls, nodes: Sequence[NodeName], rows: Collection[NodeRow], job: JobRow, restart: int) -> Self:
        """Return the status of the nodes that the job began with."""
        # Slurm takes a node that it, or an administrator, calls down from a job with --no-kill. Where its slurmd
        # answers, the node may be in service again within a second: only the job's own list tells.
        said = {row.name: _why(row) for row in rows}
        kept = frozenset(job.nodes if job.restarts == restart else ()) or frozenset(nodes)
        return cls(
            out={row.name: said[row.name] for row in rows if (row.drained or row.down) and row.name in kept},
            taken={node: said.get(node, "unknown") for node in nodes if node not in kept},
        )


def _why(row: NodeRow) -> str:
    state = "drained" if row.drained else row.state.value.lower()
    return f"{state}: {row.reason}" if row.reason else state


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The job's status in Slurm."""

    ours: bool  # what runs under the job's number is this run of it, and not a later one elsewhere
    runs: bool  # it has not been cancelled, requeued or ended
    left_s: float | None = None  # until its time limit; None where there is none
    preempting: bool = False  # another job is to get its nodes
    requeueable: bool = False  # it may be started again
    word: str = ""  # its state and reason, for people

    @property
    def explains(self) -> bool:
        """Whether it says why something of ours was ended."""
        is_over = self.left_s is not None and self.left_s <= OVER_S
        return not (self.ours and self.runs) or self.preempting or is_over


@dataclass(slots=True)
class HeldRole:
    """The run, and the term in which this launcher has the role in it."""

    term: int = 0
    run: str = ""  # as `launcher_role.run_of` has it


class AgentStep(Protocol):
    """The agents of all nodes, one per node."""

    starter: str  # the program that starts them
    doubt: str  # what to look at when it hangs, one sentence

    gone: frozenset[NodeName] = frozenset()  # nodes that were left out, since slurmd refuses connections there

    def announced(self) -> list[NodeFacts]:
        """Return the agents that became ready since the last call; does not wait."""
        ...

    def ended(self) -> int | None:
        """Return the exit code once no agent runs any more; None before."""
        ...

    def killed(self) -> frozenset[NodeName]:
        """Return the nodes whose agent a signal has ended, as far as its starter says so."""
        return frozenset()

    def last_words(self) -> str:
        """Return the last line that the agents or their starter wrote; empty if there is none."""
        ...

    def abandon(self) -> None:
        """Let go of the agents without a word to Slurm: under the job's number runs something newer."""
        ...

    def stop(self) -> None:
        """End the agents; returns in bounded time, whatever has become of their nodes."""
        ...


class RankStep(Protocol):
    """The ranks of one attempt. What has a body is so where they have ended."""

    def exit_code(self) -> int | None:
        """Return how the step ended (128 + n for signal n; of failed ranks the first one's code); None before."""
        ...

    def failed(self) -> Failed:
        """Return what is known of the first rank that failed; as good as nothing if none did."""
        ...

    def send(self, number: Signals) -> None:  # noqa: ARG002
        """Pass a signal on to every rank; does not wait."""
        return

    def abandon(self) -> None:
        """Let go of the ranks without a word to Slurm: under the job's number runs something newer."""
        return

    def kill(self) -> None:
        """End every rank that can be reached; returns in bounded time and never waits for a dead node."""
        return


class Backend(Protocol):
    """An allocation: the nodes of one run of one job. What may take seconds logs what goes wrong.

    What has a body is so without a scheduler.
    """

    name: str  # `slurm` or `local`
    can_requeue: bool  # whether there is a scheduler that could start the job again elsewhere
    job: int  # the job's raw id, different for every task of an array
    restart: int  # how often the job was started again before this run
    user: str
    job_name: str
    nodes: tuple[NodeName, ...]
    here: NodeName | None  # the node we run on ourselves; None where it is none of them
    folder: Path  # the job's state folder
    granted: Granted

    @property
    def label(self) -> str:
        """The job's name for people and Slurm's commands, `12_3` for a task of an array."""
        return str(self.job)

    @property
    def role(self) -> HeldRole:
        """The launcher's role, which this process has."""
        return HeldRole()

    def start_agents(self, secret: str, again: Mapping[NodeName, NodeFacts] | None = None) -> AgentStep:
        """Start one agent on every node, or again on these, at the ports of those that were there."""
        ...

    def start_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep:
        """Start the ranks of an attempt in the launch's order; `reach` carries the attempt's token."""
        ...

    def adopt_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep | None:  # noqa: ARG002
        """Return the ranks that an earlier launcher of this run started so; None where they cannot be had."""
        return None

    def started_slots(self) -> tuple[StartedSlots, ...]:
        """Return what waits on the nodes for ranks to run, for a launcher that is started again."""
        return ()

    def adopt_slots(self, started: Sequence[StartedSlots], end_of: EndOf) -> None:  # noqa: ARG002 - for the others
        """Go on with slots that a launcher before this one started; `end_of` tells how its processes ended."""
        return

    def adopt_agents(self, started: StartedAgents, end_of: EndOf) -> AgentStep:  # noqa: ARG002 - for the others
        """Go on with agents that a launcher before this one started; `end_of` tells how its processes ended."""
        raise LaunchError(f"{self.name}: no launcher is started again here")

    def end_slots(self) -> None:
        """End what waits on the nodes for ranks to run, and was told to leave; returns in bounded time."""
        ...

    def rank_command(self, launch: Launch, command: Sequence[str]) -> list[str]:
        """Return what `start_ranks` would execute, for people."""
        ...

    def port_for(self, attempt: Attempt) -> int:
        """Return a port for rank 0 to listen on, another one for each attempt."""
        ...

    def fabric(self) -> Fabric:
        """Return where the nodes hang, as far as can be told without agents."""
        ...

    def requeue_if_down(self, nodes: Collection[NodeName]) -> bool:  # noqa: ARG002
        """Ask for the job to be started again elsewhere, if these nodes have been given up; True once asked."""
        return False

    def job_status(self) -> JobStatus | None:
        """Return the job's status; None where it is not known. May take seconds."""
        return None

    def nodes_status(self) -> NodesStatus | None:
        """Return which of the nodes are out of service or taken from the job; None where it is not known."""
        return NodesStatus()

    def unheard(self, nodes: Collection[NodeName]) -> Mapping[NodeName, bool] | None:  # noqa: ARG002
        """Return which of these nodes do not answer Slurm, and whether it has given each up. May take seconds."""
        # None where it does not answer now, and may later.
        return {}

    def requeue(self, lost: Collection[NodeName]) -> bool:  # noqa: ARG002
        """Have the job started again as soon as may be; True once that is under way, which ends us."""
        # Never while a node that was lost is still taken for a part of the job: that would lose it its GPUs. May
        # take half a minute.
        return False

    def ended_whole(self) -> None:
        """Take note that the run has ended and no node was lost in it: nothing of it is still under way."""
        return

    def hold(self, because: str, lost: Collection[NodeName]) -> bool:  # noqa: ARG002
        """Have the job put back into the queue and held there, with the reason; otherwise as `requeue`."""
        return False


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts that everything in one run of a job shares."""

    backend: Backend
    agents: AgentPool
    events: EventLog
    clock: Clock
    spec: LaunchSpec
    policy: RelaunchPolicy
    handover: Handover | None = None  # None where no launcher is started again


# Errors of starting agents and ranks.


class LaunchError(DeepLinkError):
    """Agents or ranks cannot be started, or not as asked."""

    def __init__(self, problem: str, remedy: str = "", *, exit_code: int = 2) -> None:
        super().__init__(problem, remedy=remedy)
        self.exit_code = exit_code


class NodesLostError(DeepLinkError):
    """Too few node agents came up, and Slurm does not hear of the other nodes either: the ranks have no fault."""

    exit_code = 75

    def __init__(self, missing: Collection[NodeName], waited_s: float) -> None:
        self.missing = tuple(sorted(missing))
        names = listed(self.missing)
        super().__init__(
            f"no node agent on {names} after {waited_s:.0f} s, and Slurm gets no answer from it either"
        )


class NoSlurmdError(DeepLinkError):
    """Nodes refuse connections to slurmd: nothing can be started there."""

    def __init__(self, nodes: Collection[NodeName]) -> None:
        super().__init__(f"slurmd refuses connections on {listed(sorted(nodes))}")
        self.nodes = frozenset(nodes)
