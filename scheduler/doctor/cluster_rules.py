"""What slurmctld's nodes, partitions and switches show. Each docstring is what `--explain` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.scheduler.doctor.evidence import together
from deeplink.scheduler.doctor.finding import error, note, ok, unknown, warning
from deeplink.scheduler.doctor.recovery_settings import of_preempt_mode
from deeplink.scheduler.slurm.states import UNSETTLED_FLAGS, NodeFlag, NodeState
from deeplink.scheduler.topology.check import checked
from deeplink.scheduler.topology.sources.slurm import read_switches
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.doctor.evidence import SiteEvidence
    from deeplink.scheduler.doctor.finding import DoctorFinding
    from deeplink.scheduler.slurm.partitions import PartitionRow
    from deeplink.scheduler.slurm.settings import SlurmSettings

CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 60.0
_SHOWN = 4
_RESUME = "scontrol update nodename=NODE state=resume, once it is mended"
_SILENT = "see whether the node runs, and its slurmd: `systemctl status slurmd` there"


def slurm_answers(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether slurmctld answers the questions a job's placing and recovery ask.

    Without it nothing is submitted or restarted; jobs that run go on.
    """
    failed = {what: why for what, why in evidence.problems.items() if what != "hosts"}
    if not failed:
        began, ended = evidence.asked
        yield ok(f"slurmctld answers (its settings within {ended - began:.2f} s)")
        return
    by_reason: dict[str, list[str]] = {}
    for what, why in failed.items():
        by_reason.setdefault(_last_line(why), []).append(what)
    for why, unanswered in by_reason.items():
        said = f"Slurm was asked for its {', '.join(sorted(unanswered))}: {why}"
        yield error(said, "see `scontrol ping`, SLURM_CONF, and whether this host is one of the cluster's")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def controller_clock(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell how far slurmctld's clock is from this host's.

    Measured from the time slurmctld puts on its answer, which is told to the second, so that the error is one
    second and the time the answer took. MUNGE refuses credentials that seem five minutes old; records of incidents
    and of Slurm no longer fit together long before.
    """
    if evidence.settings is None:
        yield unknown(evidence.why_not("settings"))
        return
    if evidence.settings.as_of is None:
        yield unknown("slurmctld's answer tells no time (SLURM_TIME_FORMAT is set?)")
        return
    told, (began, ended) = evidence.settings.as_of.timestamp(), evidence.asked
    low, high = told - ended, told + 1.0 - began
    # Of all that the answer leaves open, the least that is wrong.
    ahead = max(low, 0.0) if high > 0 else high
    said = f"slurmctld's clock is between {low:+.1f} and {high:+.1f} s ahead of this host's"
    yield of_clock(ahead, said)


def of_clock(ahead_s: float, said: str, where: str = "") -> DoctorFinding:
    """Judge a clock that is surely so far ahead, or behind."""
    remedy = "set the clocks by NTP: `chronyc tracking` on the hosts named"
    if abs(ahead_s) > CLOCK_ERROR_S:
        return error(said, remedy, where)
    if abs(ahead_s) > CLOCK_WARNING_S:
        return warning(said, remedy, where)
    return ok(said, where)


def leaked_gpus(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether Slurm counts GPUs as used on nodes that are idle.

    After a requeue while a node of the job was dead, Slurm 22.05 kept the GPUs of idle nodes (3 of 3 tries); jobs
    that want them wait in Resources. `scontrol reconfigure` frees them; `scontrol show node` goes on to show the
    old number until the next job there. Neither draining nor setting the node down and back helps (measured).
    A suspended job keeps its GPUs on nodes that are idle (measured): those are not counted here.
    """
    if evidence.nodes is None:
        yield unknown(evidence.why_not("nodes"))
        return
    untold = [row.name for row in evidence.nodes if row.gpus != 0 and row.gpus_used is None]
    if untold:
        yield unknown(
            "`scontrol -d show node` does not tell the used GPUs in words known here", where=together(untold)
        )
    if untold and all(row.gpus_used is None for row in evidence.nodes if row.gpus != 0):
        return
    leaked = [
        row
        for row in evidence.nodes
        if row.gpus_used
        and row.state is NodeState.IDLE
        and not row.flags & UNSETTLED_FLAGS
        and row.name not in (evidence.suspended or ())
    ]
    if leaked and evidence.suspended is None:
        said = "GPUs are counted as used on idle nodes; whether suspended jobs have them was not told"
        yield unknown(said, where=together(row.name for row in leaked))
        return
    if leaked:
        said = f"{counted(sum(row.gpus_used or 0 for row in leaked), 'GPU')} counted as used on idle nodes"
        yield error(said, "scontrol reconfigure", together(row.name for row in leaked))
        return
    if not untold:
        yield ok("no GPU is counted as used on an idle node")


def node_states(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell which nodes take no jobs, and why.

    A node that registers with less than slurm.conf says (INVALID_REG) takes none until that is mended; one that is
    drained or down waits for `scontrol update nodename=NODE state=resume`. One that does not respond is down after
    SlurmdTimeout.
    """
    if evidence.nodes is None:
        yield unknown(evidence.why_not("nodes"))
        return
    wrong = [row.name for row in evidence.nodes if NodeFlag.INVALID_REG in row.flags]
    if wrong:
        said = f"{counted(len(wrong), 'node')} registered with less than slurm.conf says"
        yield error(said, "compare `slurmd -C` on the node with its NodeName line", together(wrong))
    out: dict[str, list[str]] = {}
    for row in evidence.nodes:
        if row.down or row.drained or not row.responding:
            how = "down" if row.down else "drained" if row.drained else "not responding"
            out.setdefault(f"{how}: {row.reason or 'no reason given'}", []).append(row.name)
    for why, names in list(out.items())[:_SHOWN]:
        # Of a node that is neither down nor drained Slurm refuses `state=resume` ("Invalid node state specified").
        remedy = _SILENT if why.startswith("not responding") else _RESUME
        yield note(why, remedy, together(names))
    if len(out) > _SHOWN:
        yield note(f"{len(out) - _SHOWN} more reasons: see `sinfo -R`")
    if not wrong and not out:
        yield ok(f"{counted(len(evidence.nodes), 'node')}, all in service")


def slurm_versions(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether slurmctld and all slurmd are of one version.

    Slurm lets slurmd be up to two releases older; states and texts then differ from node to node.
    """
    if evidence.nodes is None or evidence.settings is None:
        yield unknown(evidence.why_not("nodes" if evidence.nodes is None else "settings"))
        return
    by_version: dict[str, list[str]] = {}
    for row in evidence.nodes:
        if row.version:
            by_version.setdefault(row.version, []).append(row.name)
    own = evidence.settings.version
    others = {version: names for version, names in by_version.items() if version != own}
    for version, names in others.items():
        said = f"slurmd {version}, slurmctld {own or '(not told)'}"
        yield warning(said, "update slurmd on the nodes named", together(names))
    if not others:
        yield ok(f"Slurm {own or '(version not told)'} everywhere")


def partitions(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell what the partitions do to jobs of many nodes.

    OverSubscribe=FORCE puts several jobs on the same GPUs and CPUs; MaxNodes=1 lets no job of several nodes in; a
    partition's own PreemptMode goes before the cluster's.
    """
    if evidence.partitions is None:
        yield unknown(evidence.why_not("partitions"))
        return
    found = [finding for row in evidence.partitions for finding in _of_partition(row, evidence.settings)]
    yield from found
    if not found:
        yield ok(f"{counted(len(evidence.partitions), 'partition')}, open to jobs of several nodes")


def _of_partition(row: PartitionRow, told: SlurmSettings | None) -> Iterator[DoctorFinding]:
    what, line = f"partition {row.name}", f"slurm.conf: PartitionName={row.name}"
    if row.state != "UP":
        yield note(f"{what} is {row.state}")
    if row.most_nodes == 1 and row.node_count > 1:
        yield warning(f"{what}: MaxNodes=1, no job of several nodes", f"{line} MaxNodes=UNLIMITED")
    if row.oversubscribe.startswith("FORCE") and row.oversubscribe != "FORCE:1":
        yield warning(f"{what}: OverSubscribe={row.oversubscribe}, jobs share CPUs", f"{line} OverSubscribe=NO")
    if told is not None and (told.text("PreemptType") or "preempt/none") != "preempt/none":
        judged = of_preempt_mode(row.preempt_mode, f"{line} PreemptMode=REQUEUE")
        if judged.remedy and row.preempt_mode != told.text("PreemptMode"):  # the cluster's own is told once
            yield replace(judged, said=f"{what}: {judged.said}")


def topology(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the switches Slurm knows hold all its nodes.

    A node that is on no switch is never placed together with others; two roots that nothing joins never share a
    job.
    """
    if evidence.switches is None or evidence.nodes is None:
        yield unknown(evidence.why_not("topology" if evidence.switches is None else "nodes"))
        return
    if not evidence.switches:
        yield note("Slurm knows no switches", "`deeplink topology discover` finds what there is")
        return
    reading = read_switches(evidence.switches, "scontrol show topology")
    found = [*reading.findings, *checked(reading.network, [row.name for row in evidence.nodes])]
    problems = [str(one) for one in found if one.kind.problem]
    for problem in problems[:_SHOWN]:
        yield warning(problem, "topology.conf; `deeplink topology check` lists all")
    if not problems:
        yield ok(f"{counted(len(reading.network.switches), 'switch')} over all nodes")
