"""What slurmctld shows, and what was measured between hosts. Each docstring is what `--explain` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Severity
from deeplink.core.publish import read_members
from deeplink.core.text import counted
from deeplink.rpc.daemon import is_loopback
from deeplink.rpc.resolving import LOOPBACK
from deeplink.scheduler.sitecheck.recovery_settings import of_preempt_mode
from deeplink.scheduler.sitecheck.site_evidence import alike, error, note, ok, together, unknown, warning
from deeplink.scheduler.slurm.states import UNSETTLED_FLAGS, NodeFlag, NodeState
from deeplink.scheduler.topology.graph import checked
from deeplink.scheduler.topology.sources.slurm_topology import read_switches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.scheduler.sitecheck.site_evidence import Measured, SiteEvidence
    from deeplink.scheduler.slurm.parse import NodeRow, PartitionRow, SwitchRow
    from deeplink.scheduler.slurm.settings import SlurmSettings

CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 60.0
_SHOWN = 4
_RESUME = "scontrol update nodename=NODE state=resume, once it is mended"
_WATCH = "config.toml: watch = HOST:7412; see docs/watchdog.md"
_SILENT = "see whether the node runs, and its slurmd: `systemctl status slurmd` there"


def slurm_answers(evidence: SiteEvidence) -> Iterator[Finding]:
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


def controller_clock(evidence: SiteEvidence, settings: SlurmSettings) -> Iterator[Finding]:
    """Tell how far slurmctld's clock is from this host's.

    Measured from the time slurmctld puts on its answer, which is told to the second, so that the error is one
    second and the time the answer took. MUNGE refuses credentials that seem five minutes old; records of incidents
    and of Slurm no longer fit together long before.
    """
    if settings.as_of is None:
        yield unknown("slurmctld's answer tells no time (SLURM_TIME_FORMAT is set?)")
        return
    told, (began, ended) = settings.as_of.timestamp(), evidence.asked
    low, high = told - ended, told + 1.0 - began
    # Of all that the answer leaves open, the least that is wrong.
    ahead = max(low, 0.0) if high > 0 else high
    said = f"slurmctld's clock is between {low:+.1f} and {high:+.1f} s ahead of this host's"
    yield of_clock(ahead, said)


def of_clock(ahead_s: float, said: str, where: str = "") -> Finding:
    """Judge a clock that is surely so far ahead, or behind."""
    remedy = "set the clocks by NTP: `chronyc tracking` on the hosts named"
    if abs(ahead_s) > CLOCK_ERROR_S:
        return error(said, remedy, where)
    if abs(ahead_s) > CLOCK_WARNING_S:
        return warning(said, remedy, where)
    return ok(said, where)


def leaked_gpus(evidence: SiteEvidence, nodes: Sequence[NodeRow]) -> Iterator[Finding]:
    """Tell whether Slurm counts GPUs as used on nodes that are idle.

    After a requeue while a node of the job was dead, Slurm 22.05 kept the GPUs of idle nodes (3 of 3 tries); jobs
    that want them wait in Resources. `scontrol reconfigure` frees them; `scontrol show node` goes on to show the
    old number until the next job there. Neither draining nor setting the node down and back helps (measured).
    A suspended job keeps its GPUs on nodes that are idle (measured): those are not counted here.
    """
    with_gpus = [row for row in nodes if row.gpus != 0]
    untold = [row.name for row in with_gpus if row.gpus_used is None]
    if untold:
        said = "`scontrol -d show node` does not tell the used GPUs in words known here"
        yield unknown(said, where=together(untold))
        if len(untold) == len(with_gpus):
            return
    leaked = [
        row
        for row in nodes
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


def node_states(nodes: Sequence[NodeRow]) -> Iterator[Finding]:
    """Tell which nodes take no jobs, and why.

    A node that registers with less than slurm.conf says (INVALID_REG) takes none until that is mended; one that is
    drained or down waits for `scontrol update nodename=NODE state=resume`. One that does not respond is down after
    SlurmdTimeout.
    """
    wrong = [row.name for row in nodes if NodeFlag.INVALID_REG in row.flags]
    if wrong:
        said = f"{counted(len(wrong), 'node')} registered with less than slurm.conf says"
        yield error(said, "compare `slurmd -C` on the node with its NodeName line", together(wrong))
    out: dict[str, list[str]] = {}
    for row in nodes:
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
        yield ok(f"{counted(len(nodes), 'node')}, all in service")


def slurm_versions(nodes: Sequence[NodeRow], settings: SlurmSettings) -> Iterator[Finding]:
    """Tell whether slurmctld and all slurmd are of one version.

    Slurm lets slurmd be up to two releases older; states and texts then differ from node to node.
    """
    by_version: dict[str, list[str]] = {}
    for row in nodes:
        if row.version:
            by_version.setdefault(row.version, []).append(row.name)
    own = settings.version
    others = {version: names for version, names in by_version.items() if version != own}
    for version, names in others.items():
        said = f"slurmd {version}, slurmctld {own or '(not told)'}"
        yield warning(said, "update slurmd on the nodes named", together(names))
    if not others:
        yield ok(f"Slurm {own or '(version not told)'} everywhere")


def partitions(evidence: SiteEvidence, rows: Sequence[PartitionRow]) -> Iterator[Finding]:
    """Tell what the partitions do to jobs of many nodes.

    OverSubscribe=FORCE puts several jobs on the same GPUs and CPUs; MaxNodes=1 lets no job of several nodes in; a
    partition's own PreemptMode goes before the cluster's.
    """
    found = [finding for row in rows for finding in _of_partition(row, evidence.settings)]
    yield from found
    if not found:
        yield ok(f"{counted(len(rows), 'partition')}, open to jobs of several nodes")


def _of_partition(row: PartitionRow, told: SlurmSettings | None) -> Iterator[Finding]:
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
            yield replace(judged, text=f"{what}: {judged.text}")


def topology(switches: Sequence[SwitchRow], nodes: Sequence[NodeRow]) -> Iterator[Finding]:
    """Tell whether the switches Slurm knows hold all its nodes.

    A node that is on no switch is never placed together with others; two roots that nothing joins never share a
    job.
    """
    if not switches:
        yield note("Slurm knows no switches", "`deeplink topology discover` finds what there is")
        return
    reading = read_switches(switches, "scontrol show topology")
    found = [*reading.findings, *checked(reading.network, [row.name for row in nodes])]
    problems = [str(one) for one in found if one.severity > Severity.NOTE]
    for problem in problems[:_SHOWN]:
        yield warning(problem, "topology.conf; `deeplink topology check` lists all")
    if not problems:
        yield ok(f"{counted(len(reading.network.switches), 'switch')} over all nodes")


def clocks(evidence: SiteEvidence) -> Iterator[Finding]:
    """Tell how far the nodes' clocks are apart.

    Each node is asked for its time five times over srun; half of the quickest answer's time is how wrong the
    figure may be. Only what is surely apart counts. MUNGE refuses credentials that seem five minutes old, so that
    nothing can be started on such a node; heartbeats and incidents of a job come out of order long before.
    """
    offsets = {node: offset for node in evidence.hosts if (offset := evidence.reports[node].offset) is not None}
    if not offsets:
        yield unknown(evidence.why_not("measured"))
        return
    ahead = max(offsets, key=lambda node: offsets[node].ahead_s)
    behind = min(offsets, key=lambda node: offsets[node].ahead_s)
    doubt = offsets[ahead].error_s + offsets[behind].error_s
    apart = offsets[ahead].ahead_s - offsets[behind].ahead_s
    host_doubt = max(one.error_s for one in offsets.values())
    from_here = max((one.ahead_s for one in offsets.values()), key=abs)
    said = f"nodes are {apart * 1e3:.1f} ms apart ({doubt * 1e3:.1f} ms more or less)"
    said += f", and up to {abs(from_here) * 1e3:.1f} ms from this host"
    surely = max(apart - doubt, abs(from_here) - host_doubt, 0.0)
    yield of_clock(surely, said, together({ahead, behind}) if surely > 1.0 else together(offsets))


def agent_ports(evidence: SiteEvidence, measured: Mapping[str, Measured]) -> Iterator[Finding]:
    """Tell whether nodes reach the ports that agents listen on.

    Agents of a job take free ports, two each: control, and samples. Every node listens on two such ports here, and
    connects to those of the others (beyond sixteen, to some of them). Without them no job starts.
    """
    remedy = "open the kernel's free ports (32768-60999) between nodes in the firewall"
    yield from _ports(evidence, measured, "agent", remedy)


def rank_ports(evidence: SiteEvidence, measured: Mapping[str, Measured]) -> Iterator[Finding]:
    """Tell whether nodes reach the port that rank 0 listens on.

    It is one between 20000 and 31999, another one for each attempt. Every node listens on four of them, spread
    over the range, and connects to those of the others. Where they are blocked, ranks wait for each other until
    torch's timeout.
    """
    yield from _ports(evidence, measured, "rank", "open ports 20000-31999 between nodes in the firewall")


def _ports(evidence: SiteEvidence, measured: Mapping[str, Measured], kind: str, remedy: str) -> Iterator[Finding]:
    hosts = {node: evidence.hosts[node] for node in measured}
    loopback = [node for node, host in hosts.items() if host.address == LOOPBACK.ip]
    if loopback and len({host.address for host in hosts.values()}) > 1:
        yield error("no address but loopback", "see `ip address` on the node", together(loopback))
    closed = [node for node, host in hosts.items() if not host.listening.get(kind)]
    if closed:
        yield warning("no such port could be listened on", "see `ss -ltn` for who has them", together(closed))
    tried = [
        (node, peer, port, ports[str(port)])
        for node, found in measured.items()
        for peer, ports in found.reached.items()
        if peer in hosts
        for port in hosts[peer].listening.get(kind, ())
        if str(port) in ports
    ]
    failed: dict[tuple[str, str], str] = {}
    for node, peer, port, why in tried:
        if why:
            failed.setdefault((node, peer), f"port {port}: {why}")
    for (node, peer), why in list(failed.items())[:_SHOWN]:
        yield error(f"{node} to {peer}: {why}", remedy, node)
    if len(failed) > _SHOWN:
        yield error(f"and {len(failed) - _SHOWN} more pairs of nodes", remedy)
    if tried and not failed:
        yield ok(f"{counted(len(tried), 'connection')} between nodes, each way", together(hosts))


def watchdog(evidence: SiteEvidence) -> Iterator[Finding]:
    """Tell whether the watchdog is configured and can be reached, from the nodes too.

    Launchers send heartbeats to it from the first node of their job. On loopback it hears only jobs of its own
    host.
    """
    address = evidence.config.watch
    if not address:
        yield note("no watchdog is configured: jobs recover by spares, and by Slurm's own timeouts", _WATCH)
        return
    if is_loopback(address.rpartition(":")[0].strip("[]")):
        yield error(f"watch={address}: on the nodes this is the node itself", _WATCH)
        return
    if evidence.watch_answer:
        yield error(f"watchdog at {address}: {evidence.watch_answer}", "see `systemctl status deeplink-watch`")
    elif evidence.watch_answer is not None:
        yield ok(f"the watchdog at {address} answers")
    yield from _service(evidence, address, f"watchdog at {address}", "let nodes through to it in the firewall")


def members(evidence: SiteEvidence) -> Iterator[Finding]:
    """Tell whether the agents of a standing cache can be reached (members in the configuration).

    A member that cannot be reached is passed over, and its shards are read elsewhere, more slowly.
    """
    try:
        listed = read_members(evidence.config.members)
    except (ValueError, DeepLinkError) as problem:
        yield error(f"members: {problem}", "config.toml: members = NAME=HOST:PORT,...")
        return
    if not listed:
        yield ok("no standing cache is configured")
        return
    for member in listed:
        what = f"member {member.name} at {member.address}"
        yield from _service(evidence, member.address, what, "see `systemctl status deeplink-node` there")


def services_of(watch: str, listed_members: str) -> tuple[str, ...]:
    """Return the addresses to connect to, of the keys `watch` and `members`."""
    try:
        found = [member.address for member in read_members(listed_members)]
    except (ValueError, DeepLinkError):
        found = []
    return (*([watch] if watch else []), *found)


def _service(evidence: SiteEvidence, address: str, what: str, remedy: str) -> Iterator[Finding]:
    outcomes = {
        node: found.services[address] for node, found in evidence.measured.items() if address in found.services
    }
    if not outcomes:
        yield unknown(f"{what}: {evidence.why_not('measured')}")
    for why, nodes in alike(outcomes).items():
        yield error(f"{what}: {why}", remedy, nodes) if why else ok(f"{what} is reached", nodes)
