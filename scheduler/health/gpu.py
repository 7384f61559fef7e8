"""GPUs: what a reading says is wrong with them; pure. `gpucheck` asks the tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Complaint, comment, drain, observe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NVLINK_MANY = 100
HARD_THROTTLES = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Reasons for lower clocks that come from the hardware: heat or power. A power cap is everyday."""
SOFT_THROTTLES = frozenset({"sw_thermal_slowdown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What was seen of one GPU; None where its tool does not say.

    Attributes:
        uuid: names it for ever.
        index: as tools number it now.
        uncorrected: ECC errors that could not be corrected, since the driver was loaded.
        reset_pending: pages or rows wait for a reset to be retired or remapped.
        remap_failed: a row could not be remapped: the GPU is to be replaced.
        throttles: reasons for lower clocks that hold now.
        nvlink_errors: of each link, since the driver was loaded.
    """

    uuid: str
    index: int = -1
    uncorrected: int | None = None
    reset_pending: bool | None = None
    remap_failed: bool | None = None
    throttles: frozenset[str] = frozenset()
    nvlink_errors: Mapping[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people: `GPU 3`, or the UUID where the number is not known."""
        return f"GPU {self.index}" if self.index >= 0 else self.uuid


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What the tools say.

    Attributes:
        gpus: those that answer.
        lost: what a tool says of GPUs that it cannot reach.
        unknown: why the tools could not tell.
        withheld: how many GPUs are there that we may not ask; which ones is not said.
    """

    gpus: tuple[GpuSample, ...] = ()
    lost: tuple[str, ...] = ()
    unknown: str = ""
    withheld: int = 0


def judge_gpus(
    reading: GpuReading,
    known: Mapping[str, int],
    first_uncorrected: Mapping[str, int],
    nvlink_risen: Mapping[str, int],
) -> Iterator[Complaint]:
    """Return what is wrong.

    Args:
        reading: what the tools say now.
        known: the UUIDs this node had, and their numbers.
        first_uncorrected: the fewest errors that we saw, those of our first look: they are not new.
        nvlink_risen: by how much the errors of `UUID link` have risen since the last look.
    """
    if reading.unknown:
        return
    there = {gpu.uuid for gpu in reading.gpus}
    for uuid, index in known.items():
        if uuid not in there and not reading.withheld:
            yield drain(f"{uuid} gone", f"GPU {index} ({uuid}) is gone: {len(there)} of {len(known)} answer")
    for said in reading.lost:
        yield drain("lost", said)
    for gpu in reading.gpus:
        yield from _judge_memory(gpu, first_uncorrected.get(gpu.uuid, gpu.uncorrected or 0))
        yield from _judge_clocks(gpu)
        for link in gpu.nvlink_errors:
            risen = nvlink_risen.get(f"{gpu.uuid} {link}", 0)
            if risen:
                said = f"{gpu.name}: NVLink {link} made {risen} errors since the last look"
                subject = f"{gpu.uuid} nvlink {link}"
                yield comment(subject, said) if risen >= NVLINK_MANY else observe(subject, said)


def _judge_memory(gpu: GpuSample, first: int) -> Iterator[Complaint]:
    if gpu.remap_failed:
        said = f"{gpu.name}: a row of its memory could not be remapped"
        yield drain(f"{gpu.uuid} remap", said, certain=True)
    if gpu.reset_pending:
        yield comment(f"{gpu.uuid} reset", f"{gpu.name}: pages or rows wait for a reset to be retired or remapped")
    if gpu.uncorrected is not None and gpu.uncorrected > first:
        said = f"{gpu.name}: {gpu.uncorrected - first} new uncorrectable ECC errors"
        yield drain(f"{gpu.uuid} ecc", said, certain=True)
    elif gpu.uncorrected:
        yield comment(
            f"{gpu.uuid} ecc",
            f"{gpu.name}: {gpu.uncorrected} uncorrectable ECC errors since the driver was loaded",
        )


def _judge_clocks(gpu: GpuSample) -> Iterator[Complaint]:
    hard, soft = gpu.throttles & HARD_THROTTLES, gpu.throttles & SOFT_THROTTLES
    if hard:
        yield comment(f"{gpu.uuid} clocks", f"{gpu.name} runs at lower clocks: {', '.join(sorted(hard))}")
    elif soft:
        yield observe(f"{gpu.uuid} clocks", f"{gpu.name} runs at lower clocks: {', '.join(sorted(soft))}")
