"""Every fault: what it hits, what it is like on real machines, how it is done and undone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.lab.errors import NoTargetError, UnknownFaultError
from deeplink.scheduler.sandbox.lab.steps import Plan, Step, Verb, process_words
from deeplink.scheduler.sandbox.settings import SSD

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.sandbox.lab.scene import Scene
    from deeplink.scheduler.sandbox.processes import ProcessId

REBOOT_S = 2.0
"""How long a node is off in a fast reboot. Slurm does not notice (measured: up to 3 s)."""
DUTY_PERIOD_S = 0.2
_FULL = "/run/deeplink-full"
# A file system of 64 KiB, filled to the brim, lies over the SSD: what is there can be read, and nothing fits.
_FILL = f"""set -e
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
_DRAIN = f"""mountpoint -q {_FULL} || exit 0
if grep -q '^full {SSD} overlay ' /proc/mounts; then umount -l {SSD}; fi
umount -l {_FULL}
"""
_READ_ONLY = f"""set -e
test -e /run/deeplink-readonly && exit 0
mount --bind {SSD} {SSD}
mount -o remount,bind,ro {SSD}
touch /run/deeplink-readonly
"""
_WRITABLE = f"test -e /run/deeplink-readonly || exit 0; rm /run/deeplink-readonly; umount -l {SSD}"


