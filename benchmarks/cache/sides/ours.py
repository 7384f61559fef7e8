"""Our side: one reader that copies into an arena, one that hands out views."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from typing_extensions import override

from benchmarks.cache.order import batches
from benchmarks.cache.sides.base import Side
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.core.config import Config, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.cache.sides.base import Batches

NAME = "bench"


def config_in(folder: Path) -> Config:
    """Return the configuration of a cache that lies in `folder` alone, whatever this machine's files say."""
    return Config(catalog=folder / "catalog", store=folder / "store", state=folder / "state", replicas=1)


class Ours(Side):
    """Reader.batch: copies by system calls, safe whatever happens to the disk."""

    name = "ours, batch"
    kept = "deeplink"
    settings = "Reader.batch: an arena per batch; checksums at first touch; its DataLoader: Dataset(packed=True)"
    samples_per_s = 1_000_000

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self.config = Config()
        self.is_whole = True

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        pack(str(source), NAME, config=config_in(packed))

    @override
    def open(self, source: Path, packed: Path) -> None:
        self.config = config_in(packed)
        self.reader = Reader.open(NAME, config=self.config)
        stored = set(Store(self.config.store).ids())
        self.is_whole = all(shard.id in stored for shard in self.reader.index.shards)
        self.reader.read([0])  # a reader opens its files when first used

    def opened(self) -> Reader:
        """Return the open reader.

        Raises:
            RuntimeError: it was not opened.
        """
        if self.reader is None:
            raise RuntimeError("not opened")
        return self.reader

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        reader = self.opened()
        for rows in wanted:
            yield reader.batch(rows).views()
        self._check(reader)

    @override
    def epoch(self, seed: int) -> Batches:
        samples = len(self.opened())
        return self.read(batches(seed, samples, samples))

    @override
    def loader(self, seed: int, workers: int, *, decode: bool) -> Callable[[], Batches]:
        from benchmarks.cache.sides.torches import our_loader  # noqa: PLC0415 - most of this side needs no torch

        return our_loader(NAME, self.config, seed, workers, decode=decode)

    @override
    def from_source(self) -> int:
        return self.opened().stats().source_samples

    @override
    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def _check(self, reader: Reader) -> None:
        stats = reader.stats()
        if stats.failures or (stats.source_samples and self.is_whole):
            raise RuntimeError(f"not all was read from the store: {stats}")


class OursViews(Ours):
    """Reader.views: no copy."""

    name = "ours, views"
    settings = "Reader.views: views of mapped shards; every sample's checksum compared at first touch"

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        reader = self.opened()
        for rows in wanted:
            yield reader.views(rows)
        self._check(reader)


class OursBlocks(Ours):
    """An epoch in order by blocks, as training takes it from a disk."""

    name = "ours, blocks"
    settings = "Order.BLOCKS, window as it is by default, Prefetcher with two threads"

    @override
    def open(self, source: Path, packed: Path) -> None:
        importlib.import_module("benchmarks.cache.sides.torches")  # it takes seconds, and is no reading
        super().open(source, packed)

    @override
    def epoch(self, seed: int) -> Batches:
        from benchmarks.cache.sides.torches import block_epoch  # noqa: PLC0415 - most of ours needs no torch

        return block_epoch(NAME, self.config, seed)


class OursRemote(Ours):
    """The same on a node that holds nothing: members and catalog are what its environment says."""

    name = "ours, from members"

    @override
    def open(self, source: Path, packed: Path) -> None:
        self.config = load_config()
        self.reader = Reader.open(packed.name, config=self.config)
        self.reader.read([0])

    @override
    def _check(self, reader: Reader) -> None:
        """Return: what fails here is made to fail."""
