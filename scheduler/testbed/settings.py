"""Configuration files as text: pure functions of what the cluster is to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.core.types import NodeName
    from deeplink.scheduler.testbed.state import SandboxLayout

SSD = Path("/local/ssd")
"""Where every node of a sandbox with namespaces sees its own SSD."""
CONTROL_PORT = 6817
NODE_PORT = 6818
CGROUP_CONF = (
    "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"
)
"""Named though not used: by default slurmd looks for a cgroup file system and dies where it finds none."""
NSSWITCH_CONF = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
"""Names are known from files alone: a question to a name server that cannot be reached would hang for seconds."""


@dataclass(frozen=True, slots=True)
class User:
    """Who jobs run as."""

    name: str
    uid: int
    gid: int
    home: Path


@dataclass(frozen=True, slots=True)
class Tuned:
    """One setting that differs from Slurm's default, and why."""

    key: str
    value: str
    default: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPlace:
    """Where the daemons live: what differs between a cluster of namespaces and one on loopback."""

    control: str  # SlurmctldHost
    port: int  # SlurmctldPort
    owner: str  # SlurmUser and SlurmdUser
    own: str  # folder of a machine's own files; may hold `%n`
    address: Callable[[NodeName], str]  # `NodeHostname= NodeAddr= Port=` of a node
    more: tuple[str, ...] = ()  # further lines


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """What `up` was asked for."""

    shape: Shape
    user: User
    slurmd_timeout: int = 10  # SlurmdTimeout, s: how long a node may be silent until Slurm calls it down
    return_to_service: int = 2  # ReturnToService: 2: a down node that registers is used again
    extra: tuple[str, ...] = ()  # further lines of slurm.conf, last, so that they win
    freezable: bool = False  # the homes are a file system of their own, which can be frozen

    @property
    def tuned(self) -> tuple[Tuned, ...]:
        """Where the sandbox's Slurm behaves otherwise than one with Slurm's defaults."""
        quick = "a sandbox is for seeing failures now"
        return (
            Tuned(
                "SlurmdTimeout", str(self.slurmd_timeout), "300", "a silent node is down this many seconds later"
            ),
            Tuned("MessageTimeout", "5", "10", "commands give up sooner when the controller is away"),
            Tuned("TCPTimeout", "2", "2", "the other bound on that"),
            Tuned("KillWait", "3", "30", quick),
            # slurmstepd tells of its step's end once a minute: a controller that is away as steps end would have
            # Slurm drain their nodes ("Kill task failed", measured).
            Tuned("UnkillableStepTimeout", "120", "60", "a controller may be away for a while as steps end"),
            Tuned("ReturnToService", str(self.return_to_service), "0", "a node that boots again is used again"),
            Tuned("SelectType", "select/cons_tres", "select/cons_tres", "GPUs are counted"),
            Tuned("SelectTypeParameters", "CR_CPU", "CR_CORE_MEMORY", "jobs without --exclusive share nodes"),
            Tuned(
                "SchedulerParameters",
                "bf_interval=2,sched_interval=5,sched_min_interval=100000,batch_sched_delay=1",
                "bf_interval=30,sched_interval=60,sched_min_interval=2,batch_sched_delay=3",
                quick,
            ),
            Tuned("SlurmdParameters", "config_overrides", "(none)", "CPUs are what is configured here"),
            Tuned("ProctrackType", "proctrack/linuxproc", "proctrack/cgroup", "works without cgroups"),
            Tuned("TaskPlugin", "task/none", "task/none", "nodes share the machine's CPUs"),
        )

    @property
    def differing(self) -> tuple[Tuned, ...]:
        """Of `tuned`, what is not Slurm's default."""
        return tuple(tuned for tuned in self.tuned if tuned.value != tuned.default)


