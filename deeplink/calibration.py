"""One rank of `deeplink calibrate`: all-reduces of many sizes between ranks at each distance, and reading, timed.

Every rank calls it. Groups are timed one after another while the other ranks wait, so that none disturbs another.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import astuple
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from deeplink.collectives import broadcast_text, gathered_texts
from deeplink.errors import DeepLinkError
from deeplink.scheduler.model.read_sweep import MeasuredRead, ReadPlace, ReadSweep
from deeplink.scheduler.model.sweep import AllReduceTiming, NoPairError, RankLocation, Sweep, to_time
from deeplink.scheduler.topology.graph import fabric_from_addresses
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.clock import Clock
    from deeplink.readtimes import ReadTimer
    from deeplink.scheduler.model.sweep import Reach

_WARM_UP = 3  # connections are made at the first, and windows grow
_LEAST_S = 0.02  # of timing for one size: short ones are repeated
_MOST_REPEATS = 500


class NoRankError(DeepLinkError):
    """The ranks' program was started by something that makes no ranks."""

    exit_code = 2

    def __init__(self, variable: str) -> None:
        super().__init__(
            f"this is no rank: {variable} is not set",
            remedy="Start it on all nodes: `deeplink run -- deeplink calibrate --out constants.json`; "
            "without Slurm `deeplink run --local 3 -- deeplink calibrate`.",
        )
        self.variable = variable


def seat_here(env: Mapping[str, str]) -> RankLocation:
    """Return this rank's seat, as `deeplink run` or torchrun tells it.

    Raises:
        NoRankError: neither started it.
    """
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in env:
            raise NoRankError(variable)
    node = NodeName(env.get("SLURMD_NODENAME", ""))
    fabric = fabric_from_addresses({node: env.get("SLURM_TOPOLOGY_ADDR", "")})
    return RankLocation(int(env["RANK"]), int(env["GROUP_RANK"]), fabric.path(node))


def backend_here(env: Mapping[str, str]) -> str:
    """Return `nccl` where each rank of this node can have a GPU, else `gloo`."""
    return "nccl" if torch.cuda.device_count() >= int(env.get("LOCAL_WORLD_SIZE", "1")) else "gloo"


def timed_between(
    seat: RankLocation,
    sizes: Sequence[int],
    repeats: int,
    clock: Clock,
    *,
    backend: str,
    reads: ReadTimer | None = None,
) -> tuple[list[Sweep], list[ReadSweep]]:
    """Time all-reduces at each distance there is, then reading, and return the same times on every rank.

    Blocks until all ranks have called it. Makes the process group, and takes it down again.

    Args:
        seat: this rank.
        sizes: bytes of the buffers.
        repeats: how many of each size, at least; the median counts, of the slowest rank.
        clock: what tells the time.
        backend: `gloo`, or `nccl` with a GPU for each rank.
        reads: reads samples on this rank; None where reading is not to be timed.

    Raises:
        NoPairError: there is one rank, and nothing to read.
    """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        told = (json.loads(text) for text in gathered_texts(json.dumps(astuple(seat))))
        seats = [RankLocation(rank, node, tuple(path)) for rank, node, path in told]
        timer = _Timer(device, repeats, clock)
        try:
            pairs = to_time(seats)
        except NoPairError:
            if reads is None:
                raise
            pairs = {}
        sweeps = [_sweep(reach, ranks, sizes, timer) for reach, ranks in pairs.items()]
        return sweeps, [] if reads is None else _read_sweeps(seats, seat, reads)
    finally:
        dist.destroy_process_group()


class _Timer:
    """Times all-reduces over a group that this rank is of."""

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
        told = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return float(told[0])


def _sweep(reach: Reach, ranks: tuple[int, ...], sizes: Sequence[int], timer: _Timer) -> Sweep:
    group = dist.new_group(list(ranks))
    seconds: list[float] = []
    if dist.get_rank() in ranks:
        seconds = [timer.seconds(size, group) for size in sizes]
    told = json.loads(broadcast_text(json.dumps(seconds), src=ranks[0]))  # and the others wait for it
    return Sweep(
        reach, len(ranks), tuple(AllReduceTiming(size, taken) for size, taken in zip(sizes, told, strict=True))
    )


def _read_sweeps(seats: Sequence[RankLocation], mine: RankLocation, reads: ReadTimer) -> list[ReadSweep]:
    nodes = {seat.node for seat in seats}
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
        dist.barrier()  # all begin at once, and nobody before the others have ended
        read = [astuple(reads.read(place))] if mine.node in who else []
        told = [MeasuredRead(*one) for text in gathered_texts(json.dumps(read)) for one in json.loads(text)]
        sweeps.append(ReadSweep(place, tuple(told)))
    return sweeps
