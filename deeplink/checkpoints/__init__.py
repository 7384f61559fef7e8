"""Checkpoints that are whole or not there, and that only the newest attempt of a job can add to."""

from __future__ import annotations

from deeplink.checkpoints.claims import Claim, ClaimDamagedError
from deeplink.checkpoints.folder import Checkpoint, CheckpointExistsError, Checkpoints, ReadOnlyError, Skipped
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointWriteError, MetaError
from deeplink.types import FencedError

__all__ = [
    "Checkpoint",
    "CheckpointDamagedError",
    "CheckpointExistsError",
    "CheckpointWriteError",
    "Checkpoints",
    "Claim",
    "ClaimDamagedError",
    "FencedError",
    "MetaError",
    "ReadOnlyError",
    "Skipped",
]
