"""Every row of the table: what cluster, what job, what fault, what is expected. Values, no deeds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY = 20
"""Steps between two checkpoints."""
PAUSE_S = 0.1
"""Seconds of a step."""
AT_STEP = 45
"""The fault comes when all ranks have made so many steps."""
SLURMD_TIMEOUT_S = 10
REPEATS, STOCK_REPEATS = 5, 3
"""How often each scenario is run, and each case of stock Slurm."""
EIGHT = Shape(leaves=2, nodes_per_leaf=4)


class Rights(StrEnum):
    """Who runs `deeplink watch`."""

    OPERATOR = "operator"
    USER = "ordinary user"
    NONE = "no watchdog"


class Hit(StrEnum):
    """What the fault hits."""

    LAST = "the last rank's node"
    MIDDLE = "a node that is neither rank 0's nor the batch host"
    LEAF = "a leaf of the job without its batch host"
    CONTROL = "ctl"
    CHECKPOINTS = "the job's checkpoints"
    JOB = "the job's folder"
    ALL = ""


class After(StrEnum):
    """What is to come after the fault."""

    AGAIN = "the ranks train again in a newer attempt"
    SAME = "nothing: the same attempt goes on"
    HELD = "the job is held, or has ended, and its incident says why"


class Never(StrEnum):
    """What must not be."""

    BAD_NODE = "ranks on the bad node again"
    REPEATED = f"more than {EVERY} steps repeated"
    GRES = "GPUs leaked: a job of all GPUs waits"
    HISTORY = "the job's history lost"
    ZOMBIE_SAVES = "a checkpoint of the zombie's after the fence"
    ZOMBIE_LINES = "output of the zombie's after the fence"
    ZOMBIE_METRICS = "metrics of the zombie's after the fence"
    UNCHECKED = "the node in use again before it is checked"
    STACKS = "the stacks lost"
    LOOP = "a loop of restarts"
    HANG = "the job hangs"
    RESTART = "a restart"
    DRAINED = "a node drained or down"
    REQUEUED = "the job requeued"
    INCIDENTS = "other than one incident, of the right kind"
    UNNAMED_LEAF = "nodes drained without naming the leaf"
    FROM_ZERO = "a start from zero"
    TWICE = "an action done twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row.

    Attributes:
        fault: of the laboratory; the one that is measured.
        hold_s: for how long it is in effect; None: to the end.
        settle_s: how long to watch on after that, for what must not be.
        detected_s: the goal of the incident's detection after the fault; None where only noticing counts.
        first_step_s: the goal of the next attempt's first training step after the fault.
        kinds: of the incident, whichever of them it is.
        says: what the job's output is to say besides.
        nodes: of the job, spares among them.
        all_gpus: the job takes every GPU of its nodes.
        options: of `deeplink run`, besides.
        at_step: when the fault comes.
        then: a second fault at the same moment, on the last rank's node.
        always: a rank exits at each attempt, not only once.
        sbatch: options of sbatch, besides.
        kill_watchdog_at: the watchdog is killed, and started again, when it has said this.
        resume: the watchdog takes nodes back that are well again, and that is waited for.
        standing: every node has an agent as a system service, which may start slurmd again.
        freezable: the shared storage is to be one that can stall.
        torch: ranks are DDP over gloo.
        stock: stock Slurm is measured beside it; of which fault.
        most_of_stock: the goal of ours over stock.
        bound_s: how long the outcome is waited for.
        about_s: how long a run takes, from nothing to nothing, as measured on two cores.
    """

    name: str
    title: str
    fault: str
    hit: Hit
    after: After
    never: tuple[Never, ...]
    kinds: frozenset[IncidentKind]
    says: str = ""
    hold_s: float | None = None
    settle_s: float = 5.0
    detected_s: float | None = None
    first_step_s: float | None = None
    shape: Shape = EIGHT
    nodes: int = 4
    spares: int = 0
    all_gpus: bool = False
    rights: Rights = Rights.OPERATOR
    options: str = ""
    at_step: int = AT_STEP
    sbatch: str = ""
    then: str = ""
    always: bool = False
    kill_watchdog_at: str = ""
    resume: bool = False
    standing: bool = False
    freezable: bool = False
    torch: bool = False
    stock: str = ""
    most_of_stock: float | None = None
    bound_s: float = 60.0
    about_s: float

    @property
    def timed(self) -> bool:
        """Whether a goal of seconds is held against it: then it has the machine to itself."""
        return self.detected_s is not None or self.first_step_s is not None


LOST = frozenset(
    {IncidentKind.NODE_SILENT, IncidentKind.NODE_DEAD, IncidentKind.NODE_CUT_OFF, IncidentKind.JOB_STRANDED}
)
_NODE = (Never.BAD_NODE, Never.REPEATED, Never.INCIDENTS)

