"""GPUs. There is none here: every answer below is SYNTHETIC, written by hand after the tools' documentation."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import Look
from deeplink.scheduler.node.gpu import (
    GpuCheck,
    GpuReading,
    GpuSample,
    GpuTools,
    judge_gpus,
    parse_csv,
    parse_dcgm,
    parse_lost,
    parse_nvlink,
    parse_nvml,
    tools_here,
)
from deeplink.scheduler.node.host_checks import KernelLog, XidCheck
from deeplink.scheduler.node.reading import HighWaterMarks
from deeplink.scheduler.node.settings import GpuSettings

SMI = """#!/bin/sh
# SYNTHETIC nvidia-smi: answers from files beside it, one per query; a query without a file is refused.
here=$(dirname "$0")
echo "$*" >>"$here/asked"
case "$*" in
    *ecc.errors*) file=memory ;;
    *clocks_throttle_reasons*) file=throttle ;;
    *clocks_event_reasons*) file=event ;;
    *remapped_rows*) file=remapped ;;
    "nvlink -e") file=nvlink ;;
esac
[ -e "$here/hangs" ] && sleep 1000
if ! [ -e "$here/$file" ]; then echo "Field \\"x\\" is not a valid field to query."; exit 2; fi
cat "$here/$file"
"""
NVLINK = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: Replay Errors: {0}
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 0

\t Link 1: Replay Errors: 0
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
\t Link 0: Replay Errors: 0
"""
CALM = "Not Active, Not Active, Not Active, Not Active"


class Node:
    """A node with a synthetic nvidia-smi on PATH."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, deadline_s: float = 20.0) -> None:
        self.tools = root / "bin"
        self.tools.mkdir()
        self.program("nvidia-smi", SMI)
        monkeypatch.setenv("PATH", f"{self.tools}:{os.environ['PATH']}")
        self.answer("memory", "GPU-a, 0, 0, [N/A]\nGPU-b, 1, 2, No\n")
        self.answer("throttle", f"GPU-a, 0, {CALM}\nGPU-b, 1, {CALM}\n")
        self.answer("remapped", "GPU-a, 0, 0\nGPU-b, 0, 0\n")
        self.answer("nvlink", NVLINK.format(0))
        self.check = GpuCheck(
            GpuSettings(deadline_s=deadline_s),
            SystemClock(),
            HighWaterMarks(root / "seen.json"),
            tools_here(os.environ["PATH"]),
        )

    def program(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def answer(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)

    def look(self) -> dict[str, Severity]:
        return told(self.check.look())


def told(look: Look) -> dict[str, Severity]:
    return {complaint.subject: complaint.severity for complaint in look.complaints}


OLD = {"GPU-b ecc": Severity.WARNING}
"""The second GPU had errors before we looked: they are no news."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_gpus_that_are_well_say_nothing(node: Node) -> None:
    assert node.check.tools.smi
    assert node.look() == OLD


def test_a_gpu_fewer_than_before_has_fallen_off_the_bus_also_for_an_agent_started_anew(
    node: Node, tmp_path: Path
) -> None:
    node.look()
    node.answer("memory", "GPU-b, 1, 2, No\n")
    node.answer("throttle", f"GPU-b, 1, {CALM}\n")
    node.answer("remapped", "GPU-b, 0, 0\n")
    assert node.look() == {"GPU-a gone": Severity.ERROR, **OLD}
    node.check.seen = HighWaterMarks(tmp_path / "seen.json")
    assert "GPU-a gone" in node.look()
    node.answer("memory", "No devices were found\n")
    (tmp_path / "bin" / "throttle").unlink()
    node.answer("remapped", "")
    assert node.look() == {"GPU-a gone": Severity.ERROR, "GPU-b gone": Severity.ERROR}


def test_a_gpu_that_cannot_be_reached_is_lost(node: Node) -> None:
    said = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover"
    node.answer("memory", f"{said}\nGPU-b, 1, 2, No\n")
    assert node.look()["lost"] is Severity.ERROR


def test_what_its_memory_says(node: Node) -> None:
    node.look()
    node.answer("memory", "GPU-a, 0, 3, Yes\nGPU-b, 1, 2, No\n")
    node.answer("remapped", "GPU-a, 0, 0\nGPU-b, 1, 1\n")
    assert node.look() == {
        "GPU-a ecc": Severity.ERROR,
        "GPU-a reset": Severity.WARNING,
        "GPU-b remap": Severity.ERROR,
        "GPU-b reset": Severity.WARNING,
        **OLD,
    }


