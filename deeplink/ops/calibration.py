"""One rank of `deeplink calibrate`: times all-reduces at each distance, and reading from each place.

Every rank calls it. Groups are timed one after another while the other ranks wait, so that none disturbs another.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import distributed as dist

from deeplink.cache.catalog import Catalog
from deeplink.cache.membership import other_members
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.checkpoints.tensors import broadcast_text, gathered_texts
from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName, format_members
from deeplink.fs.library import DatasetPath
from deeplink.ops.inventory import batches
from deeplink.scheduler.placement.sweep import (
    AllReduceTiming,
    MeasuredRead,
    RankLocation,
    ReadPlace,
    ReadSweep,
    Sweep,
    SweepError,
    to_time,
)
from deeplink.scheduler.topology.graph import fabric_from_addresses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.scheduler.placement.sweep import Reach

_WARM_UP = 3  # connections are made at the first, and windows grow
_LEAST_S = 0.02  # of timing for one size: short ones are repeated
_MOST_REPEATS = 500

_MOST_ROWS = 1 << 18  # samples are drawn from so many rows of a version: all of one that has no more
_MOST_SHARDS = 256  # other nodes are asked for so many shards at most, to find out which of them they hold
_BATCH_SAMPLES, _BATCH_BYTES = 64, 8 << 20
_SEED = 20
_AT_LAST = ("home_bytes", "source_bytes")
_COUNTED = {
    ReadPlace.LOCAL: ("local_bytes",),
    ReadPlace.PEER: ("peer_bytes",),
    ReadPlace.SOURCE: _AT_LAST,
    ReadPlace.TOGETHER: _AT_LAST,
}
_NOTHING = {
    ReadPlace.LOCAL: "this node's store holds nothing of it",
    ReadPlace.PEER: "no other node gave any of it",
    ReadPlace.SOURCE: "it could not be read there",
    ReadPlace.TOGETHER: "it could not be read there",
}


def location_here(env: Mapping[str, str]) -> RankLocation:
    """Return where this rank is, as `deeplink run` or torchrun sets it."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in env:
            raise DeepLinkError(
                f"this is no rank: {variable} is not set",
                remedy="Start it on all nodes: `deeplink run -- deeplink calibrate --out constants.json`; "
                "without Slurm `deeplink run --local 3 -- deeplink calibrate`.",
                exit_code=2,
            )
    node = NodeName(env.get("SLURMD_NODENAME", ""))
    fabric = fabric_from_addresses({node: env.get("SLURM_TOPOLOGY_ADDR", "")})
    return RankLocation(int(env["RANK"]), int(env["GROUP_RANK"]), fabric.path(node))


def backend_here(env: Mapping[str, str]) -> str:
    """Return `nccl` where each rank of this node can have a GPU, else `gloo`."""
    return "nccl" if torch.cuda.device_count() >= int(env.get("LOCAL_WORLD_SIZE", "1")) else "gloo"


def timed_between(
    here: RankLocation,
    sizes: Sequence[int],
    repeats: int,
    clock: Clock,
    *,
    backend: str,
    reads: ReadTimer | None = None,
) -> tuple[list[Sweep], list[ReadSweep]]:
    """Time all-reduces at each distance there is, then reading, and return the same times on every rank.

    Blocks until all ranks have called it. Makes the process group, and takes it down again.
    """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        all_of_them = (json.loads(text) for text in gathered_texts(json.dumps(astuple(here))))
        ranks = [RankLocation(rank, node, tuple(path)) for rank, node, path in all_of_them]
        timer = _AllReduceTimer(device, repeats, clock)
        try:
            pairs = to_time(ranks)
        except SweepError:
            if reads is None:
                raise
            pairs = {}
        sweeps = [_sweep(reach, pair, sizes, timer) for reach, pair in pairs.items()]
        return sweeps, [] if reads is None else _read_sweeps(ranks, here, reads)
    finally:
        dist.destroy_process_group()