class Target(StrEnum):
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
        plan: from what is there to what is done.
    """

    name: str
    target: Target
    like: str
    undone: str
    plan: Callable[[Scene], Plan]
    network: bool = True
    lasting: bool = True


def _node_killed(scene: Scene) -> Plan:
    return Plan((Step(Verb.OFF, scene.target),), (Step(Verb.BOOT, scene.target),))


def _cut(scene: Scene) -> Plan:
    return Plan((Step(Verb.CUT, scene.target),), (Step(Verb.HEAL, scene.target),))


def _fast_reboot(scene: Scene) -> Plan:
    boot = Step(Verb.BOOT, scene.target)
    return Plan((Step(Verb.OFF, scene.target), Step(Verb.PAUSE, words=(f"{REBOOT_S:g}",)), boot), (boot,))


def _signal(name: str, processes: tuple[ProcessId, ...]) -> Step:
    return Step(Verb.SIGNAL, words=(name, *process_words(processes)))


def _rank(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if not scene.ranks:
        raise NoTargetError(fault, scene.target, "no rank runs")
    rank = min(scene.ranks) if scene.rank is None else scene.rank
    if rank not in scene.ranks:
        raise NoTargetError(fault, scene.target, f"no rank {rank} runs")
    return scene.ranks[rank]


def _rank_stopped(scene: Scene) -> Plan:
    there = _rank("rank-stopped", scene)
    return Plan((_signal("SIGSTOP", there),), (_signal("SIGCONT", there),))


def _rank_killed(scene: Scene) -> Plan:
    return Plan((_signal("SIGKILL", _rank("rank-killed", scene)),))


def _slow_rank(scene: Scene) -> Plan:
    there = _rank("slow-rank", scene)
    duty = Step(Verb.DUTY, words=(f"{scene.share:g}", f"{DUTY_PERIOD_S:g}", *process_words(there)))
    return Plan((duty,), (Step(Verb.REST, words=duty.words), _signal("SIGCONT", there)))


def _rank_exit(scene: Scene) -> Plan:
    file = f"{scene.target}/fail"
    often = "always" if scene.always else "once"
    text = f"{scene.rank or 0} {scene.step} 1 {often}\n"
    return Plan((Step(Verb.WRITE, words=(file, text)),), (Step(Verb.REMOVE, words=(file,)),))


def _daemon(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if scene.daemon is None:
        raise NoTargetError(fault, scene.target, "Slurm's daemon does not run")
    return (scene.daemon,)


def _daemon_killed(fault: str) -> Callable[[Scene], Plan]:
    def plan(scene: Scene) -> Plan:
        return Plan((_signal("SIGKILL", _daemon(fault, scene)),), (Step(Verb.DAEMON, scene.target),))

    return plan


def _controller_frozen(scene: Scene) -> Plan:
    there = _daemon("controller-frozen", scene)
    return Plan((_signal("SIGSTOP", there),), (_signal("SIGCONT", there),))


def _watchdog_killed(scene: Scene) -> Plan:
    if not scene.watchdogs:
        raise NoTargetError("watchdog-killed", scene.target, "no `deeplink watch` runs")
    kill = _signal("SIGKILL", tuple(process for process, _ in scene.watchdogs))
    again = (Step(Verb.AGAIN, scene.target, (started.packed(),)) for _, started in scene.watchdogs)
    return Plan((kill,), tuple(again))


def _agents_silent(scene: Scene) -> Plan:
    # Answers vanish on their way out, as in a filter somebody set wrongly: nobody hears a refusal.
    def rules(what: str) -> tuple[Step, ...]:
        return tuple(
            Step(Verb.RUN, node, ("ip", "rule", what, "ipproto", "tcp", "sport", str(port), "blackhole"))
            for node, ports in sorted(scene.agents.items())
            for port in ports
        )

    if not any(scene.agents.values()):
        raise NoTargetError("agents-silent", "", "no node agent listens")
    return Plan(rules("add"), rules("del"))


def _storage_frozen(_scene: Scene) -> Plan:
    return Plan((Step(Verb.FREEZE),), (Step(Verb.THAW),))


def _checkpoint_torn(scene: Scene) -> Plan:
    if scene.torn is None:
        raise NoTargetError("checkpoint-torn", scene.target, "no checkpoint lies there")
    return Plan((Step(Verb.TEAR, words=scene.torn),), (Step(Verb.MEND, words=scene.torn),))


def _disk(do: str, undo: str) -> Callable[[Scene], Plan]:
    def plan(scene: Scene) -> Plan:
        return Plan(
            (Step(Verb.RUN, scene.target, ("sh", "-c", do)),),
            (Step(Verb.RUN, scene.target, ("sh", "-c", undo)),),
        )

    return plan


_FAULTS = (
    Fault(
        name="node-killed",
        target=Target.NODE,
        like="power loss: the link goes first, then every process",
        undone="the node boots",
        plan=_node_killed,
        network=False,
    ),
    Fault(
        name="node-cut",
        target=Target.NODE,
        like="a cable is pulled: its ranks and slurmd live on, and nobody hears them",
        undone="the cable is put back",
        plan=_cut,
    ),
    Fault(
        name="leaf-cut",
        target=Target.LEAF,
        like="a leaf switch loses its uplink: its nodes hear each other and nobody else",
        undone="the uplink is back",
        plan=_cut,
    ),
    Fault(
        name="fast-reboot",
        target=Target.NODE,
        like=f"a kernel panic and a boot within {REBOOT_S:g} s: Slurm does not notice, the boot id is another one",
        undone="it is over: the node is up",
        plan=_fast_reboot,
        lasting=False,
    ),
    Fault(
        name="rank-stopped",
        target=Target.RANK,
        like="a rank hangs (SIGSTOP): alive, silent, holding its GPU",
        undone="SIGCONT",
        plan=_rank_stopped,
        network=False,
    ),
    Fault(
        name="rank-killed",
        target=Target.RANK,
        like="a rank dies by a signal (SIGKILL), as by the kernel's out-of-memory killer",
        undone="cannot be: it is dead",
        plan=_rank_killed,
        network=False,
    ),
    Fault(
        name="rank-exit",
        target=Target.FOLDER,
        like="the training script exits with 1 at a step, once or always (the laboratory's own ranks obey it)",
        undone="the order is taken back",
        plan=_rank_exit,
        network=False,
    ),
    Fault(
        name="slow-rank",
        target=Target.RANK,
        like="a straggler: one rank stands still for a share of the time",
        undone="it runs on",
        plan=_slow_rank,
        network=False,
    ),
    Fault(
        name="slurmd-killed",
        target=Target.NODE,
        like="slurmd dies, the job's processes live",
        undone="slurmd is started, unless somebody has",
        plan=_daemon_killed("slurmd-killed"),
        network=False,
    ),
    Fault(
        name="controller-down",
        target=Target.CONTROL,
        like="slurmctld dies: connections to it are refused",
        undone="slurmctld is started",
        plan=_daemon_killed("controller-down"),
        network=False,
    ),
    Fault(
        name="controller-frozen",
        target=Target.CONTROL,
        like="slurmctld hangs: connections to it are accepted and not answered",
        undone="SIGCONT",
        plan=_controller_frozen,
        network=False,
    ),
    Fault(
        name="watchdog-killed",
        target=Target.CONTROL,
        like="`deeplink watch` dies without a word (SIGKILL)",
        undone="it is started again, as it was started before",
        plan=_watchdog_killed,
    ),
    Fault(
        name="agents-silent",
        target=Target.ALL,
        like="a filter drops what all node agents send: all are silent at once, and no node is at fault",
        undone="the filter is gone",
        plan=_agents_silent,
    ),
    Fault(
        name="storage-frozen",
        target=Target.ALL,
        like="the shared file system stalls: who writes to it hangs, unkillable (reading goes on)",
        undone="it moves again, and what hung is written",
        plan=_storage_frozen,
    ),
    Fault(
        name="checkpoint-torn",
        target=Target.FOLDER,
        like="the newest checkpoint lost half of its largest file",
        undone="the whole file is put back",
        plan=_checkpoint_torn,
        network=False,
    ),
    Fault(
        name="disk-full",
        target=Target.NODE,
        like="the node's SSD is full",
        undone="there is room again; what was deleted meanwhile is back",
        plan=_disk(_FILL, _DRAIN),
    ),
    Fault(
        name="disk-readonly",
        target=Target.NODE,
        like="the node's SSD is read-only, as after an I/O error",
        undone="it can be written",
        plan=_disk(_READ_ONLY, _WRITABLE),
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
