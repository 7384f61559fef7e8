"""The GPU check: asks NVML or nvidia-smi, and DCGM, by children that may hang."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.node.check_result import Counters, Look, NodeCheck, one_line
from deeplink.scheduler.node.child import SAFE_PATH, CheckProcess, CommandResult
from deeplink.scheduler.node.gpu import (
    NEW_NAMES,
    NO_DEVICES,
    OLD_NAMES,
    QUERIES,
    REFUSED,
    GpuReading,
    GpuSample,
    count_withheld,
    judge_gpus,
    nvidia_smi,
    parse_csv,
    parse_dcgm,
    parse_lost,
    parse_nvlink,
    parse_nvml,
    with_row,
)
from deeplink.scheduler.node.nvml import MODULE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.reading import HighWaterMarks
    from deeplink.scheduler.node.settings import GpuSettings

_PREFIX = "gpu "
_NO_NVML = 3


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
