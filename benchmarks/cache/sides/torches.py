"""DataLoaders of our side and of raw files; imported where torch is."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

import deeplink
from benchmarks.cache.order import BATCH
from benchmarks.cache.sides.base import read_file
from deeplink.data import Order, Prefetcher, ResumableSampler
from deeplink.data.shared_batches import loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.cache.sides.base import Batches
    from deeplink.core.config import Config
    from deeplink.data.shared_batches import PackedBatch

DECODED_BATCH = 32


class Files(Dataset[bytes]):
    """A dataset of files, one read at a time, as torchvision's ImageFolder does it."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    @override
    def __getitem__(self, index: int) -> bytes:
        return read_file(*self._files[index])


def as_it_is(batch: list[bytes]) -> list[bytes]:
    """Return the batch as the dataset gave it: the cheapest way to collate."""
    return batch


def pixels(samples: Sequence[bytes | memoryview]) -> torch.Tensor:
    """Return JPEGs of one size, decoded: uint8, shape (samples, height, width, 3)."""
    return torch.from_numpy(np.stack([np.asarray(Image.open(io.BytesIO(sample))) for sample in samples]))


def packed_pixels(batch: PackedBatch) -> torch.Tensor:
    """Return `pixels` of a packed batch."""
    return pixels(samples_of(batch))


def samples_of(batch: PackedBatch) -> list[memoryview]:
    """Return each sample's bytes; nothing is copied."""
    data = batch.arena.numpy().data
    return [data[start:stop] for start, stop in itertools.pairwise(batch.offsets.tolist())]


def _rows_of(batch: torch.Tensor) -> list[memoryview]:
    return [image.data.cast("B") for image in batch.numpy()]


def file_loader(
    files: Sequence[tuple[str, int]], seed: int, workers: int, *, decode: bool
) -> Callable[[], Batches]:
    """Return passes over raw files through a DataLoader."""
    found: DataLoader[Any] = DataLoader(
        Files(files),
        DECODED_BATCH if decode else BATCH,
        shuffle=True,
        num_workers=workers,
        collate_fn=pixels if decode else as_it_is,
        generator=torch.Generator().manual_seed(seed),
        persistent_workers=workers > 0,
    )
    return lambda: (_rows_of(batch) for batch in found) if decode else iter(found)


def block_epoch(name: str, config: Config, seed: int) -> Batches:
    """Yield all samples once, in order by blocks, read ahead by threads."""
    data = deeplink.Dataset(name, labels=False, packed=True, config=config)
    sampler = ResumableSampler(data, batch_size=BATCH, rank=0, world_size=1, seed=seed, shuffle=Order.BLOCKS)
    for batch in Prefetcher(data, sampler):
        yield samples_of(batch)
        sampler.finished()
    data.close()


def our_loader(name: str, config: Config, seed: int, workers: int, *, decode: bool) -> Callable[[], Batches]:
    """Return passes over a packed dataset through a DataLoader; the sampler is told of every batch."""
    data = deeplink.Dataset(name, labels=False, packed=True, config=config)
    sampler = ResumableSampler(
        data, batch_size=DECODED_BATCH if decode else BATCH, rank=0, world_size=1, seed=seed
    )
    options: dict[str, Any] = {"collate_fn": packed_pixels} if decode else {}
    found = loader(data, sampler, num_workers=workers, persistent_workers=workers > 0, **options)
    of: Callable[[Any], list[memoryview]] = _rows_of if decode else samples_of

    def once() -> Iterator[list[memoryview]]:
        for batch in found:
            yield of(batch)
            sampler.finished()

    return once