SCENARIOS = (
    Scenario(
        name="node-killed-spare",
        title="node killed, a spare in the allocation",
        about_s=20,
        fault="node-killed",
        hit=Hit.LAST,
        after=After.AGAIN,
        nodes=5,
        spares=1,
        rights=Rights.NONE,
        detected_s=3,
        first_step_s=10,
        kinds=LOST,
        never=_NODE,
        stock="node-killed",
        most_of_stock=1 / 10,
    ),
    Scenario(
        name="node-killed-spare-torch",
        title="node killed, a spare in the allocation, DDP over gloo",
        about_s=33,
        fault="node-killed",
        hit=Hit.LAST,
        after=After.AGAIN,
        nodes=5,
        spares=1,
        rights=Rights.NONE,
        torch=True,
        detected_s=3,
        first_step_s=10,
        kinds=LOST,
        never=_NODE,
        bound_s=90,
    ),
    Scenario(
        name="node-killed-preloaded-torch",
        title="the same, imports preloaded on every node",
        about_s=60,
        fault="node-killed",
        hit=Hit.LAST,
        after=After.AGAIN,
        nodes=5,
        spares=1,
        rights=Rights.NONE,
        torch=True,
        options="--preload deeplink.checkpoints,torch._dynamo,torch.nn.parallel",
        at_step=250,
        detected_s=2.5,
        first_step_s=4,
        kinds=LOST,
        never=_NODE,
        bound_s=90,
    ),
    Scenario(
        name="node-killed-operator",
        title="node killed, no spare, operator rights",
        about_s=40,
        fault="node-killed",
        hit=Hit.LAST,
        after=After.AGAIN,
        all_gpus=True,
        detected_s=3,
        first_step_s=15,
        kinds=LOST,
        never=(*_NODE, Never.GRES),
        stock="node-killed",
        most_of_stock=1 / 8,
    ),
    Scenario(
        name="node-killed-no-rights",
        title="node killed, no spare, no rights",
        about_s=28,
        fault="node-killed",
        hit=Hit.LAST,
        after=After.AGAIN,
        rights=Rights.USER,
        detected_s=3,
        first_step_s=2 * SLURMD_TIMEOUT_S + 10,
        kinds=LOST,
        never=(*_NODE, Never.HISTORY),
        stock="node-killed",
        bound_s=120,
    ),
    Scenario(
        name="node-cut",
        title="node cut off, healed 60 s later",
        about_s=93,
        fault="node-cut",
        hit=Hit.LAST,
        after=After.AGAIN,
        hold_s=60,
        settle_s=10,
        resume=True,
        detected_s=5,
        first_step_s=15,
        kinds=LOST,
        never=(
            *_NODE,
            Never.ZOMBIE_SAVES,
            Never.ZOMBIE_LINES,
            Never.ZOMBIE_METRICS,
            Never.UNCHECKED,
        ),
        stock="node-cut",
    ),
    Scenario(
        name="rank-stopped",
        title="rank SIGSTOPped",
        about_s=30,
        fault="rank-stopped",
        hit=Hit.MIDDLE,
        after=After.AGAIN,
        nodes=5,
        spares=1,
        detected_s=10,
        first_step_s=25,
        kinds=frozenset({IncidentKind.RANKS_HUNG}),
        never=(Never.REPEATED, Never.STACKS, Never.INCIDENTS),
        stock="rank-stopped",
    ),
    Scenario(
        name="rank-exit-once",
        title="rank exits 1 once",
        about_s=17,
        fault="rank-exit",
        hit=Hit.JOB,
        after=After.AGAIN,
        detected_s=1,
        first_step_s=10,
        kinds=frozenset({IncidentKind.RANK_FAILED}),
        never=(Never.REPEATED, Never.INCIDENTS, Never.DRAINED),
        stock="rank-exit",
    ),
    Scenario(
        name="rank-exit-always",
        title="rank exits 1 always at the same step",
        about_s=18,
        fault="rank-exit",
        hit=Hit.JOB,
        always=True,
        after=After.HELD,
        detected_s=1,
        kinds=frozenset({IncidentKind.APPLICATION_FAILED, IncidentKind.RANK_FAILED}),
        never=(Never.LOOP, Never.DRAINED),
    ),
    Scenario(
        name="fast-reboot",
        title="fast reboot of a node (Slurm does not notice)",
        about_s=25,
        fault="fast-reboot",
        hit=Hit.LAST,
        after=After.AGAIN,
        nodes=5,
        spares=1,
        detected_s=5,
        first_step_s=15,
        kinds=LOST | {IncidentKind.NODE_REBOOTED, IncidentKind.RANK_FAILED},
        never=(Never.HANG, Never.REPEATED, Never.INCIDENTS),
        stock="fast-reboot",
    ),
    Scenario(
        name="slurmd-killed",
        title="slurmd killed, job alive, system agents",
        about_s=48,
        fault="slurmd-killed",
        hit=Hit.MIDDLE,
        after=After.SAME,
        shape=Shape.of(4),
        nodes=3,
        standing=True,
        hold_s=3 * SLURMD_TIMEOUT_S,  # Slurm would have given the node up by then
        kinds=frozenset({IncidentKind.SLURMD_LOST}),
        never=(Never.RESTART, Never.DRAINED),
    ),
    Scenario(
        name="controller-down",
        title="slurmctld down 60 s",
        about_s=78,
        fault="controller-down",
        hit=Hit.CONTROL,
        after=After.SAME,
        hold_s=60,
        kinds=frozenset({IncidentKind.WATCHDOG_PARTITIONED}),
        never=(Never.RESTART, Never.DRAINED, Never.REQUEUED),
    ),
    Scenario(
        name="watchdog-killed",
        title="watchdog killed",
        about_s=18,
        fault="watchdog-killed",
        hit=Hit.CONTROL,
        after=After.SAME,
        hold_s=2,
        kinds=frozenset({IncidentKind.WATCHDOG_AWAY}),
        says="event_log: beat: ",  # what the launcher cannot tell, and why
        never=(Never.RESTART, Never.DRAINED, Never.REQUEUED),
    ),
    Scenario(
        name="storage-frozen",
        title="shared storage frozen 30 s",
        about_s=52,
        fault="storage-frozen",
        hit=Hit.ALL,
        after=After.SAME,
        hold_s=30,
        settle_s=10,
        freezable=True,
        kinds=frozenset({IncidentKind.STORAGE_FROZEN}),
        never=(Never.RESTART, Never.DRAINED, Never.REQUEUED),
    ),
    Scenario(
        name="agents-silent",
        title="all agents silent at once, 30 s",
        about_s=48,
        fault="agents-silent",
        hit=Hit.ALL,
        after=After.SAME,
        hold_s=30,
        kinds=frozenset({IncidentKind.AGENTS_SILENT, IncidentKind.WATCHDOG_PARTITIONED}),
        never=(Never.RESTART, Never.DRAINED, Never.REQUEUED),
    ),
    Scenario(
        name="leaf-cut",
        title="leaf switch cut (4 nodes silent; 1 spine x 3 leaves x 4 nodes)",
        about_s=34,
        fault="leaf-cut",
        hit=Hit.LEAF,
        after=After.AGAIN,
        shape=Shape(leaves=3, nodes_per_leaf=4),
        nodes=6,
        detected_s=5,
        first_step_s=20,
        kinds=frozenset({IncidentKind.SWITCH_SUSPECT}),
        never=(Never.BAD_NODE, Never.REPEATED, Never.UNNAMED_LEAF),
        bound_s=90,
    ),
    Scenario(
        name="checkpoint-torn",
        title="newest checkpoint torn, previous whole, then a node dies",
        about_s=20,
        fault="checkpoint-torn",
        hit=Hit.CHECKPOINTS,
        after=After.AGAIN,
        nodes=5,
        spares=1,
        then="node-killed",
        kinds=LOST,
        never=(Never.FROM_ZERO,),
    ),
    Scenario(
        name="watchdog-killed-midway",
        title="node killed, and the watchdog between requeue and exclude",
        about_s=32,
        fault="node-killed",
        hit=Hit.LAST,
        after=After.AGAIN,
        kill_watchdog_at="requeue job",
        kinds=LOST,
        never=(Never.BAD_NODE, Never.TWICE),
        bound_s=90,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@dataclass(frozen=True, slots=True, kw_only=True)
class StockCase:
    """What stock Slurm is given: a resuming script under `sbatch --requeue`.

    Attributes:
        bound_s: how long it is watched: what has not come by then is told as "not within".
        about_s: how long a run takes.
    """

    name: str
    fault: str
    hit: Hit
    hold_s: float | None = None
    bound_s: float = 260.0
    about_s: float = 75.0


STOCK = {
    case.name: case
    for case in (
        StockCase(name="node-killed", fault="node-killed", hit=Hit.LAST, about_s=170),
        StockCase(name="node-cut", fault="node-cut", hit=Hit.LAST, hold_s=60, about_s=170),
        StockCase(name="rank-stopped", fault="rank-stopped", hit=Hit.MIDDLE, bound_s=60),
        StockCase(name="rank-exit", fault="rank-exit", hit=Hit.JOB, bound_s=60),
        StockCase(name="fast-reboot", fault="fast-reboot", hit=Hit.LAST, bound_s=60),
    )
}


def cases_of(scenarios: Sequence[Scenario]) -> list[StockCase]:
    """Return what stock Slurm is given beside these."""
    return [STOCK[name] for name in sorted({scenario.stock for scenario in scenarios} - {""})]
