"""How often to save, told from what a folder of checkpoints has seen."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import Claims
from deeplink.checkpoints.entries import entries
from deeplink.checkpoints.interval import Advice, advise, mtbf_of_starts
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.errors import DeepLinkError
from deeplink.text import counted

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim

RESTART_S = 60.0
"""Taken for the time from a failure to the first new step where nobody says another."""


class NoAdviceError(DeepLinkError):
    """What a save costs, or how often something fails, is not known."""

    def __init__(self, folder: Path, what: str, remedy: str) -> None:
        super().__init__(f"no interval can be advised for {folder}: {what}", remedy=remedy)
        self.folder, self.what = folder, what


def advice_for(
    folder: Path, *, now_unix: float, mtbf_s: float | None = None, restart_s: float = RESTART_S
) -> Advice:
    """Return how often to save into `folder`.

    What a save costs is the median over the checkpoints there. The failure rate is `mtbf_s`, or that of the newest
    job that saved there: every attempt but its first is taken for a failure's.

    Raises:
        NoAdviceError: no checkpoint there says what it cost, or the newest job has not failed yet.
        ClaimDamagedError: a claim cannot be read.
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
