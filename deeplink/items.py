"""What the map-style datasets have in common: one version of a packed dataset, read by the number of an item."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch.utils import data as torch_data
from typing_extensions import override

from deeplink.cache.reader import Reader
from deeplink.config import load_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.reads.read_stats import ReadStats
    from deeplink.config import Config
    from deeplink.types import Version


class MapDatasetBase(torch_data.Dataset[Any]):
    """Items of a packed dataset's version, which is pinned when this is made.

    Args:
        name: what `deeplink pack` was given.
        root: folder in the dataset to take the samples from.
        version: the newest when None.
        config: where catalog, store and members are; what the environment and the files say when None.

    Attributes:
        name, root, version: as above; the version is the one that was found.

    Raises:
        DatasetMissingError: there is no such dataset, or not this version of it.
        ConfigError: the configuration cannot be used.
    """

    def __init__(self, name: str, root: str, version: Version | None, config: Config | None) -> None:
        self._config = config or load_config()
        self._reader = Reader.open(name, version=version, config=self._config)
        self.name, self.root, self.version = name, root.strip("/"), self._reader.version

    def __len__(self) -> int:
        raise NotImplementedError

    @override
    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return one item.

        Raises:
            IndexError: there is no such item.
            NoClassError: it is to have a label, and has none.
            SampleUnavailableError: its bytes cannot be had anywhere.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> Any:
        """Return items in the order of `indices`; their bytes are read at once. Raises as `__getitem__`."""
        raise NotImplementedError

    def _position(self, index: SupportsIndex) -> int:
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return position

    def stats(self) -> ReadStats:
        """Return how this process's reads were served so far: from here, from other nodes, from the source."""
        return self._reader.stats()

    def close(self) -> None:
        """Let go of files and connections; a later read opens them again."""
        self._reader.close()
