"""How faults are planned: from what is there to the steps that do and undo one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.testbed.lab.disks import (
    brim,
    sealed,
)
from deeplink.scheduler.testbed.lab.steps import (
    FaultPlan,
    FaultStep,
    Verb,
    as_root,
    no_target,
    process_words,
    signalled,
)
from deeplink.scheduler.testbed.lab.traffic import TCP
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


def node_killed(scene: Scene) -> FaultPlan:
    """Plan that a node loses its link, then its power."""
    return FaultPlan((FaultStep(Verb.OFF, scene.target),), (FaultStep(Verb.BOOT, scene.target),))


def cut(scene: Scene) -> FaultPlan:
    """Plan that a cable is pulled."""
    return FaultPlan((FaultStep(Verb.CUT, scene.target),), (FaultStep(Verb.HEAL, scene.target),))


def fast_reboot(scene: Scene) -> FaultPlan:
    """Plan that a node is off for `REBOOT_S`."""
    boot = FaultStep(Verb.BOOT, scene.target)
    return FaultPlan(
        (FaultStep(Verb.OFF, scene.target), FaultStep(Verb.PAUSE, words=(f"{REBOOT_S:g}",)), boot), (boot,)
    )


def rank_processes(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    """Return the processes of the rank that was asked for, else of the first one there."""
    if not scene.ranks:
        raise no_target(fault, scene.target, "no rank runs")
    rank = min(scene.ranks) if scene.rank is None else scene.rank
    if rank not in scene.ranks:
        raise no_target(fault, scene.target, f"no rank {rank} runs")
    return scene.ranks[rank]


def signals(
    fault: str, name: str, of: Callable[[str, Scene], tuple[ProcessId, ...]]
) -> Callable[[Scene], FaultPlan]:
    """Return how processes get a signal; those that were stopped go on afterwards."""

    def plan(scene: Scene) -> FaultPlan:
        there = of(fault, scene)
        undo = (signalled("SIGCONT", there),) if name == "SIGSTOP" else ()
        return FaultPlan((signalled(name, there),), undo)

    return plan


def program(verb: str) -> Callable[[str, Scene], tuple[ProcessId, ...]]:
    """Return how the processes of a job's `deeplink VERB` are found."""

    def of(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
        if not scene.programs.get(verb):
            raise no_target(fault, scene.target, f"no job's `deeplink {verb}` runs")
        return scene.programs[verb]

    return of


def slow_rank(scene: Scene) -> FaultPlan:
    """Plan that a rank stands still for a share of the time."""
    there = rank_processes("slow-rank", scene)
    duty = FaultStep(Verb.DUTY, words=(f"{scene.share:g}", f"{DUTY_PERIOD_S:g}", *process_words(there)))
    return FaultPlan((duty,), (FaultStep(Verb.REST, words=duty.words), signalled("SIGCONT", there)))


def rank_exit(scene: Scene) -> FaultPlan:
    """Plan that a rank exits with 1, as its folder tells it."""
    file = f"{scene.target}/fail"
    often = "always" if scene.always else "once"
    text = f"{scene.rank or 0} {scene.step} 1 {often}\n"
    return FaultPlan((FaultStep(Verb.WRITE, words=(file, text)),), (FaultStep(Verb.REMOVE, words=(file,)),))


def _daemon(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if scene.daemon is None:
        raise no_target(fault, scene.target, "Slurm's daemon does not run")
    return (scene.daemon,)


def daemon_signal(fault: str, name: str) -> Callable[[Scene], FaultPlan]:
    """Return how Slurm's daemon gets a signal; it goes on afterwards, or is started again."""

    def plan(scene: Scene) -> FaultPlan:
        there = _daemon(fault, scene)
        undo = signalled("SIGCONT", there) if name == "SIGSTOP" else FaultStep(Verb.DAEMON, scene.target)
        return FaultPlan((signalled(name, there),), (undo,))

    return plan


def watchdog_signal(fault: str, name: str) -> Callable[[Scene], FaultPlan]:
    """Return how every `deeplink watch` gets a signal; each goes on afterwards, or is started again."""

    def plan(scene: Scene) -> FaultPlan:
        if not scene.watchdogs:
            raise no_target(fault, scene.target, "no `deeplink watch` runs")
        there = tuple(process for process, _ in scene.watchdogs)
        again = tuple(FaultStep(Verb.AGAIN, scene.target, (started.packed(),)) for _, started in scene.watchdogs)
        undo = (signalled("SIGCONT", there),) if name == "SIGSTOP" else again
        return FaultPlan((signalled(name, there),), undo)

    return plan


def agents_unanswered(fault: str) -> Callable[[Scene], FaultPlan]:
    """Return how what node agents send is dropped."""

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


def node_drained(scene: Scene) -> FaultPlan:
    """Plan that an administrator drains a node, and resumes it if nobody drained it since."""
    show = f'now=$(scontrol show node -o {scene.target}) || exit 1; echo "$now" | grep -q'
    update = f"scontrol update nodename={scene.target}"
    drain = f"{show} ' State=[^ ]*DRAIN' || {update} state=drain reason={DRAINED}"
    # Whoever drained it since, for a reason of their own, is not undone; 24.11 leaves the reason to a node that is
    # back in service. One that a controller started just now has not heard of is resumed with an error (22.05).
    gone = f"{show} ' State=[^ ]*DRAIN.* Reason={DRAINED} ' || exit 0"
    return as_root(CTL, drain, f"{gone}; {update} state=resume; {gone}; exit 1")


def checkpoints_unreadable(scene: Scene) -> FaultPlan:
    """Plan that a folder of checkpoints refuses its own user."""
    if scene.mode is None:
        raise no_target("checkpoints-unreadable", scene.target, "no checkpoint lies there")
    return FaultPlan(
        (FaultStep(Verb.CHMOD, words=(scene.target, scene.mode, NOBODYS)),),
        (FaultStep(Verb.CHMOD, words=(scene.target, NOBODYS, scene.mode)),),
    )


def storage_frozen(_scene: Scene) -> FaultPlan:
    """Plan that whoever writes to the shared folder hangs."""
    return FaultPlan((FaultStep(Verb.FREEZE),), (FaultStep(Verb.THAW),))


def checkpoint_torn(scene: Scene) -> FaultPlan:
    """Plan that the newest checkpoint loses half of its largest file."""
    if scene.torn is None:
        raise no_target("checkpoint-torn", scene.target, "no checkpoint lies there")
    return FaultPlan((FaultStep(Verb.TEAR, words=scene.torn),), (FaultStep(Verb.MEND, words=scene.torn),))


def scripts(do: str, undo: str) -> Callable[[Scene], FaultPlan]:
    """Return how two shell scripts do and undo a fault on a machine."""

    def plan(scene: Scene) -> FaultPlan:
        return as_root(scene.target, do, undo)

    return plan


def storage_full(scene: Scene) -> FaultPlan:
    """Plan that the shared folder takes nothing more."""
    return as_root(CTL, *brim(scene.homes))


def storage_readonly(scene: Scene) -> FaultPlan:
    """Plan that the shared folder cannot be written on one machine."""
    return as_root(scene.target, *sealed(scene.homes))


def slurmd_unanswered(scene: Scene) -> FaultPlan:
    """Plan that what slurmd sends is dropped."""
    return _unanswered([(scene.target, NODE_PORT)])