def test_errors_of_before_are_not_new_though_the_first_look_did_not_see_them(node: Node) -> None:
    node.answer("memory", "GPU-a, 0, [N/A], No\nGPU-b, 1, 2, No\n")
    assert node.look() == OLD
    node.answer("memory", "GPU-a, 0, 4, No\nGPU-b, 1, 2, No\n")
    assert node.look() == {"GPU-a ecc": Severity.WARNING, **OLD}
    node.answer("memory", "GPU-a, 0, 0, No\nGPU-b, 1, 2, No\n")  # the driver was loaded again
    assert node.look() == OLD
    node.answer("memory", "GPU-a, 0, 3, No\nGPU-b, 1, 2, No\n")
    assert node.look() == {"GPU-a ecc": Severity.ERROR, **OLD}


def test_lower_clocks_by_older_and_newer_names(node: Node) -> None:
    node.answer("throttle", f"GPU-a, 0, Not Active, Not Active, Not Active, Active\nGPU-b, 1, {CALM}\n")
    assert node.look() == {"GPU-a clocks": Severity.NOTE, **OLD}
    (node.tools / "throttle").unlink()
    node.check._left_out.clear()
    node.answer("event", "GPU-a, 0, Active, Not Active, Active, Not Active\n")
    assert node.look() == {"GPU-a clocks": Severity.WARNING, **OLD}
    (node.tools / "asked").unlink()
    node.look()
    assert "throttle_reasons" not in (node.tools / "asked").read_text(), "what is refused is not asked again"


def test_errors_of_nvlink_are_told_while_they_rise(node: Node) -> None:
    assert node.look() == OLD
    node.answer("nvlink", NVLINK.format(5))
    assert node.look() == {"GPU-a nvlink 0": Severity.NOTE, **OLD}
    node.answer("nvlink", NVLINK.format(500))
    assert node.look() == {"GPU-a nvlink 0": Severity.WARNING, **OLD}
    assert node.look() == OLD


def test_a_tool_that_hangs_or_fails_is_unknown_and_never_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    node.look()
    patient = node.check.settings
    (node.tools / "hangs").touch()
    node.check.settings = replace(patient, deadline_s=1.0)
    look = node.check.look()
    assert (told(look), look.unknown) == ({}, "nvidia-smi does not answer")
    (node.tools / "hangs").unlink()
    node.check.settings = patient
    node.answer("memory", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    look = node.check.look()
    assert told(look) == {}
    assert "couldn't communicate" in look.unknown


def test_xids_of_the_kernels_log_are_told_for_an_hour(tmp_path: Path) -> None:
    clock, kmsg = ManualClock(now=10_000.0), tmp_path / "kmsg"
    now_us = 9_999_000_000
    kmsg.write_text(
        f"4,100,{now_us},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.\n"
        f"6,101,{now_us},-;eth0: link up\n"
        f"4,102,{now_us},-;NVRM: Xid (PCI:0000:5e:00): 13, pid=9, name=python, Graphics Exception\n"
        f"4,103,{now_us - 4_000_000_000},-;NVRM: Xid (PCI:0000:5e:00): 48, pid=9\n"
    )
    check = XidCheck(clock, KernelLog(kmsg))
    found = check.look()
    assert told(found) == {"xid 79 0000:3b:00": Severity.ERROR, "xid 13 0000:5e:00": Severity.NOTE}
    assert all(complaint.certain for complaint in found.complaints)
    clock.sleep(3000)
    assert told(check.look()) == told(found)
    clock.sleep(600)
    assert told(check.look()) == {}
    check.close()
    assert not KernelLog(tmp_path / "absent").may_read()


def test_dcgm_says_what_it_says(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"body": {"Overall Health": {"value": "Failure"}}, "header": ["Health Monitor Report"]})
    node.program("dcgmi", f"#!/bin/sh\necho '{answer}'\n")
    node.check.tools = tools_here(os.environ["PATH"])
    assert node.look() == {"dcgm": Severity.WARNING, **OLD}
    node.program("dcgmi", "#!/bin/sh\necho 'Error: unable to connect to host engine'; exit 1\n")
    assert node.look() == OLD


