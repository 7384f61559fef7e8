"""Every fault: what it hits, what it is like on real machines, the steps that do and undo it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.settings import SSD
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.scheduler.testbed.lab.scene import Scene
    from deeplink.scheduler.testbed.processes import ProcessId

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


class Verb(StrEnum):
    """One kind of step. All may be done twice: the second time nothing changes."""

    CUT = "cut"  # the cable of `on`
    HEAL = "heal"
    OFF = "off"  # the power of `on`, its cable cut first
    BOOT = "boot"
    PAUSE = "pause"  # words: seconds
    SIGNAL = "signal"  # words: its name, then `pid:start` of each process
    RUN = "run"  # words: a command, as root on `on`
    DAEMON = "daemon"  # Slurm's on `on`, if it does not run
    FREEZE = "freeze"  # the shared folder
    THAW = "thaw"
    AGAIN = "again"  # start on `on` what was there: words: JSON of a `Started`
    DUTY = "duty"  # stop and continue processes by turns: words: share, period, `pid:start`...
    REST = "rest"  # end such a turn
    TEAR = "tear"  # words: file, where the whole one is kept
    MEND = "mend"
    CHMOD = "chmod"  # words: folder, the mode it is to have now, the mode it gets; octal
    WRITE = "write"  # words: file, text
    REMOVE = "remove"  # words: file


@dataclass(frozen=True, slots=True)
class FaultStep:
    """One step."""

    verb: Verb
    on: str = ""  # a machine or switch; empty where it is about none
    words: tuple[str, ...] = ()  # see `Verb`

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read what was written as JSON."""
        return cls(Verb(raw["verb"]), str(raw["on"]), tuple(map(str, raw["words"])))


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How a fault is done, and undone."""

    do: tuple[FaultStep, ...]
    undo: tuple[FaultStep, ...] = ()


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
    """One fault."""

    name: str
    target: FaultTarget
    like: str  # what it stands for on real machines, for people
    undone: str  # how it ends when it is undone, for people
    plan: Callable[[Scene], FaultPlan]  # from what is there to what is done
    network: bool = True  # whether it takes machines with networks and mounts of their own
    lasting: bool = True  # whether it is in effect until it is undone; else it is over once it is done
    mounts: bool = False  # whether it lies over the node's SSD: the newest of such hides the others


def no_target(fault: str, target: str, lacking: str) -> SandboxError:
    """Return the error of a fault that has nothing to hit: no rank, daemon or checkpoint is there."""
    return SandboxError(
        f"{fault}: {lacking}{f' on {target}' if target else ''}",
        remedy="`deeplink sandbox fault --list` says what each hits, `deeplink sandbox status` what is up.",
    )


def process_words(processes: Iterable[ProcessId]) -> tuple[str, ...]:
    """Return processes as words of a step."""
    return tuple(f"{process.pid}:{process.start}" for process in processes)


def _node_killed(scene: Scene) -> FaultPlan:
    return FaultPlan((FaultStep(Verb.OFF, scene.target),), (FaultStep(Verb.BOOT, scene.target),))


def _cut(scene: Scene) -> FaultPlan:
    return FaultPlan((FaultStep(Verb.CUT, scene.target),), (FaultStep(Verb.HEAL, scene.target),))


def _fast_reboot(scene: Scene) -> FaultPlan:
    boot = FaultStep(Verb.BOOT, scene.target)
    return FaultPlan(
        (FaultStep(Verb.OFF, scene.target), FaultStep(Verb.PAUSE, words=(f"{REBOOT_S:g}",)), boot), (boot,)
    )


def _signal(name: str, processes: tuple[ProcessId, ...]) -> FaultStep:
    return FaultStep(Verb.SIGNAL, words=(name, *process_words(processes)))


def _rank(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if not scene.ranks:
        raise no_target(fault, scene.target, "no rank runs")
    rank = min(scene.ranks) if scene.rank is None else scene.rank
    if rank not in scene.ranks:
        raise no_target(fault, scene.target, f"no rank {rank} runs")
    return scene.ranks[rank]


def _rank_stopped(scene: Scene) -> FaultPlan:
    there = _rank("rank-stopped", scene)
    return FaultPlan((_signal("SIGSTOP", there),), (_signal("SIGCONT", there),))


def _rank_killed(scene: Scene) -> FaultPlan:
    return FaultPlan((_signal("SIGKILL", _rank("rank-killed", scene)),))


def _slow_rank(scene: Scene) -> FaultPlan:
    there = _rank("slow-rank", scene)
    duty = FaultStep(Verb.DUTY, words=(f"{scene.share:g}", f"{DUTY_PERIOD_S:g}", *process_words(there)))
    return FaultPlan((duty,), (FaultStep(Verb.REST, words=duty.words), _signal("SIGCONT", there)))


def _rank_exit(scene: Scene) -> FaultPlan:
    file = f"{scene.target}/fail"
    often = "always" if scene.always else "once"
    text = f"{scene.rank or 0} {scene.step} 1 {often}\n"
    return FaultPlan((FaultStep(Verb.WRITE, words=(file, text)),), (FaultStep(Verb.REMOVE, words=(file,)),))


def _daemon(fault: str, scene: Scene) -> tuple[ProcessId, ...]:
    if scene.daemon is None:
        raise no_target(fault, scene.target, "Slurm's daemon does not run")
    return (scene.daemon,)


def _daemon_killed(fault: str) -> Callable[[Scene], FaultPlan]:
    def plan(scene: Scene) -> FaultPlan:
        return FaultPlan((_signal("SIGKILL", _daemon(fault, scene)),), (FaultStep(Verb.DAEMON, scene.target),))

    return plan


def _controller_frozen(scene: Scene) -> FaultPlan:
    there = _daemon("controller-frozen", scene)
    return FaultPlan((_signal("SIGSTOP", there),), (_signal("SIGCONT", there),))


def _watchdog_killed(scene: Scene) -> FaultPlan:
    if not scene.watchdogs:
        raise no_target("watchdog-killed", scene.target, "no `deeplink watch` runs")
    kill = _signal("SIGKILL", tuple(process for process, _ in scene.watchdogs))
    again = (FaultStep(Verb.AGAIN, scene.target, (started.packed(),)) for _, started in scene.watchdogs)
    return FaultPlan((kill,), tuple(again))


def _agents_silent(scene: Scene) -> FaultPlan:
    ports = [(node, port) for node, those in sorted(scene.agents.items()) for port in those]
    if not ports:
        raise no_target("agents-silent", "", "no node agent listens")
    return _unanswered(ports)


def _unanswered(ports: Sequence[tuple[str, int]]) -> FaultPlan:
    # Answers vanish on their way out, as in a filter somebody set wrongly: no one hears a refusal.
    def rules(what: str) -> tuple[FaultStep, ...]:
        return tuple(
            FaultStep(Verb.RUN, node, ("ip", "rule", what, "ipproto", _TCP, "sport", str(port), "blackhole"))
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
    return _as_root(CTL, drain, f"{gone}; {update} state=resume; {gone}; exit 1")


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


def _disk(do: str, undo: str) -> Callable[[Scene], FaultPlan]:
    def plan(scene: Scene) -> FaultPlan:
        return _as_root(scene.target, do, undo)

    return plan


def _as_root(machine: str, do: str, undo: str) -> FaultPlan:
    return FaultPlan(
        (FaultStep(Verb.RUN, machine, ("sh", "-c", do)),), (FaultStep(Verb.RUN, machine, ("sh", "-c", undo)),)
    )


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
        plan=_rank_stopped,
        network=False,
    ),
    Fault(
        name="rank-killed",
        target=FaultTarget.RANK,
        like="a rank dies by a signal (SIGKILL), as by the kernel's out-of-memory killer",
        undone="cannot be: it is dead",
        plan=_rank_killed,
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
        plan=_daemon_killed("slurmd-killed"),
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
        plan=_daemon_killed("controller-down"),
        network=False,
    ),
    Fault(
        name="controller-frozen",
        target=FaultTarget.CONTROL,
        like="slurmctld hangs: connections to it are accepted and not answered",
        undone="SIGCONT",
        plan=_controller_frozen,
        network=False,
    ),
    Fault(
        name="watchdog-killed",
        target=FaultTarget.CONTROL,
        like="`deeplink watch` dies without a word (SIGKILL)",
        undone="it is started again, as it was started before",
        plan=_watchdog_killed,
    ),
    Fault(
        name="agents-silent",
        target=FaultTarget.ALL,
        like="a filter drops what all node agents send: all are silent at once, and no node is at fault",
        undone="the filter is gone",
        plan=_agents_silent,
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
        plan=_disk(FILL, DRAIN),
        mounts=True,
    ),
    Fault(
        name="disk-readonly",
        target=FaultTarget.NODE,
        like="the node's SSD is read-only, as after an I/O error",
        undone="it can be written",
        plan=_disk(READ_ONLY, WRITABLE),
        mounts=True,
    ),
    Fault(
        name="folder-squatted",
        target=FaultTarget.NODE,
        like=f"another user was first to make {STORE} on the node's SSD: the job may not use it",
        undone="the other user's folder is gone, and what was there is back",
        plan=_disk(SQUAT, LEAVE),
        mounts=True,
    ),
)
FAULTS = {fault.name: fault for fault in _FAULTS}
"""Every fault by its name, in the order of the documentation."""


def fault_of(name: str) -> Fault:
    """Return the fault of that name."""
    if name not in FAULTS:
        raise SandboxError(f"there is no fault {name!r}", remedy=f"There are: {' '.join(FAULTS)}.", exit_code=2)
    return FAULTS[name]
