"""What supervision needs of an allocation, whoever gave it: Slurm (`slurm.py`) or this machine (`local.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from deeplink.errors import DeepLinkError
from deeplink.scheduler.launch.service import NodesStanding
from deeplink.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path
    from signal import Signals

    from deeplink.scheduler.launch.environment import Launch, NodeFacts
    from deeplink.scheduler.launch.failure import Failed
    from deeplink.scheduler.launch.job_status import JobStatus
    from deeplink.scheduler.launch.shape import Granted
    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.types import Attempt, NodeName


class NoAllocationError(DeepLinkError):
    """`deeplink run` was called where there are no nodes to run on."""

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem,
            remedy="Call it in a batch script (`deeplink sbatch job.sh`) or under salloc; "
            "or try it without Slurm: `deeplink run --local 2 -- COMMAND`.",
        )
        self.problem = problem


class AgentsFailedError(DeepLinkError):
    """Too few node agents came up to run the ranks.

    Args:
        missing: the nodes without.
        waited_s: how long they were waited for, seconds.
        logs: where they log.
        step: what was to start them.
        none: whether not even one came up.
    """

    def __init__(
        self, missing: Collection[NodeName], waited_s: float, logs: str, *, step: AgentStep, none: bool
    ) -> None:
        names = listed(sorted(missing))
        code, words = step.ended(), step.last_words()
        remedy = f"{logs} has the agents' own words; `srun -w NODE true` shows whether Slurm reaches the node."
        if code is not None:
            problem = f"{step.starter} exited {code} before an agent came up on {names}: "
            problem += words or "(it said nothing)"
        else:
            problem = f"no node agent came up on {names} within {waited_s:.0f} s"
            if not none:
                problem += f": {words}" if words else ""
            else:
                problem += f"; {step.starter} still hangs"
                remedy = f"{step.doubt} {logs} has what was said."
        super().__init__(problem, remedy=remedy)
        self.missing, self.waited_s, self.code = tuple(missing), waited_s, code


class NodesLostError(DeepLinkError):
    """Too few node agents came up, and Slurm does not hear of the other nodes either: the ranks have no fault."""

    exit_code = 75

    def __init__(self, missing: Collection[NodeName], waited_s: float) -> None:
        names = listed(sorted(missing))
        super().__init__(f"no node agent on {names} after {waited_s:.0f} s, and Slurm does not hear of it either")
        self.missing = tuple(sorted(missing))


class NoSlurmdError(DeepLinkError):
    """Nodes refuse connections to slurmd: nothing can be started there."""

    def __init__(self, nodes: Collection[NodeName]) -> None:
        super().__init__(f"slurmd refuses connections on {listed(sorted(nodes))}")
        self.nodes = frozenset(nodes)


class AgentStep(Protocol):
    """The agents of all nodes, one per node.

    Attributes:
        starter: the program that starts them.
        doubt: what to look at when it hangs, one sentence.
        gone: nodes that were left out, since slurmd refuses connections there.
    """

    starter: str
    doubt: str
    gone: frozenset[NodeName] = frozenset()

    def announced(self) -> list[NodeFacts]:
        """Return the agents that became ready since the last call; does not wait."""
        ...

    def ended(self) -> int | None:
        """Return the exit code once no agent runs any more; None before."""
        ...

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
    """The ranks of one attempt."""

    def exit_code(self) -> int | None:
        """Return how the step ended (128 + n for signal n; of failed ranks the first one's code); None before."""
        ...

    def failed(self) -> Failed:
        """Return what is known of the first rank that failed; as good as nothing if none did."""
        ...

    def send(self, number: Signals) -> None:
        """Pass a signal on to every rank; does not wait."""
        ...

    def abandon(self) -> None:
        """Let go of the ranks without a word to Slurm: under the job's number runs something newer."""
        ...

    def kill(self) -> None:
        """End every rank that can be reached; returns in bounded time and never waits for a dead node."""
        ...


class Backend(Protocol):
    """An allocation: the nodes of one run of one job.

    Attributes:
        name: `slurm` or `local`.
        job: the job's raw id, different for every task of an array.
        label: what people and Slurm's commands call it, `12_3` for a task of an array.
        restart: how often the job was started again before this run.
        user: whose job it is.
        job_name: what people call it.
        nodes: the allocated nodes.
        here: the node we run on ourselves; None where it is none of them.
        folder: the job's state folder.
        granted: what the job has, node by node.
        can_requeue: whether there is anybody who could start the job again elsewhere.
    """

    name: str
    can_requeue: bool
    job: int
    restart: int
    user: str
    job_name: str
    nodes: tuple[NodeName, ...]
    here: NodeName | None
    folder: Path
    granted: Granted

    @property
    def label(self) -> str:
        """What the job is called."""
        return str(self.job)

    def start_agents(self, secret: str, again: Mapping[NodeName, NodeFacts] | None = None) -> AgentStep:
        """Start one agent on every node, or once more on these, in the places of those that were there.

        Raises:
            NoSlurmdError: on all of these nodes there is nothing any more that could start it.
        """
        ...

    def start_ranks(self, launch: Launch, command: Sequence[str]) -> RankStep:
        """Start the ranks of an attempt in the launch's order."""
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

    def requeue_if_down(self, nodes: Collection[NodeName]) -> bool:
        """Ask for the job to be started again elsewhere, if these nodes have been given up; True once asked.

        May take seconds; what goes wrong is logged.
        """
        ...

    def standing(self) -> JobStatus | None:
        """Return how the job stands with whoever gave the nodes; None where nobody says.

        May take seconds; what goes wrong is logged.
        """
        ...

    def nodes_standing(self) -> NodesStanding | None:
        """Return which of the nodes are out of service or taken from the job; None where nobody says.

        May take seconds; what goes wrong is logged.
        """
        return NodesStanding()

    def unheard(self, nodes: Collection[NodeName]) -> Mapping[NodeName, bool] | None:
        """Return which of these nodes do not answer whoever gave them, and whether it has given each up.

        None where it does not answer now, and may later. May take seconds; what goes wrong is logged.
        """
        ...

    def requeue(self, lost: Collection[NodeName]) -> bool:
        """Have the job started again as soon as may be; True once that is under way, which ends us.

        Never while a node that was lost is still taken for a part of the job: that would lose it its GPUs. May
        take half a minute; what goes wrong is logged.
        """
        ...

    def ended_whole(self) -> None:
        """Take note that the run has ended and no node was lost in it: nothing of it is still under way."""
        ...

    def hold(self, because: str, lost: Collection[NodeName]) -> bool:
        """Have the job put back into the queue and held there; True once that is under way, which ends us.

        Why stands where the job is looked at. Otherwise as `requeue`.
        """
        ...