def slurm_conf(settings: SandboxSettings, layout: SandboxLayout, place: DaemonPlace) -> str:
    """Return slurm.conf. `cred_expire` is left at Slurm's default: it decides how long a requeued job is held."""
    shape = settings.shape
    gres = f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
    lines = [
        f"ClusterName={layout.name}",
        f"SlurmctldHost={place.control}",
        f"SlurmctldPort={place.port}",
        f"SlurmUser={place.owner}",
        f"SlurmdUser={place.owner}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        f"StateSaveLocation={layout.state}",
        f"SlurmctldPidFile={layout.state}/slurmctld.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        "SlurmctldDebug=verbose",
        f"SlurmdSpoolDir={place.own}/spool",
        f"SlurmdPidFile={place.own}/slurmd.pid",
        f"SlurmdLogFile={layout.log}/slurmd-%n.log",
        "SlurmdDebug=verbose",
        "MpiDefault=none",
        "SchedulerType=sched/backfill",
        "TopologyPlugin=topology/tree",
        *(["GresTypes=gpu"] if shape.gpus else []),
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={layout.log}/jobcomp.log",
        *(f"{tuned.key}={tuned.value}" for tuned in settings.tuned),
        *place.more,
        *(
            f"NodeName={node} {place.address(node)} CPUs={shape.cpus} RealMemory=4000{gres}"
            for node in shape.nodes
        ),
        f"PartitionName=main Nodes={fold(shape.nodes)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
        *settings.extra,
    ]
    return "\n".join(lines) + "\n"


def topology_conf(shape: Shape) -> str:
    """Return topology.conf: leaves name their nodes, spines their leaves, the core the spines."""
    lines = []
    for switch in reversed(shape.switches):
        below = f"Switches={fold(switch.switches)}" if switch.switches else f"Nodes={fold(switch.nodes)}"
        lines.append(f"SwitchName={switch.name} {below}")
    return "\n".join(lines) + "\n"


def gres_conf(shape: Shape, layout: SandboxLayout) -> str:
    """Return gres.conf. A count without files would be reported as none, and the nodes called invalid.

    Every second node tells the cores of its GPUs, as most sites do: Slurm writes what is used there as
    `gpu:(null):2(IDX:0-1)`, and `gpu:2` on the others.
    """
    if not shape.gpus:
        return ""
    devices = f"Name=gpu File={layout.etc}/dev/nvidia[0-{shape.gpus - 1}]"
    kinds = ((shape.nodes[::2], devices), (shape.nodes[1::2], f"{devices} Cores=0-{shape.cpus - 1}"))
    return "".join(f"NodeName={fold(nodes)} {what}\n" for nodes, what in kinds if nodes)


def hosts(shape: Shape) -> str:
    """Return /etc/hosts, the same on every machine."""
    lines = ["127.0.0.1 localhost", *(f"{shape.address(machine)} {machine}" for machine in shape.machines)]
    return "\n".join(lines) + "\n"


def passwd(text: str, user: User) -> str:
    """Return /etc/passwd of the host with the sandbox's user in place of any of the same name or number."""
    return _with(
        text, user, f"{user.name}:x:{user.uid}:{user.gid}:DeepLink sandbox:{user.home}:/bin/bash", user.uid
    )


def group(text: str, user: User) -> str:
    """Return /etc/group of the host with the sandbox's user's group."""
    return _with(text, user, f"{user.name}:x:{user.gid}:", user.gid)


def _with(text: str, user: User, line: str, number: int) -> str:
    others = [
        old for old in text.splitlines() if old.split(":")[0] != user.name and old.split(":")[2:3] != [str(number)]
    ]
    return "\n".join([*others, line]) + "\n"


def namespaces(shape: Shape, layout: SandboxLayout) -> DaemonPlace:
    """Return the place of a cluster of namespaces: every machine has its own address and the usual ports."""
    return DaemonPlace(
        control=f"{CTL}({shape.address(CTL)})",
        port=CONTROL_PORT,
        owner="root",
        own=str(layout.own),
        address=lambda node: f"NodeHostname={node} NodeAddr={shape.address(node)} Port={NODE_PORT}",
    )


def files(settings: SandboxSettings, layout: SandboxLayout, place: DaemonPlace) -> dict[Path, str]:
    """Return every configuration file of Slurm: path -> text."""
    return {
        layout.slurm_conf: slurm_conf(settings, layout, place),
        layout.etc / "topology.conf": topology_conf(settings.shape),
        layout.etc / "gres.conf": gres_conf(settings.shape, layout),
        layout.etc / "cgroup.conf": CGROUP_CONF,
    }
