"""Where is slurmd gone and the node is not? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import SLURMD, ProbeResult
from deeplink.scheduler.watch.records import HealthSeverity, IncidentKind
from deeplink.scheduler.watch.rules.queries import jobs_on, long_away
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.watch.evidence import NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import NodeName


_KNOWN = frozenset(HealthSeverity) - {HealthSeverity.UNKNOWN}


def lost_slurmds(sight: Snapshot, policy: WatchPolicy, elsewhere: AbstractSet[NodeName | None]) -> list[Verdict]:
    """Return the nodes that live without a slurmd: told, and nothing is done to them or to their jobs.

    The node's system agent starts slurmd again. Where none stands, Slurm sets the node down after SlurmdTimeout
    and starts the job again; that this was slurmd's fault, not the node's, is on record then. Nodes that are
    `elsewhere` are another verdict's.
    """
    return [
        verdict
        for name, node in sorted(sight.nodes.items())
        if name not in elsewhere and not node.down and (verdict := _lost(node, sight, policy))
    ]


def tells_of_restart(finding: HealthFinding) -> bool:
    """Whether a node's agent says so that it has started slurmd anew."""
    return finding.check == SLURMD and finding.severity is HealthSeverity.OBSERVE


def _lost(node: NodeSnapshot, sight: Snapshot, policy: WatchPolicy) -> Verdict | None:
    said = tuple(f"its own check: {one.problem}" for one in node.wrong(*_KNOWN) if one.check == SLURMD)
    heard = (f"an agent on it was heard {node.heard_s:.1f} s ago",) if node.heard_since else ()
    # Gone is worth a comment; what is only to be observed is that the agent has started it anew.
    anew = not node.slurmd.away and any(map(tells_of_restart, node.findings))
    if not anew and not (node.slurmd.away and said) and not (long_away(node, policy) and heard):
        return None
    jobs = jobs_on(node.name, sight)
    how = "refuses connections" if node.slurmd is ProbeResult.REFUSES else "is silent"
    seen = (f"slurmd {how} for {node.away_s:.1f} s ({node.away_probes} probes)",) if node.slurmd.away else ()
    return Verdict(
        kind=IncidentKind.SLURMD_LOST,
        remedy=Remedy.NOTHING,
        reasons=(*seen, *said, *(heard if seen else ())),
        attempt=jobs[0].attempt if jobs else None,
        node=node.name,
        since_s=node.away_s,
    )
