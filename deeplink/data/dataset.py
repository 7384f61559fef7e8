"""`deeplink.Dataset`: a packed dataset as PyTorch's DataLoader wants it."""

from __future__ import annotations

import copy
import functools
import operator
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
from torch.utils import data as torch_data
from typing_extensions import override

from deeplink.cache.errors import KeyMissingError
from deeplink.cache.format.index import Labels
from deeplink.cache.membership import configured_members
from deeplink.cache.reader import Reader
from deeplink.core.config import load_config
from deeplink.core.text import nearest
from deeplink.data.digest import receipt
from deeplink.data.errors import DatasetError, misuse
from deeplink.data.order import Blocks, Residency
from deeplink.data.sampler import SampledBatch, sample_seed
from deeplink.data.shared_batches import PackedBatch, Packing, ring_for
from deeplink.data.subsets import digest_of, picked, split_at_random
from deeplink.scheduler.slurm.munge import vouch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.reader import ReadStats
    from deeplink.core.config import Config
    from deeplink.core.types import SampleKey
    from deeplink.data.shared_batches import Ring


class MapDatasetBase(torch_data.Dataset[Any]):
    """Items of a packed dataset's version, which is pinned when this is made."""

    packed = False

    def __init__(self, name: str, root: str, version: str | None, config: Config | None) -> None:
        self._config = config or load_config()
        self._reader = Reader.open(name, version=version, config=self._config, vouch=vouch)
        self.name, self.root, self.version = name, root.strip("/"), self._reader.version
        self.seeded = False
        self._picked: np.ndarray | None = None  # positions in the whole dataset; None: this is the whole

    def __len__(self) -> int:
        raise NotImplementedError

    @override
    def __getitem__(self, index: SupportsIndex | str) -> Any:
        """Return one item, by its number or by its key.

        Raises:
            IndexError: there is no such item.
            KeyMissingError, DatasetError: as `index`.
            DatasetError: it is to have a label, and has none.
            SampleUnavailableError: its bytes cannot be had anywhere.
        """
        return self.__getitems__([self.index(index) if isinstance(index, str) else index])[0]

    def __contains__(self, key: object) -> bool:
        """Tell whether there is an item with this key."""
        try:
            return isinstance(key, str) and self.index(key) >= 0
        except (DatasetError, KeyMissingError):
            return False

    @override
    def __repr__(self) -> str:
        what = f"{self.name!r}, root={self.root!r}, version={self.version!r}"
        return f"{type(self).__name__}({what}): {len(self)} items"

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> Any:
        """Return items in the order of `indices`; their bytes are read at once. Raises as `__getitem__`."""
        raise NotImplementedError

    def _position(self, index: SupportsIndex) -> int:
        if isinstance(index, SampledBatch):
            raise misuse("DataLoader took its batches for items", "Give it as batch_sampler=, not as sampler=.")
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return position

    def key(self, index: SupportsIndex) -> str:
        """Return an item's path in the dataset.

        Raises:
            IndexError: there is no such item.
        """
        raise NotImplementedError

    def index(self, key: str) -> int:
        """Return the number of the item with a key, the first where a subset has it twice.

        Raises:
            KeyMissingError: the version has no such key.
            DatasetError: it has none below `root`, in this subset, or with these columns.
        """
        raise NotImplementedError

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each item, uint64, shape (len,)."""
        raise NotImplementedError

    def will_need(self, indices: np.ndarray) -> None:
        """Ask this node's disk for items (int64) that will be read later; does not wait for it."""
        raise NotImplementedError

    def subset(self, indices: Sequence[int] | np.ndarray) -> Self:
        """Return the dataset of some items, in the order of `indices`; it shares this one's files and connections.

        `ResumableSampler` knows it: the state has a digest of the indices, and that of another subset is refused.
        torch's `Subset` and `random_split` of this dataset are taken for the same.

        Args:
            indices: numbers of items of this dataset, shape (any,); one twice is two items.

        Raises:
            IndexError: there is no such item.
            ValueError: there are no indices, or they are not whole numbers.
        """
        found = picked(indices, len(self))
        made = copy.copy(self)
        made._pick(found)  # noqa: SLF001 - a copy of this
        return made

    def _pick(self, positions: np.ndarray) -> None:
        """Keep these items of what this is a copy of."""
        self._picked = positions if self._picked is None else self._picked[positions]

    def random_split(self, lengths: Sequence[float], *, seed: int = 0) -> list[Self]:
        """Return disjoint subsets that have each item once: the same on every rank, and after every restart.

        Args:
            lengths: items of each subset, or their shares, which add up to 1.
            seed: another seed is another split. Within a subset items keep their order.

        Raises:
            ValueError: the lengths do not add up, or leave a subset empty.
        """
        parts = split_at_random(len(self), lengths, version=self.version, seed=seed)
        return [self.subset(part) for part in parts]

    @property
    def subset_digest(self) -> str:
        """Stands for which items of the whole dataset a subset has; empty for the whole."""
        return "" if self._picked is None else digest_of(self._picked)

    def _rows_below_root(self) -> range:
        """Return the rows below the root; none is an error that names the folder that is probably meant."""
        index = self._reader.index
        if found := index.rows_below(self.root):
            return found
        above, _, name = self.root.rpartition("/")
        while above and not index.rows_below(above):
            above, _, name = above.rpartition("/")
        folders = index.listing(above).folders if len(index) else []
        meant = nearest(name, folders)
        where = f"Folders below {above!r}" if above else "Folders at its top"
        there = f"{where}: {', '.join(map(repr, folders[:10])) or 'none'}."
        raise DatasetError(
            f"dataset {self.name!r} (version {self.version}) has no samples below {self.root!r}",
            remedy=f"Is {f'{above}/{meant}'.lstrip('/')!r} meant? {there}" if meant else there,
        )

    def _not_mine(self, key: str) -> DatasetError:
        where = f"below {self.root or '/'!r}" + ("" if self._picked is None else " in this subset")
        return DatasetError(f"dataset {self.name!r} has {key!r}, but not as an item {where}")

    def _seed_of(self, indices: Sequence[SupportsIndex]) -> Callable[[int], tuple[int, ...]]:
        """Return what gives for a position what a transform gets besides: the sample's seed, if it is wanted."""
        if not self.seeded:
            return lambda _position: ()
        if not isinstance(indices, SampledBatch):
            raise DatasetError(
                f"dataset {self.name!r} is seeded, and was not asked for a ResumableSampler's batch: "
                "the seeds of its samples follow from that one's seed and epoch",
                remedy="Read it by DataLoader(batch_sampler=ResumableSampler(dataset, ...)), with subset() in "
                "place of torch's Subset; to look at single items make it without seeded=True.",
            )
        seed, epoch = indices.seed, indices.epoch
        return lambda position: (sample_seed(seed, epoch, self.key(position)),)

    def _made(self, position: int, transform: Callable[..., Any] | None, *given: Any) -> Any:
        """Return what a transform makes of a part of the item at `position`; what it raises names the item."""
        if transform is None:
            return given[0]
        try:
            return transform(*given)
        except Exception as problem:
            problem.add_note(f"It was given item {position}, {self.key(position)!r}, of dataset {self.name!r}.")
            raise

    def stats(self) -> ReadStats:
        """Return how this process's reads were served so far: from here, from other nodes, from the source."""
        return self._reader.stats()

    def close(self) -> None:
        """Let go of files and connections; a later read opens them again."""
        self._reader.close()


