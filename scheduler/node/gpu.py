"""GPUs: what a reading says is wrong with them; pure. `gpucheck` asks the tools."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.node.check_result import Complaint, comment, drain, observe, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

NVLINK_MANY = 100
HARD_THROTTLES = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Reasons for lower clocks that come from the hardware: heat or power. A power cap is everyday."""
SOFT_THROTTLES = frozenset({"sw_thermal_slowdown"})
BASE = ("uuid", "index")
THROTTLES = tuple(sorted(HARD_THROTTLES | SOFT_THROTTLES))
QUERIES = (
    ("--query-gpu=", (*BASE, "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")),
    ("--query-gpu=", (*BASE, *(f"clocks_throttle_reasons.{reason}" for reason in THROTTLES))),
    ("--query-gpu=", (*BASE, *(f"clocks_event_reasons.{reason}" for reason in THROTTLES))),
    ("--query-remapped-rows=", ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")),
)
"""Asked one after another: a driver that does not know one of the names refuses its whole query."""
OLD_NAMES, NEW_NAMES = 1, 2
"""Places in `QUERIES` of the reasons for lower clocks under their older and newer names."""
REFUSED = "is not a valid field"
NO_DEVICES = "No devices were found"
_YES = {"yes": True, "active": True, "1": True, "no": False, "not active": False, "0": False}
_LOST = re.compile(r"(Unable to determine the device handle for (?:gpu|GPU) ?\S+.*|.*\bGPU is lost\b.*)")
_NOT_OURS = "Insufficient Permissions"
_NVLINK_GPU = re.compile(r"GPU (\d+):.*?(?:\(UUID: (\S+)\))?$")
_NVLINK_ERRORS = re.compile(r"Link (\d+): (\w+) Errors: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What was seen of one GPU; None where its tool does not say."""

    uuid: str  # names it for ever
    index: int = -1  # as tools number it now
    uncorrected: int | None = None  # ECC errors that could not be corrected, since the driver was loaded
    reset_pending: bool | None = None  # pages or rows wait for a reset to be retired or remapped
    remap_failed: bool | None = None  # a row could not be remapped: the GPU is to be replaced
    throttles: frozenset[str] = frozenset()  # reasons for lower clocks that hold now
    nvlink_errors: Mapping[int, int] = field(default_factory=dict)  # of each link, since the driver was loaded

    @property
    def name(self) -> str:
        """For people: `GPU 3`, or the UUID where the number is not known."""
        return f"GPU {self.index}" if self.index >= 0 else self.uuid


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What the tools say."""

    gpus: tuple[GpuSample, ...] = ()  # those that answer
    lost: tuple[str, ...] = ()  # what a tool says of GPUs that it cannot reach
    unknown: str = ""  # why the tools could not tell
    withheld: int = 0  # how many GPUs are there that we may not ask; which ones is not said


def judge_gpus(
    reading: GpuReading,
    known: Mapping[str, int],
    first_uncorrected: Mapping[str, int],
    nvlink_risen: Mapping[str, int],
) -> Iterator[Complaint]:
    """Return what is wrong."""
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


def nvidia_smi(flag: str, fields: Iterable[str]) -> list[str]:
    """Return the command of a query."""
    return ["nvidia-smi", f"{flag}{','.join(fields)}", "--format=csv,noheader,nounits"]


def parse_csv(text: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a query's answer; lines that are no row of it are left out."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def parse_lost(text: str) -> tuple[str, ...]:
    """Return what nvidia-smi says of GPUs that it cannot reach, but not of those that it may not ask."""
    lines = [line for line in text.splitlines() if _NOT_OURS not in line]
    return tuple(dict.fromkeys(one_line(found[1]) for found in map(_LOST.search, lines) if found))


def count_withheld(text: str) -> int:
    """Return of how many GPUs nvidia-smi says that we may not ask."""
    return len({line for line in text.splitlines() if _NOT_OURS in line})


def with_row(gpu: GpuSample, row: Mapping[str, str]) -> GpuSample:
    """Return a GPU with what a row of one of the `QUERIES` says of it; `[N/A]` and the like say nothing."""
    changes: dict[str, Any] = {}
    if (index := _number(row.get("index", ""))) is not None:
        changes["index"] = index
    if (count := _number(row.get("ecc.errors.uncorrected.volatile.total", ""))) is not None:
        changes["uncorrected"] = count
    pending = [_flag(row[name]) for name in ("retired_pages.pending", "remapped_rows.pending") if name in row]
    said = [flag for flag in pending if flag is not None]
    if said:
        changes["reset_pending"] = bool(gpu.reset_pending) or any(said)
    if (failed := _flag(row.get("remapped_rows.failure", ""))) is not None:
        changes["remap_failed"] = failed
    throttles = {name.rpartition(".")[2] for name, value in row.items() if "_reasons." in name and _flag(value)}
    return dataclasses.replace(gpu, throttles=gpu.throttles | throttles, **changes)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _flag(text: str) -> bool | None:
    known = _YES.get(text.lower())
    number = _number(text)
    return known if known is not None or number is None else number > 0


def parse_nvlink(text: str) -> dict[int, dict[int, int]]:
    """Return by GPU number the errors of each of its links, from `nvidia-smi nvlink -e`."""
    found: dict[int, dict[int, int]] = {}
    links: dict[int, int] = {}
    for line in text.splitlines():
        if head := _NVLINK_GPU.match(line.strip()):
            links = found.setdefault(int(head[1]), {})
        for link, _, count in _NVLINK_ERRORS.findall(line):
            links[int(link)] = links.get(int(link), 0) + int(count)
    return found


def parse_nvml(text: str) -> GpuReading:
    """Return what our program around NVML wrote; unknown where it is nothing of the kind."""
    try:
        said = json.loads(text)
        gpus = tuple(
            GpuSample(
                uuid=str(one["uuid"]),
                index=int(one["index"]),
                uncorrected=one.get("uncorrected"),
                reset_pending=one.get("reset_pending"),
                remap_failed=one.get("remap_failed"),
                throttles=frozenset(one.get("throttles", ())),
                nvlink_errors={int(link): int(count) for link, count in one.get("nvlink_errors", {}).items()},
            )
            for one in said["gpus"]
        )
        return GpuReading(gpus, tuple(map(str, said.get("lost", ()))), withheld=int(said.get("withheld", 0)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return GpuReading(unknown="NVML did not answer as expected")


def parse_dcgm(text: str) -> tuple[Complaint, ...]:
    """Return what `dcgmi health --check --json` finds wrong: a failure is a comment, a warning is observed."""
    try:
        overall = json.loads(text)["body"]["Overall Health"]["value"]
    except (ValueError, KeyError, TypeError):
        return ()
    said = f"dcgmi health says {one_line(str(overall))}"
    if str(overall).lower() == "failure":
        return (comment("dcgm", said),)
    return (observe("dcgm", said),) if str(overall).lower() == "warning" else ()
