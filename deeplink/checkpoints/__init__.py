"""Checkpoints that are whole or not there, and that only the newest attempt of a job can add to.

Other packages import: `agents`, `claims`, `copies`, `inspection`, `interval`, `manifest`, `multirank_save`,
`tensors`.
"""

from __future__ import annotations

from deeplink.checkpoints.agents import NotFetchedError
from deeplink.checkpoints.claims import Claim, ClaimDamagedError
from deeplink.checkpoints.folder import Checkpoints
from deeplink.checkpoints.found import (
    Checkpoint,
    FolderGoneError,
    NoModelError,
    NoStateError,
    NotFiniteError,
    NothingWholeError,
    ShardedStateError,
    Skipped,
    StorageSilentError,
    StorageUnreadableError,
    UnmatchedStatesError,
    UnreadableStateError,
)
from deeplink.checkpoints.interval import Advice, NoAdviceError
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointError, CheckpointWriteError
from deeplink.checkpoints.multirank_save import SaveAbandonedError
from deeplink.core.types import FencedError

__all__ = [
    "Advice",
    "Checkpoint",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointWriteError",
    "Checkpoints",
    "Claim",
    "ClaimDamagedError",
    "FencedError",
    "FolderGoneError",
    "NoAdviceError",
    "NoModelError",
    "NoStateError",
    "NotFetchedError",
    "NotFiniteError",
    "NothingWholeError",
    "SaveAbandonedError",
    "ShardedStateError",
    "Skipped",
    "StorageSilentError",
    "StorageUnreadableError",
    "UnmatchedStatesError",
    "UnreadableStateError",
]
