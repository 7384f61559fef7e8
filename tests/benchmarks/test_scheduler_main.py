"""`make bench-scheduler`: subjects are programs of their own, and what cannot be measured is named."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from benchmarks.rows import make_row, write_rows
from benchmarks.scheduler import __main__ as bench


@pytest.mark.parametrize("name", bench.SUBJECTS)
def test_every_subject_is_a_program(name: str) -> None:
    assert importlib.util.find_spec(f"benchmarks.scheduler.{name}") is not None


def test_what_lacks_its_traces_or_root_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = bench.SUBJECTS["simulation"]
    assert "--traces" in bench.not_measurable(subject, None)
    assert str(tmp_path) in bench.not_measurable(subject, tmp_path)
    (tmp_path / subject.traces).write_bytes(b"")
    assert not bench.not_measurable(subject, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in bench.not_measurable(bench.SUBJECTS["overhead"], None)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let every subject be a script of this folder."""
    monkeypatch.setattr(bench, "BENCH", tmp_path)
    monkeypatch.setattr(bench, "write_rows", lambda name, rows: write_rows(name, rows, folder=tmp_path))
    monkeypatch.setattr(
        bench,
        "command",
        lambda name, subject, traces, *, quick: ["/bin/sh", str(tmp_path / f"{name}.sh")],
    )
    return tmp_path


def test_rows_are_gathered_and_a_failure_is_told(programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = programs / "rows"
    write_rows("placement", [make_row("fast", [1.0], "ms", at_most=2)], folder=rows)
    (programs / "placement.sh").write_text(f"cp {rows}/placement.json {programs}/", encoding="utf-8")
    (programs / "model_error.sh").write_text("exit 3", encoding="utf-8")
    code = bench.main(["--only", "placement,model_error", "--traces", str(programs), "--json"])
    said = capfd.readouterr()
    assert code == 1
    assert [row["row"] for row in json.loads(said.out)] == ["fast"]
    assert "model_error FAILED: exit code 3" in said.err
    assert "Figures to reach: 1 of 1" in said.err


def test_rows_of_an_earlier_run_do_not_pass_for_this_one(
    programs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows("placement", [make_row("old", [1.0])], folder=programs)
    (programs / "placement.sh").write_text("exit 0", encoding="utf-8")
    assert bench.main(["--only", "placement"]) == 1
    assert "placement FAILED: it left no rows" in capfd.readouterr().out


def test_an_unknown_subject_is_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--only", "plaecment"])
    assert "there are side_by_side, placement" in capfd.readouterr().err
