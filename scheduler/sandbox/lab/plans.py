"""What each fault does and undoes: from what is there to steps. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.lab.errors import NoTargetError
from deeplink.scheduler.sandbox.lab.steps import FaultPlan, FaultStep, Verb, process_words
from deeplink.scheduler.sandbox.settings import SSD
from deeplink.scheduler.sandbox.shape import CTL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.scheduler.sandbox.lab.scene import Scene
    from deeplink.scheduler.sandbox.processes import ProcessId

REBOOT_S = 2.0
"""How long a node is off in a fast reboot. Slurm does not notice (measured: up to 3 s)."""
DUTY_PERIOD_S = 0.2
DRAINED = "fault-laboratory:node-drained"
STORE = SSD / "deeplink"
"""Where a job's store is, by all that is written about sandboxes."""
NOBODYS = "0"
"""The mode of a folder that only root can read."""
_TCP = "6"  # by number: a minimal Debian has no /etc/protocols
_FULL = "/run/deeplink-full"
# A file system of 64 KiB, filled to the brim, lies over the SSD: what is there can be read, and nothing fits.
FILL = f"""set -e
mountpoint -q {_FULL} && exit 0
mkdir -p {_FULL}
mount -t tmpfs -o size=64k full {_FULL}
mkdir {_FULL}/upper {_FULL}/work
chmod --reference={SSD} {_FULL}/upper
chown --reference={SSD} {_FULL}/upper
mount -t overlay -o lowerdir={SSD},upperdir={_FULL}/upper,workdir={_FULL}/work full {SSD}
cat /dev/zero > {_FULL}/fill 2>/dev/null || true
"""
# What lies over the SSD alone is taken away: it is a mount itself, and filling it may have been broken off.
DRAIN = f"""mountpoint -q {_FULL} || exit 0
if grep -q '^full {SSD} overlay ' /proc/mounts; then umount -l {SSD}; fi
umount -l {_FULL}
"""
READ_ONLY = f"""set -e
test -e /run/deeplink-readonly && exit 0
mount --bind {SSD} {SSD}
mount -o remount,bind,ro {SSD}
touch /run/deeplink-readonly
"""
WRITABLE = f"test -e /run/deeplink-readonly || exit 0; rm /run/deeplink-readonly; umount -l {SSD}"
# Another user's folder lies over the one that is there, so that this one is back untouched, whoever ends us.
_SQUATTED = "/run/deeplink-squatted"
SQUAT = f"""set -e
mountpoint -q {STORE} && exit 0
if ! test -d {STORE}; then
    touch {_SQUATTED}
    mkdir -m 700 {STORE}
    chown --reference={SSD} {STORE}
fi
mount -t tmpfs -o size=64k,mode=0755,uid=65534,gid=65534 squatted {STORE}
touch {STORE}/theirs
chown 65534:65534 {STORE}/theirs
"""
LEAVE = f"""if grep -q '^squatted {STORE} tmpfs ' /proc/mounts; then umount -l {STORE}; fi
test -e {_SQUATTED} || exit 0
rmdir {STORE} 2> /dev/null
rm {_SQUATTED}
"""


def node_killed(scene: Scene) -> FaultPlan:
    """Return how a node loses power."""
    return FaultPlan((FaultStep(Verb.OFF, scene.target),), (FaultStep(Verb.BOOT, scene.target),))


def cut(scene: Scene) -> FaultPlan:
    """Return how a cable is pulled."""
    return FaultPlan((FaultStep(Verb.CUT, scene.target),), (FaultStep(Verb.HEAL, scene.target),))


def fast_reboot(scene: Scene) -> FaultPlan:
    """Return how a node is off for a moment and boots."""
    boot = FaultStep(Verb.BOOT, scene.target)
    return FaultPlan(
        (FaultStep(Verb.OFF, scene.target), FaultStep(Verb.PAUSE, words=(f"{REBOOT_S:g}",)), boot), (boot,)
    )


def _signal(name: str, processes: tuple[ProcessId, ...]) -> FaultStep:
    return FaultStep(Verb.SIGNAL, words=(name, *process_words(processes)))


