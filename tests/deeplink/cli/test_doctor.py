"""`deeplink doctor` on a host without a Slurm, or with one that hangs: told, and over in time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.cli import main
from deeplink.cli.doctor import as_text, document
from deeplink.scheduler.sitecheck import examine
from deeplink.scheduler.sitecheck.doctor_checks import CHECKS, judge
from tests.scheduler.sitecheck.sites import folder, host, measured, other, settings, site


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose programs are those of the returned folder alone."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "DEEPLINK_"))]:
        monkeypatch.delenv(name)
    for name in ("CATALOG", "STORE", "STATE"):
        monkeypatch.setenv(f"DEEPLINK_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("DEEPLINK_CONFIG", os.devnull)
    found = tmp_path / "bin"
    found.mkdir()
    monkeypatch.setenv("PATH", str(found))
    return found


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return what runs the verb, and gives its exit code and all it wrote."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["deeplink", "doctor", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    return call


def program(bin_folder: Path, name: str, text: str) -> None:
    (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (bin_folder / name).chmod(0o755)


@pytest.mark.usefixtures("bin_folder")
def test_without_slurm_that_is_reported_and_this_host_looked_at(doctor: Said) -> None:
    code, said = doctor("--here", "--disk-mib", "1")
    assert code == 1, said
    assert "scontrol is not on PATH" in said
    assert "store-usable" in said
    assert "1 host answered" in said


def test_without_an_idle_node_no_step_is_started(bin_folder: Path, doctor: Said) -> None:
    program(bin_folder, "scontrol", 'case "$*" in *node*) echo "No nodes in the system";; *) exit 1;; esac')
    facts = json.loads(doctor("--json")[1])
    told = {one["check"]: one["said"] for one in facts["findings"]}
    assert told["nodes-answer"].startswith("no node is idle")
    assert facts["errors"] == 2, "scontrol fails, and squeue is not there"
    assert {one["check"] for one in facts["findings"]} == {check.name for check in CHECKS}


def test_a_controller_that_hangs_is_a_finding_in_time(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, doctor: Said
) -> None:
    program(bin_folder, "scontrol", "exec /bin/sleep 60")
    monkeypatch.setattr(examine, "COMMAND_TIMEOUT_S", 0.3)
    code, said = doctor("--quick")
    assert code == 1
    assert "scontrol did not answer within 0.3 s" in said


def test_an_srun_that_is_not_there_is_a_finding(bin_folder: Path, doctor: Said) -> None:
    program(bin_folder, "scontrol", "exit 1")
    code, said = doctor("--nodes", "2")
    assert code == 1
    assert "srun is not on PATH" in said


@pytest.mark.usefixtures("bin_folder")
def test_wrong_usage_and_an_explanation(doctor: Said) -> None:
    assert doctor("--here", "--quick")[0] == 2
    assert doctor("--explain", "no-such-check")[0] == 2
    code, said = doctor("--explain", "leaked-gpus")
    assert code == 0
    assert "scontrol reconfigure" in said


def test_the_page_has_each_check_in_its_group_and_each_remedy_once() -> None:
    evidence = other(site(settings=settings("6-unfit")), "n1", measured=measured("n0", markers={"store": ("n0",)}))
    text = as_text(judge(evidence))
    for check in CHECKS:
        assert check.name in text
    errors = [
        line for line in text.splitlines() if line.startswith("  error") and "these nodes have one store" in line
    ]
    assert errors == ["  error    store-private            these nodes have one store between them  [n[0-1]]"]
    remedies = text.split("What to change")[1]
    assert remedies.count("slurm.conf: MinJobAge=300") == 1
    assert remedies.index("SlurmdTimeout=300") < remedies.index("MinJobAge=300"), "errors first"


def test_what_is_unknown_for_one_reason_is_one_line() -> None:
    text = as_text(judge(site(reports={}, problems={"hosts": "no node was looked at (--quick)"})))
    assert text.count("(--quick): ") == 3, "one line for each group"


def test_what_a_node_is_called_or_says_cannot_drive_the_terminal() -> None:
    one = host("n1")
    bad = {**one.folders, "store": folder("/ssd\x1b[31m\nok  all is well", writable=False)}
    findings = judge(other(site(), "n1", host=host("n1", folders=bad)))
    assert "\x1b" not in as_text(findings)
    assert "\nok  all" not in as_text(findings)
    assert json.loads(json.dumps(document(findings)))["errors"] >= 1
