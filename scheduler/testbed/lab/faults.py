"""Every fault: what it hits, what it is like on real machines, the steps that do and undo it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.lab.disks import (
    DRAIN,
    FAIL,
    FILL,
    LEAVE,
    READ_ONLY,
    SQUAT,
    STORE,
    WORK,
    WRITABLE,
    brim,
    sealed,
)
from deeplink.scheduler.testbed.lab.steps import (
    Fault,
    FaultPlan,
    FaultStep,
    FaultTarget,
    Verb,
    as_root,
    no_target,
    process_words,
    signalled,
)
from deeplink.scheduler.testbed.lab.traffic import DATA, RECEIVES, SENDS, TCP
from deeplink.scheduler.testbed.settings import NODE_PORT
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.scheduler.testbed.lab.scene import Scene
    from deeplink.scheduler.testbed.processes import ProcessId

REBOOT_S = 2.0
"""How long a node is off in a fast reboot. Slurm does not notice (measured: up to 3 s)."""
DUTY_PERIOD_S = 0.2
DRAINED = "fault-laboratory:node-drained"
NOBODYS = "0"
"""The mode of a folder that only root can read."""


def _node_killed(scene: Scene) -> FaultPlan:
    return FaultPlan((FaultStep(Verb.OFF, scene.target),), (FaultStep(Verb.BOOT, scene.target),))


def _cut(scene: Scene) -> FaultPlan:
    return FaultPlan((FaultStep(Verb.CUT, scene.target),), (FaultStep(Verb.HEAL, scene.target),))


def _fast_reboot(scene: Scene) -> FaultPlan:
    boot = FaultStep(Verb.BOOT, scene.target)
    return FaultPlan(
        (FaultStep(Verb.OFF, scene.target), FaultStep(Verb.PAUSE, words=(f"{REBOOT_S:g}",)), boot), (boot,)
    )


def _rank(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if not scene.ranks:
        raise no_target(fault, scene.target, "no rank runs")
    rank = min(scene.ranks) if scene.rank is None else scene.rank
    if rank not in scene.ranks:
        raise no_target(fault, scene.target, f"no rank {rank} runs")
    return scene.ranks[rank]


def _signals(
    fault: str, name: str, of: Callable[[str, Scene], tuple[ProcessId, ...]]
) -> Callable[[Scene], FaultPlan]:
    """Return how processes get a signal; those that were stopped go on afterwards."""

    def plan(scene: Scene) -> FaultPlan:
        there = of(fault, scene)
        undo = (signalled("SIGCONT", there),) if name == "SIGSTOP" else ()
        return FaultPlan((signalled(name, there),), undo)

    return plan


def _program(verb: str) -> Callable[[str, Scene], tuple[ProcessId, ...]]:
    """Return how the processes of a job's `deeplink VERB` are found."""

    def of(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
        if not scene.programs.get(verb):
            raise no_target(fault, scene.target, f"no job's `deeplink {verb}` runs")
        return scene.programs[verb]

    return of


def _slow_rank(scene: Scene) -> FaultPlan:
    there = _rank("slow-rank", scene)
    duty = FaultStep(Verb.DUTY, words=(f"{scene.share:g}", f"{DUTY_PERIOD_S:g}", *process_words(there)))
    return FaultPlan((duty,), (FaultStep(Verb.REST, words=duty.words), signalled("SIGCONT", there)))


def _rank_exit(scene: Scene) -> FaultPlan:
    file = f"{scene.target}/fail"
    often = "always" if scene.always else "once"
    text = f"{scene.rank or 0} {scene.step} 1 {often}\n"
    return FaultPlan((FaultStep(Verb.WRITE, words=(file, text)),), (FaultStep(Verb.REMOVE, words=(file,)),))


def _daemon(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if scene.daemon is None:
        raise no_target(fault, scene.target, "Slurm's daemon does not run")
    return (scene.daemon,)


def _daemon_signal(fault: str, name: str) -> Callable[[Scene], FaultPlan]:
    def plan(scene: Scene) -> FaultPlan:
        there = _daemon(fault, scene)
        undo = signalled("SIGCONT", there) if name == "SIGSTOP" else FaultStep(Verb.DAEMON, scene.target)
        return FaultPlan((signalled(name, there),), (undo,))

    return plan


def _watchdog_signal(fault: str, name: str) -> Callable[[Scene], FaultPlan]:
    def plan(scene: Scene) -> FaultPlan:
        if not scene.watchdogs:
            raise no_target(fault, scene.target, "no `deeplink watch` runs")
        there = tuple(process for process, _ in scene.watchdogs)
        again = tuple(FaultStep(Verb.AGAIN, scene.target, (started.packed(),)) for _, started in scene.watchdogs)
        undo = (signalled("SIGCONT", there),) if name == "SIGSTOP" else again
        return FaultPlan((signalled(name, there),), undo)

    return plan


def _agents_unanswered(fault: str) -> Callable[[Scene], FaultPlan]:
    def plan(scene: Scene) -> FaultPlan:
        ports = [(node, port) for node, those in sorted(scene.agents.items()) for port in those]
        if not ports:
            raise no_target(fault, scene.target, "no node agent listens")
        return _unanswered(ports)

    return plan


def _unanswered(ports: Sequence[tuple[str, int]]) -> FaultPlan:
    # Answers vanish on their way out, as in a filter somebody set wrongly: no one hears a refusal.
    def rules(what: str) -> tuple[FaultStep, ...]:
        return tuple(
            FaultStep(Verb.RUN, node, ("ip", "rule", what, "ipproto", TCP, "sport", str(port), "blackhole"))
            for node, port in ports
        )

    return FaultPlan(rules("add"), rules("del"))


def _node_drained(scene: Scene) -> FaultPlan:
    show = f'now=$(scontrol show node -o {scene.target}) || exit 1; echo "$now" | grep -q'
    update = f"scontrol update nodename={scene.target}"
    drain = f"{show} ' State=[^ ]*DRAIN' || {update} state=drain reason={DRAINED}"
    # Whoever drained it since, for a reason of their own, is not undone; 24.11 leaves the reason to a node that is
    # back in service. One that a controller started just now has not heard of is resumed with an error (22.05).
    gone = f"{show} ' State=[^ ]*DRAIN.* Reason={DRAINED} ' || exit 0"
    return as_root(CTL, drain, f"{gone}; {update} state=resume; {gone}; exit 1")


def _checkpoints_unreadable(scene: Scene) -> FaultPlan:
    if scene.mode is None:
        raise no_target("checkpoints-unreadable", scene.target, "no checkpoint lies there")
    return FaultPlan(
        (FaultStep(Verb.CHMOD, words=(scene.target, scene.mode, NOBODYS)),),
        (FaultStep(Verb.CHMOD, words=(scene.target, NOBODYS, scene.mode)),),
    )


def _storage_frozen(_scene: Scene) -> FaultPlan:
    return FaultPlan((FaultStep(Verb.FREEZE),), (FaultStep(Verb.THAW),))


def _checkpoint_torn(scene: Scene) -> FaultPlan:
    if scene.torn is None:
        raise no_target("checkpoint-torn", scene.target, "no checkpoint lies there")
    return FaultPlan((FaultStep(Verb.TEAR, words=scene.torn),), (FaultStep(Verb.MEND, words=scene.torn),))


def _scripts(do: str, undo: str) -> Callable[[Scene], FaultPlan]:
    def plan(scene: Scene) -> FaultPlan:
        return as_root(scene.target, do, undo)

    return plan


def _storage_full(scene: Scene) -> FaultPlan:
    return as_root(CTL, *brim(scene.homes))


def _storage_readonly(scene: Scene) -> FaultPlan:
    return as_root(scene.target, *sealed(scene.homes))


def _slurmd_unanswered(scene: Scene) -> FaultPlan:
    return _unanswered([(scene.target, NODE_PORT)])


_FAULTS = (
    Fault(
        name="node-killed",
        target=FaultTarget.NODE,
        like="power loss: the link goes first, then every process",
        undone="the node boots",
        plan=_node_killed,
        network=False,
    ),
    Fault(
        name="node-cut",
        target=FaultTarget.NODE,
        like="a cable is pulled: its ranks and slurmd live on, and nobody hears them",
        undone="the cable is put back",
        plan=_cut,
    ),
    Fault(
        name="leaf-cut",
        target=FaultTarget.LEAF,
        like="a leaf switch loses its uplink: its nodes hear each other and nobody else",
        undone="the uplink is back",
        plan=_cut,
    ),
    Fault(
        name="controller-cut",
        target=FaultTarget.CONTROL,
        like="the controller's host loses its link: jobs run on, Slurm and a watchdog there hear nobody",
        undone="the cable is put back",
        plan=_cut,
    ),
    Fault(
        name="fast-reboot",
        target=FaultTarget.NODE,
        like=f"a kernel panic and a boot within {REBOOT_S:g} s: Slurm sees nothing, the boot id is another",
        undone="it is over: the node is up",
        plan=_fast_reboot,
        lasting=False,
    ),
    Fault(
        name="rank-stopped",
        target=FaultTarget.RANK,
        like="a rank hangs (SIGSTOP): alive, silent, holding its GPU",
        undone="SIGCONT",
        plan=_signals("rank-stopped", "SIGSTOP", _rank),
        network=False,
    ),
    Fault(
        name="rank-killed",
        target=FaultTarget.RANK,
        like="a rank dies by a signal (SIGKILL), as by the kernel's out-of-memory killer",
        undone="cannot be: it is dead",
        plan=_signals("rank-killed", "SIGKILL", _rank),
        network=False,
    ),
    Fault(
        name="rank-exit",
        target=FaultTarget.FOLDER,
        like="the training script exits with 1 at a step, once or always (the laboratory's own ranks obey it)",
        undone="the order is taken back",
        plan=_rank_exit,
        network=False,
    ),
    Fault(
        name="slow-rank",
        target=FaultTarget.RANK,
        like="a straggler: one rank stands still for a share of the time",
        undone="it runs on",
        plan=_slow_rank,
        network=False,
    ),
    Fault(
        name="slurmd-killed",
        target=FaultTarget.NODE,
        like="slurmd dies, the job's processes live",
        undone="slurmd is started, unless somebody has",
        plan=_daemon_signal("slurmd-killed", "SIGKILL"),
        network=False,
    ),
    Fault(
        name="node-drained",
        target=FaultTarget.NODE,
        like="an administrator drains the node: what runs there runs on, nothing new begins there",
        undone="it is resumed, unless somebody drained it for another reason",
        plan=_node_drained,
        network=False,
    ),
    Fault(
        name="controller-down",
        target=FaultTarget.CONTROL,
        like="slurmctld dies: connections to it are refused",
        undone="slurmctld is started",
        plan=_daemon_signal("controller-down", "SIGKILL"),
        network=False,
    ),
    Fault(
        name="controller-frozen",
        target=FaultTarget.CONTROL,
        like="slurmctld hangs: connections to it are accepted and not answered",
        undone="SIGCONT",
        plan=_daemon_signal("controller-frozen", "SIGSTOP"),
        network=False,
    ),
    Fault(
        name="watchdog-killed",
        target=FaultTarget.CONTROL,
        like="`deeplink watch` dies without a word (SIGKILL)",
        undone="it is started again, as it was started before",
        plan=_watchdog_signal("watchdog-killed", "SIGKILL"),
    ),
    Fault(
        name="agents-silent",
        target=FaultTarget.ALL,
        like="a filter drops what all node agents send: all are silent at once, and no node is at fault",
        undone="the filter is gone",
        plan=_agents_unanswered("agents-silent"),
    ),
    Fault(
        name="storage-frozen",
        target=FaultTarget.ALL,
        like="the shared file system stalls: who writes to it hangs, unkillable (reading goes on)",
        undone="it moves again, and what hung is written",
        plan=_storage_frozen,
    ),
    Fault(
        name="checkpoint-torn",
        target=FaultTarget.FOLDER,
        like="the newest checkpoint lost half of its largest file",
        undone="the whole file is put back",
        plan=_checkpoint_torn,
        network=False,
    ),
    Fault(
        name="checkpoints-unreadable",
        target=FaultTarget.FOLDER,
        like="a folder of the shared storage refuses its own user (EACCES), as with an expired ticket",
        undone="its mode is given back, unless somebody gave it another",
        plan=_checkpoints_unreadable,
    ),
    Fault(
        name="disk-full",
        target=FaultTarget.NODE,
        like="the node's SSD is full",
        undone="there is room again; what was deleted meanwhile is back",
        plan=_scripts(FILL, DRAIN),
        mounts=True,
    ),
    Fault(
        name="disk-readonly",
        target=FaultTarget.NODE,
        like="the node's SSD is read-only, as after an I/O error",
        undone="it can be written",
        plan=_scripts(READ_ONLY, WRITABLE),
        mounts=True,
    ),
    Fault(
        name="folder-squatted",
        target=FaultTarget.NODE,
        like=f"another user was first to make {STORE} on the node's SSD: the job may not use it",
        undone="the other user's folder is gone, and what was there is back",
        plan=_scripts(SQUAT, LEAVE),
        mounts=True,
    ),
    Fault(
        name="sends-dropped",
        target=FaultTarget.NODE,
        like="one direction of a link is lost: nothing that the node sends arrives, and it hears everybody",
        undone="it arrives",
        plan=_scripts(*SENDS),
    ),
    Fault(
        name="receives-dropped",
        target=FaultTarget.NODE,
        like="the other direction is lost: the node is heard, and hears nobody",
        undone="it hears",
        plan=_scripts(*RECEIVES),
    ),
    Fault(
        name="data-dropped",
        target=FaultTarget.NODE,
        like="a filter drops what ranks send over their own network: agents and slurmd are heard",
        undone="the filter is gone",
        plan=_scripts(*DATA),
    ),
    Fault(
        name="agent-dropped",
        target=FaultTarget.NODE,
        like="a filter drops what this node's agents send; slurmd and ranks are heard",
        undone="the filter is gone",
        plan=_agents_unanswered("agent-dropped"),
    ),
    Fault(
        name="slurmd-dropped",
        target=FaultTarget.NODE,
        like="a filter drops what slurmd answers; agents and ranks are heard",
        undone="the filter is gone",
        plan=_slurmd_unanswered,
    ),
    Fault(
        name="agent-killed",
        target=FaultTarget.NODE,
        like="a job's node agent dies without a word (SIGKILL)",
        undone="cannot be: who started it may start it again",
        plan=_signals("agent-killed", "SIGKILL", _program("node")),
        network=False,
    ),
    Fault(
        name="agent-stopped",
        target=FaultTarget.NODE,
        like="a job's node agent hangs (SIGSTOP)",
        undone="SIGCONT",
        plan=_signals("agent-stopped", "SIGSTOP", _program("node")),
        network=False,
    ),
    Fault(
        name="launcher-killed",
        target=FaultTarget.NODE,
        like="a job's `deeplink run` dies without a word (SIGKILL)",
        undone="cannot be: who started it may start it again",
        plan=_signals("launcher-killed", "SIGKILL", _program("run")),
        network=False,
    ),
    Fault(
        name="launcher-stopped",
        target=FaultTarget.NODE,
        like="a job's `deeplink run` hangs (SIGSTOP)",
        undone="SIGCONT",
        plan=_signals("launcher-stopped", "SIGSTOP", _program("run")),
        network=False,
    ),
    Fault(
        name="agent-terminated",
        target=FaultTarget.NODE,
        like="a job's node agent is ended (SIGTERM)",
        undone="cannot be: who started it may start it again",
        plan=_signals("agent-terminated", "SIGTERM", _program("node")),
        network=False,
    ),
    Fault(
        name="rank-terminated",
        target=FaultTarget.RANK,
        like="a rank is ended (SIGTERM)",
        undone="cannot be: it has ended",
        plan=_signals("rank-terminated", "SIGTERM", _rank),
        network=False,
    ),
    Fault(
        name="slurmd-stopped",
        target=FaultTarget.NODE,
        like="slurmd hangs (SIGSTOP): connections to it are accepted and not answered",
        undone="SIGCONT",
        plan=_daemon_signal("slurmd-stopped", "SIGSTOP"),
        network=False,
    ),
    Fault(
        name="slurmd-terminated",
        target=FaultTarget.NODE,
        like="slurmd is ended in order, as for an upgrade",
        undone="slurmd is started, unless somebody has",
        plan=_daemon_signal("slurmd-terminated", "SIGTERM"),
        network=False,
    ),
    Fault(
        name="controller-terminated",
        target=FaultTarget.CONTROL,
        like="slurmctld is ended in order, as for an upgrade",
        undone="slurmctld is started",
        plan=_daemon_signal("controller-terminated", "SIGTERM"),
        network=False,
    ),
    Fault(
        name="watchdog-stopped",
        target=FaultTarget.CONTROL,
        like="`deeplink watch` hangs (SIGSTOP)",
        undone="SIGCONT",
        plan=_watchdog_signal("watchdog-stopped", "SIGSTOP"),
    ),
    Fault(
        name="watchdog-terminated",
        target=FaultTarget.CONTROL,
        like="`deeplink watch` is ended in order, as for an upgrade",
        undone="it is started again, as it was started before",
        plan=_watchdog_signal("watchdog-terminated", "SIGTERM"),
    ),
    Fault(
        name="disk-failing",
        target=FaultTarget.NODE,
        like="the node's SSD answers with input/output errors (EIO)",
        undone="it is well, and what was there is back",
        plan=_scripts(FAIL, WORK),
        mounts=True,
    ),
    Fault(
        name="storage-full",
        target=FaultTarget.ALL,
        like="the shared file system is full (ENOSPC)",
        undone="there is room again",
        plan=_storage_full,
    ),
    Fault(
        name="storage-readonly",
        target=FaultTarget.NODE,
        like="the shared file system is read-only on one node (EROFS); files that are open there can be written",
        undone="it can be written",
        plan=_storage_readonly,
    ),
)
FAULTS = {fault.name: fault for fault in _FAULTS}
"""Every fault by its name, in the order of the documentation."""


def fault_of(name: str) -> Fault:
    """Return the fault of that name."""
    if name not in FAULTS:
        raise SandboxError(f"there is no fault {name!r}", remedy=f"There are: {' '.join(FAULTS)}.", exit_code=2)
    return FAULTS[name]
