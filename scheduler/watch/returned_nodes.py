"""Nodes that came back after they were lost: when, and whether they had rebooted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.node_history import LATER_S, boot_unix
from deeplink.scheduler.watch.records import KNOWN_LATER, NODE_LOST, IncidentKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock
    from deeplink.scheduler.watch.evidence import NodeSnapshot, Snapshot
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.records import Incident
    from deeplink.types import NodeName

REMEMBERED_S = 86_400.0
PATIENCE_S = 30.0
"""How long after its return we wait for a node's agent to tell its kernel, where one told before."""
MOST_REMEMBERED = 1_024


@dataclass(slots=True)
class _Lost:
    incident: str
    began_unix: float
    at: float
    boot_id: str
    missed: bool = False  # by Slurm, since then
    back_at: float | None = None


@dataclass(slots=True, kw_only=True)
class ReturnedNodes:
    """Waits for lost nodes to come back. One thread only.

    Args:
        say: told one line for each.
    """

    journal: Journal
    clock: Clock
    say: Callable[[str], None]
    _lost: dict[NodeName, _Lost] = field(default_factory=dict)

    def begin(self) -> None:
        """Wait for those that were lost while another led, too."""
        since = self.clock.unix() - REMEMBERED_S
        for incident in reversed(self.journal.incidents(since_unix=since, limit=MOST_REMEMBERED)):
            if incident.node and incident.kind in NODE_LOST - KNOWN_LATER:
                self.lose(incident, "")

    def lose(self, incident: Incident, boot_id: str) -> None:
        """Wait for the node of this incident; `boot_id` is the kernel it had, empty where unknown."""
        if incident.node and incident.kind in NODE_LOST - KNOWN_LATER:
            before = self._lost.get(incident.node)
            if before is None or before.incident != incident.id:
                self._lost[incident.node] = _Lost(
                    incident.id, incident.began_unix, self.clock.monotonic(), boot_id
                )
            if len(self._lost) > MOST_REMEMBERED:
                del self._lost[next(iter(self._lost))]

    def note(self, sight: Snapshot) -> None:
        """Tell of those that are back."""
        if not self._lost or not sight.controller:
            return
        now = self.clock.monotonic()
        for name, lost in list(self._lost.items()):
            node = sight.nodes.get(name)
            if node is None or now - lost.at > REMEMBERED_S:
                del self._lost[name]
                continue
            lost.missed = lost.missed or node.down or not node.responding
            lost.back_at = (lost.back_at or now) if self._is_back(node, lost, now) else None
            kind = _what_it_was(node, lost, now) if lost.back_at is not None else None
            if kind:
                del self._lost[name]
                self._tell(name, lost, kind)

    @staticmethod
    def _is_back(node: NodeSnapshot, lost: _Lost, now: float) -> bool:
        if node.slurmd.away or node.down or not node.responding:
            return False
        # That Slurm hears it says something only where it had noticed the loss.
        return node.slurmd is ProbeResult.ANSWERS or _heard_after(node, lost, now) or lost.missed

    def _tell(self, name: NodeName, lost: _Lost, kind: IncidentKind) -> None:
        known = self.journal.incident(lost.incident)
        if known is None:
            return
        after = self.clock.unix() - lost.began_unix
        rebooted = kind is IncidentKind.NODE_REBOOTED
        which = "another kernel: it had rebooted" if rebooted else "the kernel it had: it was cut off"
        evidence = f"{name} came back after {after:.0f} s with {which}"
        self.journal.record_incident(replace(known, kind=kind, evidence=evidence))
        self.journal.record_moment(lost.incident, self.clock.unix(), evidence)
        self.say(f"{lost.incident}: {evidence}")


def _heard_after(node: NodeSnapshot, lost: _Lost, now: float) -> bool:
    return node.heard_s is not None and now - node.heard_s > lost.at


def _what_it_was(node: NodeSnapshot, lost: _Lost, now: float) -> IncidentKind | None:
    """Return which it was; None while that is not known."""
    if lost.boot_id and node.boot_id and (node.boot_id != lost.boot_id or _heard_after(node, lost, now)):
        return IncidentKind.NODE_REBOOTED if node.boot_id != lost.boot_id else IncidentKind.NODE_CUT_OFF
    if lost.boot_id and lost.back_at is not None and now - lost.back_at < PATIENCE_S:
        return None
    booted = boot_unix(node.boot_shown)
    if not booted:
        return None
    if booted > lost.began_unix - LATER_S:
        return IncidentKind.NODE_REBOOTED
    # With a new slurmd the boot time may be one that was written down before.
    anew = node.slurmd_anew_s is not None and node.slurmd_anew_s < now - lost.at
    return None if anew else IncidentKind.NODE_CUT_OFF
