"""Reaching for slurmd: one TCP connection to each node, all at once, within a deadline.

slurmd logs two error lines for a connection that says nothing (measured), so probes are for moments of suspicion.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.tcp import connect_all
from deeplink.rpc.resolving import addresses_of_all
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.slurm.client import SLURMD_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.recovery.evidence import NodeSnapshot
    from deeplink.scheduler.slurm.client import Slurm

Address = tuple[str, int]

PROBE_DEADLINE_S = 0.5
STALE_S = 3.0  # a row that was not carried on for so long is broken
_ANSWERS: dict[int | None, ProbeResult] = {
    0: ProbeResult.ANSWERS,
    errno.ECONNREFUSED: ProbeResult.REFUSES,
    errno.ECONNRESET: ProbeResult.REFUSES,
    # What the network says when no one is there; every other error is ours, and says nothing about the node.
    None: ProbeResult.SILENT,
    errno.EHOSTUNREACH: ProbeResult.SILENT,
    errno.ETIMEDOUT: ProbeResult.SILENT,
    errno.EHOSTDOWN: ProbeResult.SILENT,
}
_BY_WEIGHT = (ProbeResult.ANSWERS, ProbeResult.REFUSES, ProbeResult.SILENT, ProbeResult.UNKNOWN)
"""Of the addresses of one node the first of these is the node's answer."""


class Prober(Protocol):
    """Tries to reach nodes."""

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        """Return within about `deadline_s` how each target answered."""
        ...


MOST_AT_ONCE = 512  # a service has the descriptors; each group has the deadline to itself


@dataclass(frozen=True, slots=True)
class TcpProber:
    """Connects to each target without waiting for one after another."""

    clock: Clock = field(default_factory=SystemClock)

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        """Return how each target answered; SILENT when none of its addresses did within the deadline."""
        answers = dict.fromkeys(targets, ProbeResult.UNKNOWN)
        found = addresses_of_all(set(targets.values()), self.clock)
        tried = [(name, where) for name, target in targets.items() for *_, where in found.get(target, ())]
        results = connect_all(
            [where for _, where in tried], deadline_s, self.clock.monotonic, at_once=MOST_AT_ONCE
        )
        for (name, _), result in zip(tried, results, strict=True):
            answer = _ANSWERS.get(result, ProbeResult.UNKNOWN)
            answers[name] = min(answers[name], answer, key=_BY_WEIGHT.index)
        return answers


# Unbroken rows of like answers: what our probes have said of each node.


@dataclass(frozen=True, slots=True)
class _Row:
    """An unbroken row of like answers of one node: away or not."""

    answer: ProbeResult
    since: float
    until: float
    probes: int


@dataclass(slots=True, kw_only=True)
class Probing:
    """Probes nodes and remembers how each has answered. One thread only."""

    prober: Prober
    clock: Clock
    counts: Counter[ProbeResult] = field(default_factory=Counter)  # answers since this was last cleared
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


def slurmd_port(slurm: Slurm) -> int:
    """Return the port slurmd listens on where a node has none of its own."""
    said = re.search(r"^SlurmdPort\s*=\s*(\d+)", slurm.run(["scontrol", "show", "config"]), re.MULTILINE)
    return int(said[1]) if said else SLURMD_PORT
