"""A program that says as JSON what NVML knows of the GPUs: in a process of its own, which may hang or crash.

Started by the GPU check as `python -m deeplink.scheduler.node.nvml` where nvidia-ml-py can be imported.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "pynvml"
MOST_LINKS = 18
NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION, nvml.h
_THROTTLES = {  # nvmlClocksEventReason*, nvml.h
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def gpus_of(nvml: Any) -> dict[str, Any]:
    """Return what NVML says of all GPUs; those that we may not ask are only counted."""
    gpus: list[dict[str, Any]] = []
    lost: list[str] = []
    withheld = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append({"index": index, "uuid": _text(nvml.nvmlDeviceGetUUID(handle)), **_facts(nvml, handle)})
        except nvml.NVMLError as problem:
            if getattr(problem, "value", None) == NO_PERMISSION:
                withheld += 1
            else:
                lost.append(f"GPU {index}: {problem}")
    return {"gpus": gpus, "lost": lost, "withheld": withheld}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _facts(nvml: Any, handle: Any) -> dict[str, Any]:
    def asked(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):  # not supported by this GPU, or by this version
            return None

    retired = asked(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    remapped = asked(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    reasons = asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    pending = [bool(flag) for flag in (retired, remapped[2] if remapped else None) if flag is not None]
    facts = {
        "uncorrected": asked(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        "reset_pending": any(pending) if pending else None,
        "remap_failed": bool(remapped[3]) if remapped else None,
        "throttles": [name for bit, name in _THROTTLES.items() if reasons & bit],
        "nvlink_errors": _links(nvml, handle, asked),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _links(nvml: Any, handle: Any, asked: Callable[[Callable[[], Any]], Any]) -> dict[str, int]:
    counters = [
        asked(lambda name=name: getattr(nvml, name))  # type: ignore[misc]
        for name in (
            "NVML_NVLINK_ERROR_DL_REPLAY",
            "NVML_NVLINK_ERROR_DL_RECOVERY",
            "NVML_NVLINK_ERROR_DL_CRC_FLIT",
            "NVML_NVLINK_ERROR_DL_CRC_DATA",
        )
    ]
    found: dict[str, int] = {}
    for link in range(MOST_LINKS):
        if not asked(lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link)):  # type: ignore[misc]
            continue
        counts = [
            asked(lambda link=link, one=one: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, one))  # type: ignore[misc]
            for one in counters
            if one is not None
        ]
        found[str(link)] = sum(count for count in counts if count is not None)
    return found


def main() -> int:
    """Write one line of JSON; 3 where there is no NVML here."""
    try:
        nvml = importlib.import_module(MODULE)
    except ImportError:
        return 3
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        sys.stderr.write(f"{problem}\n")
        return 3
    sys.stdout.write(f"{json.dumps(gpus_of(nvml))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
