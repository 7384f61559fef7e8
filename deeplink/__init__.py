"""DeepLink: what training code imports.

`Dataset`, `IterableDataset` and `GroupedDataset` read packed samples, `Checkpoints` saves whole or not at all,
`report` tells how far the training is, `section` what it is about besides, `timed` how long its own work takes,
`should_save` when the job is about to end.

Names are loaded when first used, so that a head node without torch can import the package and a command that needs
none of it starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.checkpoints import Checkpoint as Checkpoint
    from deeplink.checkpoints import Checkpoints as Checkpoints
    from deeplink.dataset import Dataset as Dataset
    from deeplink.errors import DeepLinkError as DeepLinkError
    from deeplink.grouped import GroupedDataset as GroupedDataset
    from deeplink.iterable import IterableDataset as IterableDataset
    from deeplink.progress import report as report
    from deeplink.progress import should_save as should_save
    from deeplink.sections import section as section
    from deeplink.timing import timed as timed

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "deeplink.checkpoints",
    "Checkpoints": "deeplink.checkpoints",
    "Dataset": "deeplink.dataset",
    "DeepLinkError": "deeplink.errors",
    "GroupedDataset": "deeplink.grouped",
    "IterableDataset": "deeplink.iterable",
    "report": "deeplink.progress",
    "section": "deeplink.sections",
    "should_save": "deeplink.progress",
    "timed": "deeplink.timing",
}

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Dataset",
    "DeepLinkError",
    "GroupedDataset",
    "IterableDataset",
    "__version__",
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
