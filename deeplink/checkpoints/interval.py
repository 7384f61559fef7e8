"""How often to save: the interval that loses least, from what a save costs and how often something fails.

Throughout, a save costs the training `save_s` seconds, something fails every `mtbf_s` seconds in the mean, and it
takes `restart_s` seconds from a failure to the first new step.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import Claims, entries
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim

FAILURES_PER_NODE_DAY = 6.50e-3
"""Published for a cluster of 8-GPU A100 nodes over 11 months (arXiv 2410.21680): 6.50 per 1,000 node-days."""
RESTART_S = 60.0
"""Taken for the time from a failure to the first new step where it is not given."""
_DAY_S = 86_400.0


class NoAdviceError(DeepLinkError):
    """What a save costs, or how often something fails, is not known."""

    def __init__(self, folder: Path, what: str, remedy: str) -> None:
        super().__init__(f"no interval can be advised for {folder}: {what}", remedy=remedy)
        self.folder, self.what = folder, what


def young(save_s: float, mtbf_s: float) -> float:
    """Return sqrt(2 C M): the first-order optimum (J. W. Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return the higher-order optimum (J. T. Daly, Future Generation Computer Systems 22(3), 2006, eq. 37).

    sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C while C < 2M; M above. Work between two saves, without the save.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def availability_optimal(save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return Ts + sqrt(2 (Tf + Tr) Ts + Ts^2), from one save's begin to the next's: it maximises `availability`.

    arXiv 2410.18124.
    """
    return save_s + math.sqrt(2 * (mtbf_s + restart_s) * save_s + save_s**2)


def availability(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the share of the time that is work that lasts, when a save begins every `interval_s` seconds.

    A failure costs the restart and, in the mean, half an interval that is done again.
    """
    return (1 - save_s / interval_s) * mtbf_s / (mtbf_s + restart_s + interval_s / 2)


def mtbf_of_nodes(nodes: int, failures_per_node_day: float = FAILURES_PER_NODE_DAY) -> float:
    """Return the seconds between two failures of a job on so many nodes, at a rate per node."""
    return _DAY_S / (nodes * failures_per_node_day)


def mtbf_of_starts(starts_unix: Sequence[float], now_unix: float) -> float | None:
    """Return the seconds between two failures, every start but the first being one's; None with under two.

    >>> mtbf_of_starts([0.0, 3000.0, 5000.0], 6000.0)
    3000.0
    """
    failures, span = len(starts_unix) - 1, now_unix - min(starts_unix, default=now_unix)
    return span / failures if failures > 0 and span > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often to save, in seconds from one save's begin to the next's.

    Attributes:
        every_s: what is advised: the availability-optimal interval, but no less than a save takes.
        young_s, daly_s, optimal_s: what the three formulas say.
        stall_s: what a save costs the training.
        save_s: how long one takes, from its begin until it is whole.
        mtbf_s: seconds between two failures.
        restart_s: seconds from a failure to the first new step.
        availability: share of the time that is work that lasts, at `every_s`.
        basis: where the failure rate comes from, for people.
    """

    every_s: float
    young_s: float
    daly_s: float
    optimal_s: float
    stall_s: float
    save_s: float
    mtbf_s: float
    restart_s: float
    availability: float
    basis: str


def advise(*, stall_s: float, save_s: float, mtbf_s: float, restart_s: float, basis: str) -> Advice:
    """Return how often to save."""
    times = (stall_s, save_s, mtbf_s, restart_s)
    if not all(math.isfinite(time) and time >= 0 for time in times) or not stall_s or not mtbf_s:
        raise ValueError(f"no interval of stall {stall_s}, save {save_s}, mtbf {mtbf_s}, restart {restart_s}")
    optimal = availability_optimal(stall_s, mtbf_s, restart_s)
    every = max(optimal, save_s)  # the next save waits for the one under way
    return Advice(
        every_s=every,
        young_s=young(stall_s, mtbf_s),
        daly_s=daly(stall_s, mtbf_s),
        optimal_s=optimal,
        stall_s=stall_s,
        save_s=save_s,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        availability=availability(every, stall_s, mtbf_s, restart_s),
        basis=basis,
    )


def advice_for(
    folder: Path, *, now_unix: float, mtbf_s: float | None = None, restart_s: float = RESTART_S
) -> Advice:
    """Return how often to save into `folder`.

    What a save costs is the median over the checkpoints there. The failure rate is `mtbf_s`, or that of the newest
    job that saved there: every attempt but its first is taken for a failure's.
    """
    costs = []
    for entry in entries(folder):
        try:
            manifest = manifests.read_manifest(folder / entry.name)
        except (CheckpointDamagedError, OSError):  # others say what a save costs
            continue
        if manifest.stall_s > 0:
            costs.append((manifest.stall_s, manifest.save_s))
    if not costs:
        raise NoAdviceError(folder, "no checkpoint there says what it cost", "Save once, and ask again.")
    basis = "as given"
    if mtbf_s is None:
        starts = _starts_of_newest_job(Claims(folder).all())
        mtbf_s = mtbf_of_starts(starts, now_unix)
        if mtbf_s is None:
            raise NoAdviceError(
                folder, "its job was not restarted yet", "Say how often one fails: --mtbf, or --nodes."
            )
        restarts = counted(len(starts) - 1, "restart")
        basis = f"{restarts} in {(now_unix - starts[0]) / 3600:.1f} h"
    stall, save = (statistics.median(column) for column in zip(*costs, strict=True))
    return advise(stall_s=stall, save_s=save, mtbf_s=mtbf_s, restart_s=restart_s, basis=basis)


def _starts_of_newest_job(claims: list[Claim]) -> list[float]:
    job = next((claim.attempt.job for claim in reversed(claims) if claim.attempt), None)
    return sorted(claim.created_unix for claim in claims if claim.attempt and claim.attempt.job == job)
