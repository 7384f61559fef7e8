"""Unbroken rows of like answers: what our probes have said of each node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.clock import Clock
    from deeplink.scheduler.watch.evidence import NodeSnapshot
    from deeplink.scheduler.watch.probe import Address, Prober
    from deeplink.types import NodeName

PROBE_DEADLINE_S = 0.5
STALE_S = 3.0
"""A row that was not carried on for so long is broken."""


@dataclass(frozen=True, slots=True)
class _Row:
    """An unbroken row of like answers of one node: away or not."""

    answer: ProbeResult
    since: float
    until: float
    probes: int


@dataclass(slots=True, kw_only=True)
class Probing:
    """Probes nodes and remembers how each has answered. One thread only.

    Attributes:
        counts: answers since they were last taken, for whoever counts them.
    """

    prober: Prober
    clock: Clock
    counts: Counter[ProbeResult] = field(default_factory=Counter)
    _rows: dict[NodeName, _Row] = field(default_factory=dict)

    def probe(self, addresses: Mapping[NodeName, Address]) -> None:
        """Try these nodes, all at once, for at most half a second."""
        began = self.clock.monotonic()
        answers = self.prober.probe(addresses, PROBE_DEADLINE_S) if addresses else {}
        ended = self.clock.monotonic()
        self.counts.update(answers.values())
        rows = {}
        for name, answer in answers.items():
            before = self._rows.get(name)
            if before and before.answer.away == answer.away and before.answer is not ProbeResult.UNKNOWN:
                rows[name] = _Row(answer, before.since, ended, before.probes + 1)
            else:
                rows[name] = _Row(answer, began, ended, 1)
        # A row that was not carried on this time is broken, unless it is only the other caller's turn.
        kept = {name: row for name, row in self._rows.items() if name not in rows and ended - row.until < STALE_S}
        self._rows = {**kept, **rows}

    def forget(self) -> None:
        """Break every row: it was we who were away."""
        self._rows.clear()

    def reach(self, name: NodeName) -> bool | None:
        """Return whether a node answered when it was probed last; None when that says nothing now."""
        row = self._rows.get(name)
        if row is None or row.answer is ProbeResult.UNKNOWN or self.clock.monotonic() - row.until > STALE_S:
            return None
        return row.answer is ProbeResult.ANSWERS

    def away(self, name: NodeName) -> tuple[float, int]:
        """Return for how long, and in how many probes, a node has not answered, unbroken and up to now; else 0."""
        row = self._rows.get(name)
        if row is None or not row.answer.away or self.clock.monotonic() - row.until > STALE_S:
            return 0.0, 0
        return row.until - row.since, row.probes

    def seen(self, nodes: Mapping[NodeName, NodeSnapshot], now: float) -> dict[NodeName, NodeSnapshot]:
        """Return the nodes with what the probes say of them at `now`, monotonic."""
        probed = {name: self._seen(nodes[name], row, now) for name, row in self._rows.items() if name in nodes}
        return {**nodes, **probed}

    @staticmethod
    def _seen(node: NodeSnapshot, row: _Row, now: float) -> NodeSnapshot:
        if row.answer is ProbeResult.UNKNOWN:
            return node
        lasted, probed_s = row.until - row.since, max(0.0, now - row.until)
        if row.answer is ProbeResult.ANSWERS:
            return replace(node, slurmd=row.answer, answering_s=lasted, probed_s=probed_s)
        return replace(node, slurmd=row.answer, away_s=lasted, away_probes=row.probes, probed_s=probed_s)