class Dataset(MapDatasetBase):
    """The samples of a packed dataset, labelled by their folder as torchvision's ImageFolder does.

    Item `i` is `(sample, label)`. What else is asked for changes that: `labels=False` leaves the label out,
    `receipts=True` appends a receipt, which `deeplink.data.DeliveryDigest` takes: an int, of which
    `torch.utils.data.default_collate` makes an int64 tensor; `keys=True` appends the key, a str, at the end.

    The version is pinned when the Dataset is made: it stays the same whatever is packed meanwhile, in workers too.
    Safe under DataLoader workers however they are started, and to pickle. Batches are read at once.

    Args:
        name: what `deeplink pack` was given.
        transform: gets a sample's `bytes`, whole as they were in the file; its result is the sample. Without it
            the sample is the bytes. Under spawned workers it must be picklable: a module's function, an object.
        root: folder in the dataset to take the samples from, such as "train".
        version: its first digits are enough; the newest when None.
        target_transform: gets the label, an int; its result is the label.
        labels: False for datasets without class folders, or where labels are not wanted.
        receipts: append a receipt of the delivered bytes to each item.
        keys: append each item's key.
        seeded: call `transform(data, seed)`: an int of 0 to 2^32 - 1, a function of the `ResumableSampler`'s seed,
            the epoch and the key alone. A transform that draws from it does the same again after a resumption, and
            at any number of workers and ranks.
        packed: give batches as a `PackedBatch`, one tensor, instead of lists of items; for DataLoaders that
            `deeplink.data.shared_batches.loader` makes, or that have
            `collate_fn=deeplink.data.shared_batches.collate`. Item `i` is a batch of one.
        config: where catalog, store and members are; what the environment and the files say when None.

    Attributes:
        name, root, version: as above; the version is the one that was found.
        classes: names of the folders directly below root, sorted; empty with `labels=False`.
        class_to_idx: class name to label.
        targets: label of each sample, int64, shape (len,); -1 where there is none; empty with `labels=False`. Made
            when it is first asked for: reading items does without.

    Raises:
        DatasetMissingError: there is no such dataset, or not this version of it, or several that begin so.
        DatasetError: there are no samples below root.
        ConfigError: the configuration cannot be used.
        ValueError: transforms or keys together with packed: what they would do is done to a whole batch after it;
            or `seeded` without a transform.
    """

    def __init__(  # noqa: PLR0913 - each says what an item is
        self,
        name: str,
        transform: Callable[..., Any] | None = None,
        *,
        root: str = "",
        version: str | None = None,
        target_transform: Callable[[int], Any] | None = None,
        labels: bool = True,
        receipts: bool = False,
        keys: bool = False,
        seeded: bool = False,
        packed: bool = False,
        config: Config | None = None,
    ) -> None:
        if packed and (transform or target_transform or keys):
            raise ValueError("packed=True gives batches as they are, without keys: transform them in a collate_fn")
        if seeded and not transform:
            raise ValueError("seeded=True gives seeds to a transform, and there is none")
        super().__init__(name, root, version, config)
        self.transform, self.target_transform = transform, target_transform
        self.labels, self.receipts, self.keys, self.seeded, self.packed = labels, receipts, keys, seeded, packed
        self._ring: Ring | None = None
        self._outgrown: list[Ring | None] = []  # loaders made before still use them
        index = self._reader.index
        self._range = self._rows_below_root()
        self._labels = index.classed(self.root) if labels else Labels([], [], [], 0)
        self.classes = self._labels.classes
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    @functools.cached_property
    def targets(self) -> np.ndarray:  # noqa: D102 - among the class's attributes
        return self._labels.every() if self._picked is None else self._labels.of(self._picked)

    @override
    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in {"targets", "blocks"}}
        return kept | {"_outgrown": []}

    @override
    def __len__(self) -> int:
        return len(self._range if self._picked is None else self._picked)

    def _row(self, position: int) -> int:
        return self._range.start + (position if self._picked is None else int(self._picked[position]))

    def _column(self, name: str) -> np.ndarray:
        whole = self._reader.index.column(name, self._range)
        return whole if self._picked is None else whole[self._picked]

    @override
    def __getitem__(self, index: SupportsIndex | str) -> Any:
        number = self.index(index) if isinstance(index, str) else index
        return self.__getitems__([number]) if self.packed else super().__getitem__(number)

    @override
    def __getitems__(self, indices: Sequence[SupportsIndex]) -> Any:
        if self.packed:
            return self._batch(indices)
        positions = [self._position(index) for index in indices]
        seed_of = self._seed_of(indices)
        views = self._reader.read([self._row(position) for position in positions])
        return [
            self._item(position, bytes(view), seed_of(position))
            for position, view in zip(positions, views, strict=True)
        ]

    def _batch(self, indices: Sequence[SupportsIndex]) -> PackedBatch:
        positions = np.array(indices, np.int64)
        if len(positions) and not -len(self) <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"items {positions.min()} to {positions.max()} of {len(self)}")
        positions[positions < 0] += len(self)
        labels = self._labels_of(positions) if self.labels else None
        packing = Packing(self._rows(positions), labels, self._ring, receipts=self.receipts)
        return packing.batch(self._reader.batch(packing.rows, packing.room))

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._range.start + (positions if self._picked is None else self._picked[positions])
        return found

    def _labels_of(self, positions: np.ndarray) -> np.ndarray:
        starts, labels = self._runs
        rows = self._rows(positions) - self._range.start
        found: np.ndarray = labels[np.searchsorted(starts, rows, side="right") - 1]
        if len(found) and found.min() < 0:
            raise self._no_class(int(positions[found < 0][0]))
        return found

    @functools.cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._labels.starts, np.int64), np.array(self._labels.labels, np.int64)

    def share(self, *, workers: int, batch_size: int, slots: int = 4) -> None:
        """Have DataLoader workers that are started from now on write batches into memory that this process reads.

        Without it packed batches go through workers as torch sends tensors, several times slower; so does a batch
        that finds no room. Calling it again with no more than before costs nothing.

        Args:
            workers: how many there are.
            batch_size: samples of a batch.
            slots: batches of one worker that may be on their way or in the trainer's hands at once.

        Raises:
            BatchError: workers * slots batches are more than half of the memory available.
        """
        ring = ring_for(self._ring, self.lengths, (workers, slots, batch_size))
        if ring is not self._ring:
            self._outgrown.append(self._ring)
            self._ring = ring

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Which samples lie in one block of about 1 MiB, for `Order.BLOCKS`; made when it is first asked for."""
        return Blocks.of(self.shard, self._column("block"))

    @property
    def shard(self) -> np.ndarray:
        """Shard number of each item, uint32, shape (len,)."""
        return self._column("shard")

    @property
    def shards(self) -> list[str]:
        """Name of each shard by number."""
        return [entry.id for entry in self._reader.index.shards]

    @property
    @override
    def lengths(self) -> np.ndarray:
        return self._column("lengths")

    def _item(self, position: int, data: bytes, seed: tuple[int, ...]) -> Any:
        parts = [self._made(position, self.transform, data, *seed)]
        if self.labels:
            parts.append(self._label(position))
        if self.receipts:
            parts.append(receipt(self._row(position), data))
        if self.keys:
            parts.append(self.key(position))
        return tuple(parts) if len(parts) > 1 else parts[0]

    def _label(self, position: int) -> Any:
        label = self._labels[self._row(position) - self._range.start]
        if label < 0:
            raise self._no_class(position)
        return self._made(position, self.target_transform, label)

    def _no_class(self, position: int) -> DatasetError:
        return DatasetError(
            f"dataset {self.name!r}: {self.key(position)!r} lies in no class folder below {self.root!r}, "
            "so it has no label",
            remedy="Give Dataset(..., labels=False) for samples alone, or pack a tree of class/file.",
        )

    @override
    def key(self, index: SupportsIndex) -> SampleKey:
        return self._reader.index.key(self._row(self._position(index)))

    @override
    def index(self, key: str) -> int:
        place = self._reader.index.row(key) - self._range.start
        if self._picked is None and 0 <= place < len(self):
            return place
        found = [] if self._picked is None else np.flatnonzero(self._picked == place)[:1].tolist()
        if not found:
            raise self._not_mine(key)
        return int(found[0])

    @property
    def rows(self) -> np.ndarray:
        """Row number in the index of each item, int64, shape (len,)."""
        return self._rows(np.arange(len(self), dtype=np.int64))

    @property
    def checksums(self) -> np.ndarray:
        """xxh3-64 of each item's bytes as packed, uint64, shape (len,)."""
        return self._column("checksums")

    def residency(self, nodes: Sequence[str]) -> Residency:
        """Return which samples belong on which rank's node, for `ResumableSampler(residency=...)`.

        It follows from the configured members alone, so all ranks agree on it without asking one another. For what
        nodes hold besides there is `Residency.of`.

        Args:
            nodes: node of each rank, by the names that the members have.

        Raises:
            ConfigError: the list of members cannot be read.
        """
        members, replicas = configured_members(self._config), self._config.replicas
        return Residency.owned(self.shards, self.shard, nodes=nodes, members=members, replicas=replicas)

    @override
    def will_need(self, indices: np.ndarray) -> None:
        self._reader.will_need(self._rows(indices))

    def announce(self, shards: Sequence[int], needed: int) -> None:
        """Say in which order shards are used from now on, for this process and for DataLoader workers of it.

        A ResumableSampler does it by itself. Without it all shards of the version stay on this node while they are
        read.

        Args:
            shards: numbers of shards, the next one first; each once.
            needed: how many of them, from the first, the running epoch still uses.
        """
        self._reader.announce(shards, needed)
