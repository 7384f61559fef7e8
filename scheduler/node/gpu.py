"""GPUs: what NVML or nvidia-smi, and DCGM, say is wrong with them, asked by children that may hang."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from deeplink.scheduler.node.check_result import (
    Complaint,
    Counters,
    Look,
    NodeCheck,
    comment,
    drain,
    observe,
    one_line,
)
from deeplink.scheduler.node.child import SAFE_PATH, CheckProcess, CommandResult
from deeplink.scheduler.node.nvml import MODULE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.reading import HighWaterMarks
    from deeplink.scheduler.node.settings import GpuSettings

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
_PREFIX = "gpu "
_NO_NVML = 3


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


@dataclass(frozen=True, slots=True)
class GpuTools:
    """Which tools there are on this node."""

    nvml: bool = False
    smi: bool = False
    dcgm: bool = False

    @property
    def any(self) -> bool:
        """Whether there is one that knows of GPUs."""
        return self.nvml or self.smi


def tools_here(path: str) -> GpuTools:
    """Return the tools that this node has; NVML alone, without a driver, is none."""
    path = f"{path}:{SAFE_PATH}"
    smi = shutil.which("nvidia-smi", path=path) is not None
    driver = smi or Path("/proc/driver/nvidia/version").exists()
    nvml = driver and importlib.util.find_spec(MODULE) is not None
    return GpuTools(nvml, smi, shutil.which("dcgmi", path=path) is not None)


@dataclass(slots=True)
class GpuCheck(NodeCheck):
    """Looks at the GPUs; which there were is in `seen`."""

    settings: GpuSettings
    clock: Clock
    seen: HighWaterMarks
    tools: GpuTools
    # the command of our program around NVML
    nvml: Sequence[str] = (sys.executable, "-m", "deeplink.scheduler.node.nvml")
    _child: CheckProcess = field(init=False)
    _left_out: set[int] = field(default_factory=set)
    _first: dict[str, int] = field(default_factory=dict)
    _nvlink: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._child = CheckProcess(self.clock)

    @override
    def look(self) -> Look:
        now = self.clock.monotonic()
        end = now + self.settings.deadline_s * 0.8
        reading = self._read(end)
        answer = self._ask(["dcgmi", "health", "--check", "--json"], end) if self.tools.dcgm else None
        dcgm = parse_dcgm(answer.stdout) if answer is not None else ()
        known = self._known(reading)
        for gpu in reading.gpus:
            if gpu.uncorrected is not None:  # fewer than there were: the driver was loaded again
                self._first[gpu.uuid] = min(self._first.get(gpu.uuid, gpu.uncorrected), gpu.uncorrected)
        risen = self._nvlink.rises(
            {f"{gpu.uuid} {link}": count for gpu in reading.gpus for link, count in gpu.nvlink_errors.items()}
        )
        complaints = judge_gpus(reading, known, self._first, risen)
        return Look((*complaints, *dcgm), reading.unknown)

    @override
    def close(self) -> None:
        self._child.kill()

    def _known(self, reading: GpuReading) -> dict[str, int]:
        for gpu in reading.gpus:
            self.seen.best(_PREFIX + gpu.uuid, gpu.index + 1.0)
        return {uuid: int(self.seen.best(_PREFIX + uuid)) - 1 for uuid in self.seen.names(_PREFIX)}

    def _ask(self, argv: Sequence[str], end: float) -> CommandResult | None:
        return self._child.run(argv, end - self.clock.monotonic())

    def _read(self, end: float) -> GpuReading:
        if self.tools.nvml:
            answer = self._ask(self.nvml, end)
            if answer is None:
                return GpuReading(unknown="NVML does not answer")
            if answer.code != _NO_NVML:
                return parse_nvml(answer.stdout)
        if not self.tools.smi:
            return GpuReading(unknown="NVML finds no driver, and there is no nvidia-smi")
        return self._read_smi(end)

    def _read_smi(self, end: float) -> GpuReading:
        gpus: dict[str, GpuSample] = {}
        lost: tuple[str, ...] = ()
        withheld = 0
        for number, (flag, fields) in enumerate(QUERIES):
            if number in self._left_out:
                continue
            answer = self._ask(nvidia_smi(flag, fields), end)
            if answer is None:
                return GpuReading(unknown="nvidia-smi does not answer")
            lost = (*lost, *parse_lost(answer.stdout + answer.stderr))
            withheld = max(withheld, count_withheld(answer.stdout + answer.stderr))
            rows = parse_csv(answer.stdout, fields)
            self._learn(number, answer, has_rows=bool(rows))
            if not number and not rows and not lost and NO_DEVICES not in answer.stdout + answer.stderr:
                said = one_line(answer.stderr or answer.stdout) or f"it exited {answer.code}"
                return GpuReading(unknown=f"nvidia-smi: {said}")
            for row in rows:
                uuid = row.get("uuid") or row.get("gpu_uuid", "")
                gpus[uuid] = with_row(gpus.get(uuid, GpuSample(uuid=uuid)), row)
        return GpuReading(self._with_links(gpus, end), tuple(dict.fromkeys(lost)), withheld=withheld)

    def _learn(self, number: int, answer: CommandResult, *, has_rows: bool) -> None:
        """Leave out from now on what this driver does not know, and the second of two names for one thing."""
        if number and REFUSED in answer.stdout + answer.stderr:
            self._left_out.add(number)
        elif number == OLD_NAMES and has_rows:
            self._left_out.add(NEW_NAMES)

    def _with_links(self, gpus: dict[str, GpuSample], end: float) -> tuple[GpuSample, ...]:
        answer = self._ask(["nvidia-smi", "nvlink", "-e"], end)
        links = parse_nvlink(answer.stdout) if answer is not None else {}
        return tuple(
            dataclasses.replace(gpu, nvlink_errors=links.get(gpu.index, {})) for gpu in gpus.values() if gpu.uuid
        )
