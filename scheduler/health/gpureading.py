"""What nvidia-smi, NVML and dcgmi write about GPUs, as values; pure."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.health.gpu import HARD_THROTTLES, SOFT_THROTTLES, GpuReading, GpuSample
from deeplink.scheduler.health.look import Complaint, comment, observe, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
