"""Reaching for slurmd: one TCP connection to each node, all at once, within a deadline.

slurmd logs two error lines for a connection that says nothing (measured), so probes are for moments of suspicion.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.tcp import connect_all
from deeplink.rpc.resolving import addresses_of_all
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.slurm.client import SLURMD_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.slurm.client import Slurm

Address = tuple[str, int]

PROBE_DEADLINE_S = 0.5
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


def slurmd_port(slurm: Slurm) -> int:
    """Return the port slurmd listens on where a node has none of its own."""
    said = re.search(r"^SlurmdPort\s*=\s*(\d+)", slurm.run(["scontrol", "show", "config"]), re.MULTILINE)
    return int(said[1]) if said else SLURMD_PORT
