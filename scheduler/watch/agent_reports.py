"""Merges what standing agents and job agents report about each node. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import HealthSeverity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.evidence import WatchPolicy
    from deeplink.scheduler.watch.heartbeats import AgentHeartbeat, LauncherHeartbeat
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import NodeName


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What is said of one node.

    Attributes:
        findings: what its checks found wrong, told lately; of several agents that found the same the gravest word.
        heard_s: since an agent on it was last heard; None where none ever was.
        attended_s: since its standing agent was; None where none is known.
        boot_id: its kernel's, by the newest word; empty where unknown.
    """

    findings: tuple[HealthFinding, ...] = ()
    heard_s: float | None = None
    attended_s: float | None = None
    boot_id: str = ""


NOTHING_SAID = AgentReport()


def words(
    attended: Iterable[AgentHeartbeat],
    heard: Iterable[tuple[LauncherHeartbeat, frozenset[NodeName]]],
    now: float,
    policy: WatchPolicy,
) -> dict[NodeName, AgentReport]:
    """Return what is said of each node of which anything is.

    Args:
        attended: the standing agents' words.
        heard: the beats of jobs, each with the nodes that Slurm has given the job: of others it is not believed.
        now: monotonic.
        policy: how old a word may be.
    """
    said: dict[NodeName, AgentReport] = {}
    for one in attended:
        age = max(0.0, now - one.heard_at)
        fresh = one.ourselves and age < policy.told_s
        said[one.node.name] = AgentReport(
            one.node.health if fresh else (), age if one.ourselves else None, age, one.node.boot_id
        )
    for beat, theirs in heard:
        since = max(0.0, now - beat.heard_at) + beat.beat.waited_s
        for node in beat.beat.node_beats if beat.ourselves else ():
            if node.name in theirs:
                before = said.get(node.name, NOTHING_SAID)
                age = since + node.silent_s
                # Who is missed is not heard, though the word on it is the newest.
                newest = node.silent_s < policy.witness_s and (before.heard_s is None or age < before.heard_s)
                said[node.name] = AgentReport(
                    _gravest(before.findings, node.health) if age < policy.told_s else before.findings,
                    age if newest else before.heard_s,
                    before.attended_s,
                    node.boot_id if node.boot_id and (newest or not before.boot_id) else before.boot_id,
                )
    return said


_LADDER = list(HealthSeverity)


def _gravest(*told: tuple[HealthFinding, ...]) -> tuple[HealthFinding, ...]:
    if not any(told[1:]):
        return told[0]
    by_check: dict[str, HealthFinding] = {}
    for finding in (finding for findings in told for finding in findings):
        before = by_check.get(finding.check)
        if before is None or _LADDER.index(finding.severity) > _LADDER.index(before.severity):
            by_check[finding.check] = finding
    return tuple(by_check.values())
