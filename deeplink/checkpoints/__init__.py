"""Checkpoints that are whole or not there, and that only the newest attempt of a job can add to."""

from __future__ import annotations

from deeplink.checkpoints.advising import NoAdviceError
from deeplink.checkpoints.claims import Claim, ClaimDamagedError
from deeplink.checkpoints.fetching import NotFetchedError
from deeplink.checkpoints.folder import Checkpoints
from deeplink.checkpoints.found import (
    Checkpoint,
    CheckpointExistsError,
    FolderGoneError,
    NoModelError,
    NoStateError,
    NotFiniteError,
    NothingWholeError,
    ReadOnlyError,
    ShardedStateError,
    Skipped,
    StorageSilentError,
    StorageUnreadableError,
    UnmatchedStatesError,
    UnreadableStateError,
)
from deeplink.checkpoints.interval import Advice
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointWriteError, MetaError
from deeplink.checkpoints.messages import MessageError
from deeplink.checkpoints.multirank_save import PartsMissingError, SaveAbandonedError
from deeplink.checkpoints.recovery_agreement import NoAgreementError
from deeplink.types import FencedError

__all__ = [
    "Advice",
    "Checkpoint",
    "CheckpointDamagedError",
    "CheckpointExistsError",
    "CheckpointWriteError",
    "Checkpoints",
    "Claim",
    "ClaimDamagedError",
    "FencedError",
    "FolderGoneError",
    "MessageError",
    "MetaError",
    "NoAdviceError",
    "NoAgreementError",
    "NoModelError",
    "NoStateError",
    "NotFetchedError",
    "NotFiniteError",
    "NothingWholeError",
    "PartsMissingError",
    "ReadOnlyError",
    "SaveAbandonedError",
    "ShardedStateError",
    "Skipped",
    "StorageSilentError",
    "StorageUnreadableError",
    "UnmatchedStatesError",
    "UnreadableStateError",
]
