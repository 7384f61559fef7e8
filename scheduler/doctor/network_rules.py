"""What was measured between hosts: clocks, ports, watchdog, members. Docstrings are what `--explain` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.address import LOOPBACK
from deeplink.daemon import is_loopback
from deeplink.scheduler.doctor.cluster_rules import of_clock
from deeplink.scheduler.doctor.evidence import alike, together
from deeplink.scheduler.doctor.finding import error, note, ok, unknown, warning
from deeplink.scheduler.doctor.node_rules import usable
from deeplink.text import counted
from deeplink.types import parse_members

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.doctor.evidence import SiteEvidence
    from deeplink.scheduler.doctor.finding import DoctorFinding
    from deeplink.scheduler.doctor.report import NodeReport

_SHOWN = 4
_TWO = 2


def clocks(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell how far the nodes' clocks are apart.

    Each node is asked for its time five times over srun; half of the quickest answer's time is how wrong the
    figure may be. Only what is surely apart counts. MUNGE refuses credentials that seem five minutes old, so that
    nothing can be started on such a node; beats and incidents of a job come out of order long before.
    """
    offsets = {node: report.offset for node, report in usable(evidence).items() if report.offset is not None}
    if not offsets:
        yield unknown(_alone(evidence))
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


def _alone(evidence: SiteEvidence) -> str:
    return evidence.problems.get("hosts") or "it takes a step on the nodes to tell: `deeplink doctor --nodes 2`"


def agent_ports(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether nodes reach the ports that agents listen on.

    Agents of a job take free ports, two each: control, and samples. Every node listens on two such ports here, and
    connects to those of the others (beyond sixteen, to some of them). Without them no job starts.
    """
    yield from _ports(
        evidence, "agent", "open the kernel's free ports (32768-60999) between nodes in the firewall"
    )


def rank_ports(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether nodes reach the port that rank 0 listens on.

    It is one between 20000 and 31999, another one for each attempt. Every node listens on four of them, spread
    over the range, and connects to those of the others. Where they are blocked, ranks wait for each other until
    torch's timeout.
    """
    yield from _ports(evidence, "rank", "open ports 20000-31999 between nodes in the firewall")


def _ports(evidence: SiteEvidence, kind: str, remedy: str) -> Iterator[DoctorFinding]:
    reports = {node: report for node, report in usable(evidence).items() if report.measured is not None}
    if len(reports) < _TWO:
        yield unknown(_alone(evidence))
        return
    loopback = [node for node, report in reports.items() if report.host.address == LOOPBACK.ip]
    if loopback and len({report.host.address for report in reports.values()}) > 1:
        yield error("no address but loopback", "see `ip address` on the node", together(loopback))
    deaf = [node for node, report in reports.items() if not report.host.listening.get(kind)]
    if deaf:
        yield warning("no such port could be listened on", "see `ss -ltn` for who has them", together(deaf))
    tried = 0
    failed: dict[tuple[str, str], str] = {}
    for node, report in reports.items():
        for peer, why in _failures(report, reports, kind):
            tried += 1
            if why:
                failed.setdefault((node, peer), why)
    for (node, peer), why in list(failed.items())[:_SHOWN]:
        yield error(f"{node} to {peer}: {why}", remedy, node)
    if len(failed) > _SHOWN:
        yield error(f"and {len(failed) - _SHOWN} more pairs of nodes", remedy)
    if tried and not failed:
        yield ok(f"{counted(tried, 'connection')} between nodes, each way", together(reports))


def _failures(report: NodeReport, reports: dict[str, NodeReport], kind: str) -> Iterator[tuple[str, str]]:
    """Yield, for each port of this kind that the node tried, the peer and why it was not connected."""
    for peer, ports in (report.measured.reached if report.measured else {}).items():
        if peer in reports:
            for port in reports[peer].host.listening.get(kind, ()):
                if str(port) in ports:
                    why = ports[str(port)]
                    yield peer, f"port {port}: {why}" if why else ""


def watchdog(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the watchdog is configured and can be reached, from the nodes too.

    Launchers beat to it from the first node of their job. On loopback it hears only jobs of its own host.
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


_WATCH = "config.toml: watch = HOST:7412; see docs/watchdog.md"


def members(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the agents of a standing cache can be reached (members in the configuration).

    A member that cannot be reached is passed over, and its shards are read elsewhere, more slowly.
    """
    try:
        listed = parse_members(evidence.config.members)
    except ValueError as problem:
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
        found = [member.address for member in parse_members(listed_members)]
    except ValueError:
        found = []
    return (*([watch] if watch else []), *found)


def _service(evidence: SiteEvidence, address: str, what: str, remedy: str) -> Iterator[DoctorFinding]:
    reports = {
        node: report
        for node, report in usable(evidence).items()
        if report.measured is not None and address in report.measured.services
    }
    if not reports:
        yield unknown(f"{what}: {_alone(evidence)}")
    by_outcome = alike(reports, lambda report: report.measured.services[address] if report.measured else "")
    for why, nodes in by_outcome.items():
        yield error(f"{what}: {why}", remedy, nodes) if why else ok(f"{what} is reached", nodes)
