"""Every fault: what it hits, what it is like on real machines, how it is done and undone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.lab import plans
from deeplink.scheduler.sandbox.lab.errors import UnknownFaultError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.sandbox.lab.scene import Scene
    from deeplink.scheduler.sandbox.lab.steps import FaultPlan


class FaultTarget(StrEnum):
    """What a fault hits."""

    NODE = "node"
    RANK = "a node's rank"
    LEAF = "leaf"
    CONTROL = "ctl"
    ALL = "everything"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        like: what it stands for on real machines, for people.
        undone: how it ends when it is undone, for people.
        network: whether it takes machines with networks and mounts of their own.
        lasting: whether it is in effect until it is undone; else it is over once it is done.
        mounts: whether it lies over the node's SSD: the newest of such hides the others.
        plan: from what is there to what is done.
    """

    name: str
    target: FaultTarget
    like: str
    undone: str
    plan: Callable[[Scene], FaultPlan]
    network: bool = True
    lasting: bool = True
    mounts: bool = False


_FAULTS = (
    Fault(
        name="node-killed",
        target=FaultTarget.NODE,
        like="power loss: the link goes first, then every process",
        undone="the node boots",
        plan=plans.node_killed,
        network=False,
    ),
    Fault(
        name="node-cut",
        target=FaultTarget.NODE,
        like="a cable is pulled: its ranks and slurmd live on, and nobody hears them",
        undone="the cable is put back",
        plan=plans.cut,
    ),
    Fault(
        name="leaf-cut",
        target=FaultTarget.LEAF,
        like="a leaf switch loses its uplink: its nodes hear each other and nobody else",
        undone="the uplink is back",
        plan=plans.cut,
    ),
    Fault(
        name="fast-reboot",
        target=FaultTarget.NODE,
        like=f"a kernel panic and a boot within {plans.REBOOT_S:g} s: Slurm sees nothing, the boot id is another",
        undone="it is over: the node is up",
        plan=plans.fast_reboot,
        lasting=False,
    ),
    Fault(
        name="rank-stopped",
        target=FaultTarget.RANK,
        like="a rank hangs (SIGSTOP): alive, silent, holding its GPU",
        undone="SIGCONT",
        plan=plans.rank_stopped,
        network=False,
    ),
    Fault(
        name="rank-killed",
        target=FaultTarget.RANK,
        like="a rank dies by a signal (SIGKILL), as by the kernel's out-of-memory killer",
        undone="cannot be: it is dead",
        plan=plans.rank_killed,
        network=False,
    ),
    Fault(
        name="rank-exit",
        target=FaultTarget.FOLDER,
        like="the training script exits with 1 at a step, once or always (the laboratory's own ranks obey it)",
        undone="the order is taken back",
        plan=plans.rank_exit,
        network=False,
    ),
    Fault(
        name="slow-rank",
        target=FaultTarget.RANK,
        like="a straggler: one rank stands still for a share of the time",
        undone="it runs on",
        plan=plans.slow_rank,
        network=False,
    ),
    Fault(
        name="slurmd-killed",
        target=FaultTarget.NODE,
        like="slurmd dies, the job's processes live",
        undone="slurmd is started, unless somebody has",
        plan=plans.daemon_killed("slurmd-killed"),
        network=False,
    ),
    Fault(
        name="node-drained",
        target=FaultTarget.NODE,
        like="an administrator drains the node: what runs there runs on, nothing new begins there",
        undone="it is resumed, unless somebody drained it for another reason",
        plan=plans.node_drained,
        network=False,
    ),
    Fault(
        name="controller-down",
        target=FaultTarget.CONTROL,
        like="slurmctld dies: connections to it are refused",
        undone="slurmctld is started",
        plan=plans.daemon_killed("controller-down"),
        network=False,
    ),
    Fault(
        name="controller-frozen",
        target=FaultTarget.CONTROL,
        like="slurmctld hangs: connections to it are accepted and not answered",
        undone="SIGCONT",
        plan=plans.controller_frozen,
        network=False,
    ),
    Fault(
        name="watchdog-killed",
        target=FaultTarget.CONTROL,
        like="`deeplink watch` dies without a word (SIGKILL)",
        undone="it is started again, as it was started before",
        plan=plans.watchdog_killed,
    ),
    Fault(
        name="agents-silent",
        target=FaultTarget.ALL,
        like="a filter drops what all node agents send: all are silent at once, and no node is at fault",
        undone="the filter is gone",
        plan=plans.agents_silent,
    ),
    Fault(
        name="data-cut",
        target=FaultTarget.NODE,
        like="a filter drops what a node's data ports send: its agents and slurmd are heard, its samples are not",
        undone="the filter is gone",
        plan=plans.data_cut,
    ),
    Fault(
        name="storage-frozen",
        target=FaultTarget.ALL,
        like="the shared file system stalls: who writes to it hangs, unkillable (reading goes on)",
        undone="it moves again, and what hung is written",
        plan=plans.storage_frozen,
    ),
    Fault(
        name="checkpoint-torn",
        target=FaultTarget.FOLDER,
        like="the newest checkpoint lost half of its largest file",
        undone="the whole file is put back",
        plan=plans.checkpoint_torn,
        network=False,
    ),
    Fault(
        name="checkpoints-unreadable",
        target=FaultTarget.FOLDER,
        like="a folder of the shared storage refuses its own user (EACCES), as with an expired ticket",
        undone="its mode is given back, unless somebody gave it another",
        plan=plans.checkpoints_unreadable,
    ),
    Fault(
        name="disk-full",
        target=FaultTarget.NODE,
        like="the node's SSD is full",
        undone="there is room again; what was deleted meanwhile is back",
        plan=plans.disk(plans.FILL, plans.DRAIN),
        mounts=True,
    ),
    Fault(
        name="disk-readonly",
        target=FaultTarget.NODE,
        like="the node's SSD is read-only, as after an I/O error",
        undone="it can be written",
        plan=plans.disk(plans.READ_ONLY, plans.WRITABLE),
        mounts=True,
    ),
    Fault(
        name="folder-squatted",
        target=FaultTarget.NODE,
        like=f"another user was first to make {plans.STORE} on the node's SSD: the job may not use it",
        undone="the other user's folder is gone, and what was there is back",
        plan=plans.disk(plans.SQUAT, plans.LEAVE),
        mounts=True,
    ),
)
FAULTS = {fault.name: fault for fault in _FAULTS}
"""Every fault by its name, in the order of the documentation."""


def fault_of(name: str) -> Fault:
    """Return the fault of that name.

    Raises:
        UnknownFaultError: there is none.
    """
    if name not in FAULTS:
        raise UnknownFaultError(name, tuple(FAULTS))
    return FAULTS[name]
