"""DeepLink: what training code imports.

`pack` makes a dataset, `Dataset`, `IterableDataset` and `GroupedDataset` read it, `Checkpoints` saves whole or not
at all, `report` tells how far the training is, `section` what it is about besides, `timed` how long its own work
takes, `should_save` when the job is about to end.

Names are loaded when first used, so that a head node without torch can import the package and a command that needs
none of it starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.checkpoints import Checkpoint as Checkpoint
    from deeplink.checkpoints import Checkpoints as Checkpoints
    from deeplink.core.errors import DeepLinkError
    from deeplink.data.dataset import Dataset
    from deeplink.data.grouped import GroupedDataset
    from deeplink.data.iterable import IterableDataset
    from deeplink.ops.packing import pack
    from deeplink.training.progress import report, section, should_save
    from deeplink.training.timing import timed

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "deeplink.checkpoints",
    "Checkpoints": "deeplink.checkpoints",
    "Dataset": "deeplink.data.dataset",
    "DeepLinkError": "deeplink.core.errors",
    "GroupedDataset": "deeplink.data.grouped",
    "IterableDataset": "deeplink.data.iterable",
    "pack": "deeplink.ops.packing",
    "report": "deeplink.training.progress",
    "section": "deeplink.training.progress",
    "should_save": "deeplink.training.progress",
    "timed": "deeplink.training.timing",
}

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Dataset",
    "DeepLinkError",
    "GroupedDataset",
    "IterableDataset",
    "__version__",
    "pack",
    "report",
    "section",
    "should_save",
    "timed",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'deeplink' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
