"""Settings that decide how jobs run: placing, limits, clients. Docstrings are what `--explain` prints."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from deeplink.scheduler.sitecheck.site_evidence import error, note, ok, warning
from deeplink.scheduler.slurm.command import COMMAND_TIMEOUT_S
from deeplink.scheduler.slurm.settings import NO_ACCOUNTING

if TYPE_CHECKING:
    from deeplink.core.finding import Finding
    from deeplink.scheduler.sitecheck.site_evidence import SettingsView

RANK_PORTS = range(20_000, 32_000)
"""Where rank 0 of a job listens for the others (`deeplink run` picks one by the attempt)."""
_DEFAULT_SWITCH_WAIT_S = 300
_SWITCH_WAITS_S = (60, 3600)
_LEAST_STEPS = 1000
_ESCAPED = {"proctrack/pgid": "that leave their group", "proctrack/linuxproc": "whose parent has ended"}


def client_patience(site: SettingsView) -> Finding:
    """Tell how long a command hangs while the controller is away (MessageTimeout, TCPTimeout).

    Slurm's clients give a dead or frozen controller up after about MessageTimeout less one second: 9 s by default,
    4 s with MessageTimeout=5 (measured). We stop a command after 20 s; clients that need longer never get to say
    why.
    """
    message, connection = site.number("MessageTimeout"), site.number("TCPTimeout")
    said = f"MessageTimeout={message}, TCPTimeout={connection}"
    if max(message, connection) >= COMMAND_TIMEOUT_S:
        return warning(
            f"{said}: we stop commands before they give up", "slurm.conf: MessageTimeout=10 TCPTimeout=2"
        )
    return ok(said)


def select_type(site: SettingsView) -> Finding:
    """Tell how nodes are shared out (SelectType).

    select/cons_tres counts GPUs (--gpus-per-node and its like); the others do not, and newer Slurms want it for
    topology/tree.
    """
    value = site.text("SelectType")
    if value != "select/cons_tres":
        said = f"SelectType={value}: --gpus-per-node and its like do not work"
        return warning(said, "slurm.conf: SelectType=select/cons_tres")
    return ok(f"SelectType={value} ({site.told.text('SelectTypeParameters') or 'no parameters'})")


def topology_plugin(site: SettingsView) -> Finding:
    """Tell whether Slurm knows the fabric (TopologyPlugin).

    Without it `--switches` means nothing and nodes are taken by name. Ranks are ordered by what
    `deeplink topology discover` finds either way, but on nodes that lie apart.
    """
    value = site.text("TopologyPlugin")
    if value in {"", "topology/none", "topology/default", "topology/flat"}:
        said = f"TopologyPlugin={value or 'none'}: Slurm does not know the fabric, --switches means nothing"
        remedy = "slurm.conf: TopologyPlugin=topology/tree, with what `deeplink topology export` writes"
        return warning(said, remedy)
    return ok(f"TopologyPlugin={value}")


def switch_wait(site: SettingsView) -> Finding:
    """Tell how long a request for few switches is waited for (max_switch_wait in SchedulerParameters).

    `--switches=1@TIME` is cut to it; then the job starts on any nodes.
    """
    value = site.item("SchedulerParameters", "max_switch_wait") or str(_DEFAULT_SWITCH_WAIT_S)
    remedy = "slurm.conf: SchedulerParameters=...,max_switch_wait=300"
    if not (value.isascii() and value.isdigit()):
        return note(f"max_switch_wait={value}", remedy)
    least, most = _SWITCH_WAITS_S
    if int(value[:9]) < least:
        return note(f"max_switch_wait={value}: jobs start scattered after {value} s", remedy)
    if int(value[:9]) > most:
        return note(f"max_switch_wait={value}: a job may wait that long for nodes that lie together", remedy)
    return ok(f"max_switch_wait={value}")


def backfill(site: SettingsView) -> Finding:
    """Tell whether smaller jobs go ahead where they delay nobody (SchedulerType).

    With sched/builtin a job that waits for its nodes holds up all behind it, so that a hint for close nodes costs
    others.
    """
    value = site.text("SchedulerType")
    if value != "sched/backfill":
        return warning(f"SchedulerType={value}: nothing is backfilled", "slurm.conf: SchedulerType=sched/backfill")
    return ok(f"SchedulerType={value}")


def private_tmp(site: SettingsView) -> Finding:
    """Tell whether /tmp is a job's own (JobContainerType, NamespaceType), and so the store.

    With job_container/tmpfs or namespace/linux a job sees its own /tmp, which is removed with the job: shards
    there are packed, brought and lost for each job again. A private /tmp harms nothing else here.
    """
    name = "JobContainerType" if site.told.text("NamespaceType") is None else "NamespaceType"
    value = site.text(name)
    if value in {"", "job_container/none"}:
        return ok("no folder is a job's own")
    if any(PurePath(folder) in site.config.store.parents for folder in ("/tmp", "/var/tmp", "/dev/shm")):  # noqa: S108
        said = f"{name}={value}: the store {site.config.store} may end with each job"
        return error(said, "config.toml: store = a folder of the node's SSD that is not below /tmp")
    return ok(f"{name}={value}; the store {site.config.store} lies elsewhere")


def private_data(site: SettingsView) -> Finding:
    """Tell whether users see the cluster (PrivateData).

    Without others' jobs a hint for nodes does not see when they come free; without nodes there is no hint at all.
    An operator, as the watchdog is one, sees everything.
    """
    hidden = {word.casefold() for word in site.words("PrivateData")}
    remedy = f"slurm.conf: take {', '.join(sorted(hidden & {'nodes', 'jobs', 'partitions'}))} out of PrivateData"
    if "nodes" in hidden:
        return error("PrivateData=nodes: users cannot see nodes, so that no nodes can be chosen", remedy)
    if hidden & {"jobs", "partitions"}:
        said = f"PrivateData={','.join(sorted(hidden))}: users see their own part of the queue alone"
        return warning(said, remedy)
    return ok("users see jobs and nodes")


def process_tracking(site: SettingsView) -> Finding:
    """Tell whether every process of a step is known to Slurm (ProctrackType).

    A process that leaves its group escapes proctrack/pgid, and one whose parent has ended escapes
    proctrack/linuxproc (measured): it outlives its step, holds GPUs and ports, and writes beside its successor.
    Checkpoints are fenced against that; GPUs are not.
    """
    value = site.text("ProctrackType")
    if value in _ESCAPED:
        said = f"ProctrackType={value}: processes {_ESCAPED[value]} outlive the step"
        return warning(said, "slurm.conf: ProctrackType=proctrack/cgroup")
    return ok(f"ProctrackType={value}")


def task_binding(site: SettingsView) -> Finding:
    """Tell whether ranks are bound to the CPUs they were given (TaskPlugin).

    Without, the DataLoader workers of the ranks of one node get in each other's way.
    """
    value = site.text("TaskPlugin")
    if value in {"", "task/none"}:
        said = "TaskPlugin=task/none: ranks are bound to no CPUs, and no job is kept to its own"
        return note(said, "slurm.conf: TaskPlugin=task/affinity,task/cgroup")
    return ok(f"TaskPlugin={value}")


def propagated_limits(site: SettingsView) -> Finding:
    """Tell whether ranks run with the limits of the shell that submitted them (PropagateResourceLimits).

    A login shell's ulimits (1,024 open files, 64 KiB of locked memory) then hold on nodes that allow far more.
    """
    listed = {word.upper() for word in site.words("PropagateResourceLimits")}
    excepted = {word.upper() for word in site.told.words("PropagateResourceLimitsExcept")}
    wanted = {name for name in ("NOFILE", "MEMLOCK") if listed & {"ALL", name} and name not in excepted}
    if not wanted:
        return ok("nodes have their own limits")
    said = f"the login shell's limits hold on the nodes ({', '.join(sorted(wanted))})"
    # Slurm takes one of the two settings, not both.
    if "ALL" in listed:
        return note(said, f"slurm.conf: PropagateResourceLimitsExcept={','.join(sorted(excepted | wanted))}")
    return note(said, f"slurm.conf: take {', '.join(sorted(wanted))} out of PropagateResourceLimits")


def srun_ports(site: SettingsView) -> Finding:
    """Tell whether srun listens where rank 0 does (SrunPortRange).

    Rank 0 takes a port between 20000 and 31999. srun's own should lie elsewhere, and be enough for some sruns at
    once.
    """
    value = site.text("SrunPortRange")
    first, _, last = value.partition("-")
    if not (first.isdigit() and last.isdigit()) or int(last[:9]) == 0:
        return ok("srun takes free ports")
    if int(first[:9]) < RANK_PORTS.stop and int(last[:9]) >= RANK_PORTS.start:
        said = f"SrunPortRange={value} overlaps the ports of rank 0 ({RANK_PORTS.start}-{RANK_PORTS.stop - 1})"
        return warning(said, "slurm.conf: SrunPortRange=60001-63000, and open it between nodes")
    return ok(f"SrunPortRange={value}")


def step_limit(site: SettingsView) -> Finding:
    """Tell how many steps a job may start (MaxStepCount).

    `deeplink run` starts one for its agents and one for each relaunch of the ranks.
    """
    value = site.number("MaxStepCount")
    if value < _LEAST_STEPS:
        return warning(
            f"MaxStepCount={value}: a job that is relaunched often is refused", "slurm.conf: MaxStepCount=40000"
        )
    return ok(f"MaxStepCount={value}")


def power_saving(site: SettingsView) -> Finding:
    """Tell whether idle nodes are switched off (SuspendTime).

    What lies on the SSD of a cloud's node goes with it: shards are brought again after each pause. Slurm also
    takes a node that boots for one that is not dead for as long as ResumeTimeout.
    """
    value = site.text("SuspendTime")
    if not site.text("SuspendProgram") or site.told.number("SuspendTime") is None:
        return ok("nodes stay on")
    said = f"SuspendTime={value}: idle nodes are switched off; on those of a cloud the shards are lost"
    return note(said, "slurm.conf: SuspendExcNodes=NODES keeps some on; `deeplink pack --home` keeps all shards")


def accounting(site: SettingsView) -> Finding:
    """Tell whether there is a record of ended jobs (AccountingStorageType).

    Without, how a job ended is known for MinJobAge only. Incidents are recorded by DeepLink itself.
    """
    value = site.text("AccountingStorageType")
    if value in NO_ACCOUNTING:
        said = f"no accounting: how a job ended is known for MinJobAge ({site.told.text('MinJobAge') or '?'}) only"
        return note(said, "slurm.conf: AccountingStorageType=accounting_storage/slurmdbd")
    return ok(f"AccountingStorageType={value}")


def changed_submissions(site: SettingsView) -> Finding:
    """Tell whether the site rewrites what is submitted (JobSubmitPlugins, CliFilterPlugins).

    A plugin may drop --no-kill, --requeue or --nodelist; `scontrol show job` tells what became of them.
    """
    found = [*site.words("JobSubmitPlugins"), *site.told.words("CliFilterPlugins")]
    if found:
        return note(f"{', '.join(found)}: may change what is submitted; compare with `scontrol show job`")
    return ok("nothing changes what is submitted")


def launch_parameters(site: SettingsView) -> Finding:
    """Tell what the site adds to launches (LaunchParameters).

    mem_sort, test_exec and their like cost each relaunch time; disable_send_gids and enable_nss_slurm change how
    groups are looked up. None of them defeats anything here.
    """
    if site.item("LaunchParameters", "test_exec") is not None:
        said = "LaunchParameters=test_exec: srun refuses what is not on the batch host, also where nodes have it"
        return note(said, "slurm.conf: take test_exec out of LaunchParameters")
    return ok(f"LaunchParameters={site.text('LaunchParameters') or 'none'}")


def rate_limit(site: SettingsView) -> Finding:
    """Tell whether the controller refuses users who ask too often (rl_enable in SlurmctldParameters, Slurm 23.02).

    A refused client tries again by itself, so that commands become slow. `deeplink status` and its like ask once
    per interval however many look.
    """
    if site.item("SlurmctldParameters", "rl_enable") is None:
        return ok("no limit on questions")
    return note("rl_enable: users who ask often are slowed down")


RULES = (
    client_patience,
    select_type,
    topology_plugin,
    switch_wait,
    backfill,
    private_tmp,
    private_data,
    process_tracking,
    task_binding,
    propagated_limits,
    srun_ports,
    step_limit,
    power_saving,
    accounting,
    changed_submissions,
    launch_parameters,
    rate_limit,
)
