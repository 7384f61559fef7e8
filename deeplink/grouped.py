"""`deeplink.GroupedDataset`: packed files that belong together as one sample, WebDataset's way."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.grouping import column, grouped, key_of
from deeplink.items import MapDatasetBase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.config import Config
    from deeplink.types import Version

_NAMED = 5


class Missing(enum.Enum):
    """What becomes of samples that lack a column."""

    ERROR = "error"
    """The dataset cannot be made."""
    SKIP = "skip"
    """They are left out."""
    NONE = "none"
    """The column is None."""


class ColumnMissingError(DeepLinkError):
    """Samples lack a column that was asked for."""

    def __init__(self, name: str, column: str, keys: Sequence[str], count: int) -> None:
        there = ", ".join(map(repr, keys)) + (" ..." if count > len(keys) else "")
        super().__init__(
            f"dataset {name!r}: {count:,} samples have no file for column {column!r}: {there}",
            remedy='Give missing="skip" to leave them out, or missing="none" for None in its place.',
        )
        self.name, self.column, self.keys, self.count = name, column, tuple(keys), count


class NoSamplesError(DeepLinkError):
    """No file below the root has one of the extensions."""

    def __init__(self, name: str, root: str, columns: Sequence[str]) -> None:
        super().__init__(
            f"dataset {name!r}: below {root or '/'!r} no sample has {', '.join(map(repr, columns))}",
            remedy="A column is what follows the first dot of files' names; `deeplink ls` shows them.",
        )
        self.name, self.root, self.columns = name, root, tuple(columns)


class GroupedDataset(MapDatasetBase):
    """Samples of several files: `a/7.jpg`, `a/7.json` and `a/7.seg.png` are columns of the sample `a/7`.

    An item is a dict: `__key__`, and the bytes of each column by its name. The key is the path up to the first dot
    of the file's own name, the extension all that is behind it, in lower case. Files with other extensions are
    left alone. All files of a batch are read at once.

    The version is pinned when the dataset is made. Works with `ResumableSampler`, under DataLoader workers however
    they are started, and pickles.

    Args:
        name: what `deeplink pack` was given.
        columns: extensions, such as `("jpg", "json")`; or names and extensions, such as `{"image": "jpg;png"}`. Of
            several, separated by semicolons, the first that a sample has counts.
        transform: gets the dict of bytes; its result is the item. Without it the dict is. Under spawned workers it
            must be picklable.
        root: folder in the dataset to take the samples from, such as "train".
        missing: what becomes of samples that lack a column: "error", "skip", or "none".
        version: the newest when None.
        config: where catalog, store and members are; what the environment and the files say when None.

    Attributes:
        name, root, version: as above; the version is the one that was found.
        columns: the names of the columns.

    Raises:
        DatasetMissingError: there is no such dataset, or not this version of it.
        NoSamplesError: no sample has any of the columns.
        ColumnMissingError: samples lack a column, and `missing` is "error".
        TwoInOneColumnError: a sample has two files for one extension.
        ConfigError: the configuration cannot be used.
        ValueError: no column is named, or `missing` is none of these.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str] | Mapping[str, str],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        root: str = "",
        missing: Missing | str = Missing.ERROR,
        version: Version | None = None,
        config: Config | None = None,
    ) -> None:
        wanted = _wanted(columns)
        self._missing = Missing(missing)
        super().__init__(name, root, version, config)
        self.transform, self.columns = transform, tuple(wanted)
        self._rows, self._stems = self._table(list(wanted.values()))

    def _table(self, extensions: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's rows by column (-1: none), and the bytes of its key; int64."""
        index = self._reader.index
        grouping = grouped(index, index.rows_below(self.root))
        table = np.stack([column(index, grouping, names) for names in extensions], axis=1)
        stems = np.zeros(grouping.count, np.int64)
        stems[grouping.groups] = grouping.stems
        is_there = table >= 0
        is_sample = is_there.all(axis=1) if self._missing is Missing.SKIP else is_there.any(axis=1)
        if not is_sample.any():
            raise NoSamplesError(self.name, self.root, self.columns)
        table, stems = table[is_sample], stems[is_sample]
        if self._missing is Missing.ERROR:
            self._refuse_missing(table, stems)
        return table, stems

    def _refuse_missing(self, table: np.ndarray, stems: np.ndarray) -> None:
        for name, rows in zip(self.columns, table.T, strict=True):
            lacking = np.flatnonzero(rows < 0)
            if len(lacking):
                some = lacking[:_NAMED].tolist()
                keys = [key_of(self._reader.index, int(table[i].max()), int(stems[i])) for i in some]
                raise ColumnMissingError(self.name, name, keys, len(lacking))

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        positions = [self._position(index) for index in indices]
        rows = self._rows[positions].reshape(-1)
        views = iter(self._reader.read(rows[rows >= 0]))
        items = []
        for position in positions:
            item: dict[str, Any] = {"__key__": self.key(position)}
            for name, row in zip(self.columns, self._rows[position].tolist(), strict=True):
                item[name] = bytes(next(views)) if row >= 0 else None
            items.append(self.transform(item) if self.transform else item)
        return items

    def key(self, index: SupportsIndex) -> str:
        """Return an item's `__key__`, the path of its files up to their names' first dot.

        Raises:
            IndexError: there is no such item.
        """
        position = self._position(index)
        return key_of(self._reader.index, int(self._rows[position].max()), int(self._stems[position]))

    @property
    def rows(self) -> np.ndarray:
        """Row in the index of each item's file in each column, -1 where it has none; int64, (len, columns)."""
        return self._rows.copy()


def _wanted(columns: Sequence[str] | Mapping[str, str]) -> dict[str, list[str]]:
    """Return the extensions of each column, in lower case.

    >>> _wanted({"image": "JPG;png"}), _wanted(["seg.png"])
    ({'image': ['jpg', 'png']}, {'seg.png': ['seg.png']})
    """
    if isinstance(columns, str):
        raise TypeError(f"columns is a list of extensions, or a dict of names and extensions: [{columns!r}]")
    named = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    found = {name: [part.strip().lower() for part in text.split(";")] for name, text in named.items()}
    if not found or not all(all(parts) for parts in found.values()) or "__key__" in found:
        raise ValueError(f"columns {columns!r}: name at least one extension, and none __key__")
    return found