FAKE_NVML = """
# SYNTHETIC pynvml: two GPUs that are well, unless NVML_FACTS says otherwise.
import json, os
class NVMLError(Exception):
    def __init__(self, said, value=999):
        super().__init__(said)
        self.value = value
facts = json.loads(os.environ.get("NVML_FACTS", "{}"))
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_NVLINK_ERROR_DL_REPLAY = 1, 0, 0
def nvmlInit():
    if facts.get("no driver"): raise NVMLError("Driver Not Loaded")
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index):
    if facts.get("lost") == index: raise NVMLError("GPU is lost", 15)
    if facts.get("another's") == index: raise NVMLError("Insufficient Permissions", 4)
    return index
def nvmlDeviceGetUUID(handle): return f"GPU-{'ab'[handle]}"
def nvmlDeviceGetTotalEccErrors(handle, kind, counter): return facts.get("ecc", 0)
def nvmlDeviceGetRetiredPagesPendingStatus(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetRemappedRows(handle): return [0, 0, facts.get("pending", 0), facts.get("failed", 0)]
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return facts.get("reasons", 0x4)
def nvmlDeviceGetNvLinkState(handle, link):
    if link > 1: raise NVMLError("Invalid Argument")
    return 1
def nvmlDeviceGetNvLinkErrorCounter(handle, link, counter): return 3
"""


def nvml_check(root: Path, monkeypatch: pytest.MonkeyPatch, **facts: object) -> GpuCheck:
    folder = root / "lib"
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(FAKE_NVML)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("NVML_FACTS", json.dumps(facts))
    return GpuCheck(GpuSettings(), SystemClock(), HighWaterMarks(root / "seen.json"), GpuTools(nvml=True))


def test_nvml_is_asked_by_a_program_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = nvml_check(tmp_path, monkeypatch)
    assert check.look() == Look()
    sick = nvml_check(tmp_path, monkeypatch, ecc=1, pending=1, failed=1, reasons=0x44, lost=1)
    assert told(sick.look()) == {
        "GPU-a ecc": Severity.WARNING,
        "GPU-a reset": Severity.WARNING,
        "GPU-a remap": Severity.ERROR,
        "GPU-a clocks": Severity.WARNING,
        "GPU-b gone": Severity.ERROR,
        "lost": Severity.ERROR,
    }


def test_a_gpu_that_a_job_may_not_ask_is_not_lost(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nvml_check(tmp_path, monkeypatch).look() == Look()
    assert nvml_check(tmp_path, monkeypatch, **{"another's": 1}).look() == Look(), "nor gone"
    assert node.look() == OLD
    said = "Unable to determine the device handle for GPU 0000:3B:00.0: Insufficient Permissions"
    node.answer("memory", f"{said}\nGPU-b, 1, 2, No\n")
    node.answer("throttle", f"{said}\nGPU-b, 1, {CALM}\n")
    node.answer("remapped", f"{said}\nGPU-b, 0, 0\n")
    assert node.look() == OLD
    node.answer("memory", "GPU-b, 1, 2, No\n")
    node.answer("throttle", f"GPU-b, 1, {CALM}\n")
    node.answer("remapped", "GPU-b, 0, 0\n")
    assert node.look() == {"GPU-a gone": Severity.ERROR, **OLD}


def test_nvml_without_a_driver_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = nvml_check(tmp_path, monkeypatch, **{"no driver": True}).look()
    assert look.complaints == ()
    assert look.unknown


def test_nvml_that_crashes_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = nvml_check(tmp_path, monkeypatch)
    check.nvml = (sys.executable, "-c", "import os; os.abort()")
    assert check.look() == Look((), "NVML did not answer as expected")


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has GPUs")
def test_without_tools_there_is_no_check() -> None:
    assert not tools_here("/nonexistent").any


@given(st.text(max_size=300))
def test_no_answer_of_a_tool_is_more_than_nothing(text: str) -> None:
    assert all(set(row) == {"a", "b"} for row in parse_csv(text.replace("\0", ""), ("a", "b")))
    assert all(isinstance(said, str) for said in parse_lost(text))
    assert isinstance(parse_nvlink(text), dict)
    assert parse_nvml(text).gpus == ()
    assert parse_dcgm(text) == ()


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(JSON)
def test_no_json_is_more_than_unknown(value: object) -> None:
    text = json.dumps(value)
    parse_dcgm(text)
    assert isinstance(parse_nvml(text), GpuReading)
    assert isinstance(parse_nvml(json.dumps({"gpus": value})), GpuReading)


def test_an_unknown_reading_is_never_bad() -> None:
    assert list(judge_gpus(GpuReading((), ("x",), "dark"), {"GPU-a": 0}, {}, {})) == []
    assert GpuSample(uuid="GPU-a").name == "GPU-a"