class _AllReduceTimer:
    def __init__(self, device: torch.device, repeats: int, clock: Clock) -> None:
        self._device, self._repeats, self._clock = device, repeats, clock

    def seconds(self, size: int, group: dist.ProcessGroup) -> float:
        """Return the median time of one all-reduce, of the rank where it is longest."""
        buffer = torch.zeros(max(size // 4, 1), device=self._device)  # float32
        for _ in range(_WARM_UP):
            self._once(buffer, group)
        # All must repeat as often: what the slowest needs for one decides.
        once = self._slowest(self._once(buffer, group), group)
        repeats = min(max(self._repeats, int(_LEAST_S / once)), _MOST_REPEATS)
        return self._slowest(statistics.median(self._once(buffer, group) for _ in range(repeats)), group)

    def _once(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
        begun = self._clock.monotonic()
        dist.all_reduce(buffer, group=group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock.monotonic() - begun

    def _slowest(self, seconds: float, group: dist.ProcessGroup) -> float:
        slowest = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        return float(slowest[0])


def _sweep(reach: Reach, ranks: tuple[int, ...], sizes: Sequence[int], timer: _AllReduceTimer) -> Sweep:
    group = dist.new_group(list(ranks))
    seconds: list[float] = []
    if dist.get_rank() in ranks:
        seconds = [timer.seconds(size, group) for size in sizes]
    taken = json.loads(broadcast_text(json.dumps(seconds), src=ranks[0]))  # and the others wait for it
    return Sweep(
        reach, len(ranks), tuple(AllReduceTiming(size, one) for size, one in zip(sizes, taken, strict=True))
    )


def _read_sweeps(ranks: Sequence[RankLocation], here: RankLocation, reads: ReadTimer) -> list[ReadSweep]:
    nodes = {one.node for one in ranks}
    readers = {
        ReadPlace.LOCAL: nodes,
        ReadPlace.PEER: nodes,
        ReadPlace.SOURCE: {min(nodes)},
        ReadPlace.TOGETHER: nodes,
    }
    if len(nodes) == 1:
        del readers[ReadPlace.PEER], readers[ReadPlace.TOGETHER]
    sweeps = []
    for place, who in readers.items():
        dist.barrier()  # all begin at once, and none before the others have ended
        read = [astuple(reads.read(place))] if here.node in who else []
        came = [MeasuredRead(*one) for text in gathered_texts(json.dumps(read)) for one in json.loads(text)]
        sweeps.append(ReadSweep(place, tuple(came)))
    return sweeps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBounds:
    """Bounds of what one rank reads from one place."""

    bytes: int
    seconds: float


class ReadTimer:
    """Times reading of one version on this rank. A context manager; the version is opened when it is made.

    A place is forced by what is given to the reader: no members, or an empty store, or neither. A batch of which a
    part came from elsewhere, as the reader itself counted, is not timed. No two of the `ranks` read the same
    samples, nor does one read the same from two places.
    """

    def __init__(
        self, dataset: str, config: Config, here: RankLocation, bounds: ReadBounds, clock: Clock, *, ranks: int
    ) -> None:
        self._config, self._here, self._ranks, self._bounds, self._clock = config, here, ranks, bounds, clock
        path = DatasetPath.parse(dataset)
        version = Catalog(config.catalog).resolved(path.name, path.version)
        self._open = ExitStack()
        nowhere = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="deeplink-calibrate-")))
        # What a reader brings to its store would be read beside what is timed.
        config = replace(config, site_members="", fill_on_miss=False)
        given = {
            ReadPlace.LOCAL: replace(config, members=""),
            ReadPlace.PEER: replace(config, store=nowhere, members=format_members(other_members(config))),
            ReadPlace.SOURCE: replace(config, store=nowhere, members=""),
        }
        self._readers = {
            place: self._open.enter_context(Reader.open(path.name, version=version, config=known))
            for place, known in given.items()
        }
        self._readers[ReadPlace.TOGETHER] = self._readers[ReadPlace.SOURCE]
        self._index = self._readers[ReadPlace.LOCAL].index

    def read(self, place: ReadPlace) -> MeasuredRead:
        """Read from a place, and return what came from there and how long that took; never fails."""
        try:
            return self._read(place)
        except (DeepLinkError, OSError) as problem:
            return MeasuredRead(self._here.node, problem=str(problem))

    def rows(self, place: ReadPlace) -> np.ndarray:
        """Return the rows for this rank and place, in the order in which they are read."""
        count, draw = len(self._index), np.random.default_rng(_SEED)
        drawn = draw.permutation(count) if count <= _MOST_ROWS else np.unique(draw.integers(0, count, _MOST_ROWS))
        draw.shuffle(drawn)
        places = list(ReadPlace)
        mine = drawn[self._here.rank * len(places) + places.index(place) :: self._ranks * len(places)]
        if place is ReadPlace.LOCAL:
            return self._of_shards(mine, self._held())
        return self._of_shards(mine, self._elsewhere(mine)) if place is ReadPlace.PEER else mine

    def _read(self, place: ReadPlace) -> MeasuredRead:
        rows = self.rows(place)
        if not len(rows):
            return MeasuredRead(self._here.node, problem=_NOTHING[place])
        self._came(place, rows[:1])  # connections are made, and threads started
        size, seconds = 0, 0.0
        began = self._clock.monotonic()
        rows = rows[1:] if len(rows) > 1 else rows
        for part in batches(self._index.sizes(rows), _BATCH_BYTES, _BATCH_SAMPLES):
            batch = rows[part]
            self._forget(place, batch)
            at = self._clock.monotonic()
            came = self._came(place, batch)
            took = self._clock.monotonic() - at
            if came == int(self._index.sizes(batch).sum()):
                size, seconds = size + came, seconds + took
            if size >= self._bounds.bytes or self._clock.monotonic() - began >= self._bounds.seconds:
                break
        return MeasuredRead(self._here.node, size, seconds, "" if size else _NOTHING[place])

    def _came(self, place: ReadPlace, rows: np.ndarray) -> int:
        """Read samples, and return how many bytes of them the reader counted as from that place."""
        reader, counted = self._readers[place], _COUNTED[place]
        before = reader.stats()
        reader.batch(rows)
        after = reader.stats()
        return sum(getattr(after, name) - getattr(before, name) for name in counted)

    def _of_shards(self, rows: np.ndarray, shards: list[int]) -> np.ndarray:
        chosen: np.ndarray = rows[np.isin(self._index.shard[rows], shards)]
        return chosen

    def _held(self) -> list[int]:
        held = set(Store(self._config.store, make=False).status().ids)
        return [number for number, shard in enumerate(self._index.shards) if shard.id in held]

    def _elsewhere(self, rows: np.ndarray) -> list[int]:
        """Return shards that other nodes hold: those found by asking for a sample of each."""
        numbers, firsts = np.unique(self._index.shard[rows], return_index=True)
        found = []
        began = self._clock.monotonic()
        for number, first in list(zip(numbers.tolist(), firsts.tolist(), strict=True))[:_MOST_SHARDS]:
            row = rows[first : first + 1]
            if self._came(ReadPlace.PEER, row) == int(self._index.sizes(row)[0]):
                found.append(number)
            if self._clock.monotonic() - began >= self._bounds.seconds:
                break
        return found

    def _forget(self, place: ReadPlace, rows: np.ndarray) -> None:
        """Have this node's memory let go of the source's files, where it is a folder: reading is to be cold."""
        if _COUNTED[place] != _AT_LAST or self._index.home or "://" in self._index.source:
            return
        for row in rows.tolist():
            with suppress(OSError), opened(Path(self._index.source) / self._index.key(row)) as file:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