def _rank(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if not scene.ranks:
        raise NoTargetError(fault, scene.target, "no rank runs")
    rank = min(scene.ranks) if scene.rank is None else scene.rank
    if rank not in scene.ranks:
        raise NoTargetError(fault, scene.target, f"no rank {rank} runs")
    return scene.ranks[rank]


def rank_stopped(scene: Scene) -> FaultPlan:
    """Return how a rank is stopped."""
    there = _rank("rank-stopped", scene)
    return FaultPlan((_signal("SIGSTOP", there),), (_signal("SIGCONT", there),))


def rank_killed(scene: Scene) -> FaultPlan:
    """Return how a rank is killed."""
    return FaultPlan((_signal("SIGKILL", _rank("rank-killed", scene)),))


def slow_rank(scene: Scene) -> FaultPlan:
    """Return how a rank stands still for a share of the time."""
    there = _rank("slow-rank", scene)
    duty = FaultStep(Verb.DUTY, words=(f"{scene.share:g}", f"{DUTY_PERIOD_S:g}", *process_words(there)))
    return FaultPlan((duty,), (FaultStep(Verb.REST, words=duty.words), _signal("SIGCONT", there)))


def rank_exit(scene: Scene) -> FaultPlan:
    """Return how a rank is told to exit."""
    file = f"{scene.target}/fail"
    often = "always" if scene.always else "once"
    text = f"{scene.rank or 0} {scene.step} 1 {often}\n"
    return FaultPlan((FaultStep(Verb.WRITE, words=(file, text)),), (FaultStep(Verb.REMOVE, words=(file,)),))


def _daemon(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if scene.daemon is None:
        raise NoTargetError(fault, scene.target, "Slurm's daemon does not run")
    return (scene.daemon,)


def daemon_killed(fault: str) -> Callable[[Scene], FaultPlan]:
    """Return what plans how Slurm's daemon on the target is killed."""

    def plan(scene: Scene) -> FaultPlan:
        return FaultPlan((_signal("SIGKILL", _daemon(fault, scene)),), (FaultStep(Verb.DAEMON, scene.target),))

    return plan


def controller_frozen(scene: Scene) -> FaultPlan:
    """Return how slurmctld is stopped."""
    there = _daemon("controller-frozen", scene)
    return FaultPlan((_signal("SIGSTOP", there),), (_signal("SIGCONT", there),))


def watchdog_killed(scene: Scene) -> FaultPlan:
    """Return how every watchdog on the target is killed."""
    if not scene.watchdogs:
        raise NoTargetError("watchdog-killed", scene.target, "no `deeplink watch` runs")
    kill = _signal("SIGKILL", tuple(process for process, _ in scene.watchdogs))
    again = (FaultStep(Verb.AGAIN, scene.target, (started.packed(),)) for _, started in scene.watchdogs)
    return FaultPlan((kill,), tuple(again))


def agents_silent(scene: Scene) -> FaultPlan:
    """Return how what all node agents send vanishes."""
    ports = [(node, port) for node, those in sorted(scene.agents.items()) for port in those]
    if not ports:
        raise NoTargetError("agents-silent", "", "no node agent listens")
    return _unanswered(ports)


def data_cut(scene: Scene) -> FaultPlan:
    """Return how what the target's data ports send vanishes."""
    if not scene.data_ports:
        raise NoTargetError("data-cut", scene.target, "no node agent serves samples")
    return _unanswered([(scene.target, port) for port in scene.data_ports])


def _unanswered(ports: Sequence[tuple[str, int]]) -> FaultPlan:
    # Answers vanish on their way out, as in a filter somebody set wrongly: nobody hears a refusal.
    def rules(what: str) -> tuple[FaultStep, ...]:
        return tuple(
            FaultStep(Verb.RUN, node, ("ip", "rule", what, "ipproto", _TCP, "sport", str(port), "blackhole"))
            for node, port in ports
        )

    return FaultPlan(rules("add"), rules("del"))


def node_drained(scene: Scene) -> FaultPlan:
    """Return how an administrator drains a node; one that is drained already is left as it is."""
    show = f'now=$(scontrol show node -o {scene.target}) || exit 1; echo "$now" | grep -q'
    update = f"scontrol update nodename={scene.target}"
    drain = f"{show} ' State=[^ ]*DRAIN' || {update} state=drain reason={DRAINED}"
    # Whoever drained it since, for a reason of their own, is not undone; 24.11 leaves the reason to a node that is
    # back in service. One that a controller started just now has not heard of is resumed with an error (22.05).
    gone = f"{show} ' State=[^ ]*DRAIN.* Reason={DRAINED} ' || exit 0"
    return _as_root(CTL, drain, f"{gone}; {update} state=resume; {gone}; exit 1")


def checkpoints_unreadable(scene: Scene) -> FaultPlan:
    """Return how a folder can be neither listed, read nor written."""
    if scene.mode is None:
        raise NoTargetError("checkpoints-unreadable", scene.target, "no checkpoint lies there")
    return FaultPlan(
        (FaultStep(Verb.CHMOD, words=(scene.target, scene.mode, NOBODYS)),),
        (FaultStep(Verb.CHMOD, words=(scene.target, NOBODYS, scene.mode)),),
    )


def storage_frozen(_scene: Scene) -> FaultPlan:
    """Return how the shared storage is frozen."""
    return FaultPlan((FaultStep(Verb.FREEZE),), (FaultStep(Verb.THAW),))


def checkpoint_torn(scene: Scene) -> FaultPlan:
    """Return how the newest checkpoint loses half of its largest file."""
    if scene.torn is None:
        raise NoTargetError("checkpoint-torn", scene.target, "no checkpoint lies there")
    return FaultPlan((FaultStep(Verb.TEAR, words=scene.torn),), (FaultStep(Verb.MEND, words=scene.torn),))


def disk(do: str, undo: str) -> Callable[[Scene], FaultPlan]:
    """Return what plans how a script runs on the target as root, and another one undoes it."""

    def plan(scene: Scene) -> FaultPlan:
        return _as_root(scene.target, do, undo)

    return plan


def _as_root(machine: str, do: str, undo: str) -> FaultPlan:
    return FaultPlan(
        (FaultStep(Verb.RUN, machine, ("sh", "-c", do)),), (FaultStep(Verb.RUN, machine, ("sh", "-c", undo)),)
    )
