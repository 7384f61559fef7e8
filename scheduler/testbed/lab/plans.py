"""How faults are planned: from what is there to the steps, and scripts, that do and undo one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.testbed.lab.scene import (
    FaultPlan,
    FaultStep,
    Verb,
    as_root,
    no_target,
    process_words,
    signalled,
)
from deeplink.scheduler.testbed.settings import NODE_PORT, SSD
from deeplink.scheduler.testbed.shape import CTL, INTERFACE

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


def rank_processes(scene: Scene) -> tuple[ProcessId, ...]:
    """Return the processes of the rank that was asked for, else of the first one there."""
    if not scene.ranks:
        raise no_target(scene.fault, scene.target, "no rank runs")
    rank = min(scene.ranks) if scene.rank is None else scene.rank
    if rank not in scene.ranks:
        raise no_target(scene.fault, scene.target, f"no rank {rank} runs")
    return scene.ranks[rank]


def signals(name: str, of: Callable[[Scene], tuple[ProcessId, ...]]) -> Callable[[Scene], FaultPlan]:
    """Return how processes get a signal; those that were stopped go on afterwards."""

    def plan(scene: Scene) -> FaultPlan:
        there = of(scene)
        undo = (signalled("SIGCONT", there),) if name == "SIGSTOP" else ()
        return FaultPlan((signalled(name, there),), undo)

    return plan


def program(verb: str) -> Callable[[Scene], tuple[ProcessId, ...]]:
    """Return how the processes of a job's `deeplink VERB` are found."""

    def of(scene: Scene) -> tuple[ProcessId, ...]:
        if not scene.programs.get(verb):
            raise no_target(scene.fault, scene.target, f"no job's `deeplink {verb}` runs")
        return scene.programs[verb]

    return of


def slow_rank(scene: Scene) -> FaultPlan:
    """Plan that a rank stands still for a share of the time."""
    there = rank_processes(scene)
    duty = FaultStep(Verb.DUTY, words=(f"{scene.share:g}", f"{DUTY_PERIOD_S:g}", *process_words(there)))
    return FaultPlan((duty,), (FaultStep(Verb.REST, words=duty.words), signalled("SIGCONT", there)))


def rank_exit(scene: Scene) -> FaultPlan:
    """Plan that a rank exits with 1, as its folder tells it."""
    file = f"{scene.target}/fail"
    often = "always" if scene.always else "once"
    text = f"{scene.rank or 0} {scene.step} 1 {often}\n"
    return FaultPlan((FaultStep(Verb.WRITE, words=(file, text)),), (FaultStep(Verb.REMOVE, words=(file,)),))


def daemon_signal(name: str) -> Callable[[Scene], FaultPlan]:
    """Return how Slurm's daemon gets a signal; it goes on afterwards, or is started again."""

    def plan(scene: Scene) -> FaultPlan:
        if scene.daemon is None:
            raise no_target(scene.fault, scene.target, "Slurm's daemon does not run")
        there = (scene.daemon,)
        undo = signalled("SIGCONT", there) if name == "SIGSTOP" else FaultStep(Verb.DAEMON, scene.target)
        return FaultPlan((signalled(name, there),), (undo,))

    return plan


def watchdog_signal(name: str) -> Callable[[Scene], FaultPlan]:
    """Return how every `deeplink watch` gets a signal; each goes on afterwards, or is started again."""

    def plan(scene: Scene) -> FaultPlan:
        if not scene.watchdogs:
            raise no_target(scene.fault, scene.target, "no `deeplink watch` runs")
        there = tuple(process for process, _ in scene.watchdogs)
        again = tuple(FaultStep(Verb.AGAIN, scene.target, (started.packed(),)) for _, started in scene.watchdogs)
        undo = (signalled("SIGCONT", there),) if name == "SIGSTOP" else again
        return FaultPlan((signalled(name, there),), undo)

    return plan


def agents_unanswered(scene: Scene) -> FaultPlan:
    """Plan that what node agents send is dropped."""
    ports = [(node, port) for node, those in sorted(scene.agents.items()) for port in those]
    if not ports:
        raise no_target(scene.fault, scene.target, "no node agent listens")
    return _unanswered(ports)


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
        raise no_target(scene.fault, scene.target, "no checkpoint lies there")
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
        raise no_target(scene.fault, scene.target, "no checkpoint lies there")
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


STORE = SSD / "deeplink"
"""Where a job's store is, by all that is written about sandboxes."""
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
# A file system of its own lies over the SSD, and is shut down (EXT4_IOC_SHUTDOWN): it answers everything with EIO.
_EIO = "/run/deeplink-eio"
FAIL = f"""set -e
mountpoint -q {_EIO} && exit 0
mkdir -p {_EIO}
mount -t tmpfs -o size=4m eio {_EIO}
truncate -s 2M {_EIO}/image
mkfs.ext4 -q {_EIO}/image
mount -o loop {_EIO}/image {SSD}
python3 -c 'import fcntl, os; fcntl.ioctl(os.open("{SSD}", os.O_RDONLY), 0x8004587D, b"\\2\\0\\0\\0")'
"""
WORK = f"""mountpoint -q {_EIO} || exit 0
if grep -q ' {SSD} ext4 ' /proc/mounts; then umount -l {SSD}; fi
umount -l {_EIO}
"""


def brim(folder: str) -> tuple[str, str]:
    """Return the scripts that fill the file system of a folder to the last byte, and that make room again."""
    fill = f"{folder}/.deeplink-full"
    # Never the host's own disk: the folder has to be a file system of its own.
    do = f"""mountpoint -q {folder} || {{ echo {folder} is no file system of its own >&2; exit 1; }}
fallocate -l $(df --output=avail -B1 {folder} | tail -1) {fill} 2>/dev/null
cat /dev/zero > {fill}.rest 2>/dev/null
sync -f {folder}
"""
    return do, f"rm -f {fill} {fill}.rest"


def sealed(folder: str) -> tuple[str, str]:
    """Return the scripts that make a folder read-only on one machine, and writable again; open files stay so."""
    mark = "/run/deeplink-sealed"
    seal = f"""set -e
test -e {mark} && exit 0
mount --bind {folder} {folder}
mount -o remount,bind,ro {folder}
touch {mark}
"""
    return seal, f"test -e {mark} || exit 0; rm {mark}; umount -l {folder}"


TCP = "6"  # by number: a minimal Debian has no /etc/protocols
_PORTS = "20000-31999"  # of ranks' own rendezvous (docs/launch.md)
# A queue without room: who sends is told nothing.
SENDS = (
    f"tc qdisc replace dev {INTERFACE} root pfifo limit 0",
    f"tc qdisc del dev {INTERFACE} root 2>/dev/null || true",
)
# The kernel asks first what is for the host itself: a filter of what comes in has to be before that.
RECEIVES = (
    f"""set -e
ip rule | grep -q 'iif {INTERFACE} blackhole' && exit 0
ip rule add pref 2 lookup local
ip rule add pref 1 iif {INTERFACE} blackhole
ip rule del pref 0
""",
    f"""ip rule | grep -q 'iif {INTERFACE} blackhole' || exit 0
ip rule add pref 0 lookup local
ip rule del pref 1
ip rule del pref 2
""",
)
_DATA = "".join(f"ip rule {{what}} ipproto {TCP} {end} {_PORTS} blackhole\n" for end in ("sport", "dport"))
DATA = (
    f"ip rule | grep -q 'port {_PORTS} blackhole' && exit 0\n{_DATA.format(what='add')}",
    f"ip rule | grep -q 'port {_PORTS} blackhole' || exit 0\n{_DATA.format(what='del')}",
)
