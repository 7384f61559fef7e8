"""Benchmarks of several programs: subjects are programs of their own, and what cannot be measured is named."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import frame
from benchmarks.frame import Asked, Bench, Subject
from benchmarks.rows import make_row, write_rows
from benchmarks.scheduler.__main__ import BENCH as SCHEDULER
from benchmarks.watchdog.__main__ import BENCH as WATCHDOG
from tests.waiting import LIMIT_S


@pytest.mark.parametrize("name", SCHEDULER.subjects)
def test_every_subject_is_a_program(name: str) -> None:
    assert importlib.util.find_spec(f"benchmarks.scheduler.{name}") is not None


def test_what_lacks_its_traces_its_program_or_root_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SCHEDULER.subjects["simulation"]
    assert "--traces" in frame.not_measurable(subject, None)
    assert str(tmp_path) in frame.not_measurable(subject, tmp_path)
    (tmp_path / subject.traces).write_bytes(b"")
    assert not frame.not_measurable(subject, tmp_path)
    assert "no such program" in frame.not_measurable(subject, tmp_path, module="benchmarks.scheduler.nothing")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in frame.not_measurable(SCHEDULER.subjects["overhead"], None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return dataclasses.replace(SCHEDULER, folder=tmp_path, page=tmp_path / "page.md")


def program(bench: Bench, name: str, _asked: Asked) -> list[str]:
    """Let every subject be a script of the benchmark's folder."""
    return ["/bin/sh", str(bench.folder / f"{name}.sh")]


def test_rows_are_gathered_and_a_failure_is_told(
    bench: Bench, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    rows = bench.folder / "rows"
    write_rows("placement", [make_row("fast", [1.0], "ms", at_most=2)], folder=rows)
    (rows / "placement.notes.json").write_text('["it rained"]', encoding="utf-8")
    (bench.folder / "placement.sh").write_text(f"cp {rows}/* {bench.folder}/", encoding="utf-8")
    (bench.folder / "model_error.sh").write_text("exit 3", encoding="utf-8")
    # What a subject has measured until it failed is kept.
    write_rows("waiting", [make_row("slow", [3.0], "s", at_most=2)], folder=rows)
    (bench.folder / "waiting.sh").write_text(f"cp {rows}/waiting.json {bench.folder}/; exit 1", encoding="utf-8")
    argv = ["--only", "placement,model_error,waiting", "--traces", str(bench.folder), "--json", "--write-docs"]
    code = frame.main(bench, argv, program)
    said = capfd.readouterr()
    assert code == 1
    assert [row["row"] for row in json.loads(said.out)] == ["fast", "slow"]
    assert "model_error FAILED: exit code 3" in said.err
    assert "waiting FAILED: exit code 1" in said.err
    assert "Figures to reach: 1 of 2" in said.err
    page = bench.page.read_text(encoding="utf-8")
    assert "it rained" in page
    assert "short run" not in page
    assert "exit code 3" in page


def test_a_subject_that_takes_too_long_is_told_to_end(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    slow = {"placement": Subject(title="slow", longest_s=0.2)}
    (bench.folder / "placement.sh").write_text("exec sleep 60", encoding="utf-8")
    assert frame.main(dataclasses.replace(bench, subjects=slow), ["--only", "placement"], program) == 1
    assert "it took longer than 0.2 s" in capfd.readouterr().out


def test_rows_of_an_earlier_run_do_not_pass_for_this_one(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    write_rows("placement", [make_row("old", [1.0])], folder=bench.folder)
    (bench.folder / "placement.sh").write_text("exit 0", encoding="utf-8")
    assert frame.main(bench, ["--only", "placement"], program) == 1
    assert "placement FAILED: it left no rows" in capfd.readouterr().out


def test_subjects_that_are_not_asked_for_are_joined_from_their_last_runs(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh = bench.folder / "fresh"
    write_rows("placement", [make_row("new", [1.0], "ms", at_most=2)], folder=fresh)
    (bench.folder / "placement.sh").write_text(f"cp {fresh}/placement.json {bench.folder}/", encoding="utf-8")
    write_rows("waiting", [make_row("kept", [3.0], "s", at_most=2)], folder=bench.folder)
    (bench.folder / "waiting.notes.json").write_text('["it rained then"]', encoding="utf-8")
    (bench.folder / "overhead.json").write_text("[{}]", encoding="utf-8")
    assert frame.main(bench, ["--only", "placement", "--join", "--write-docs"], program) == 0
    page = bench.page.read_text(encoding="utf-8")
    assert "Figures to reach: 1 of 2" in page
    assert page.index("new") < page.index("kept")
    assert "it rained then" in page
    assert f"{bench.subjects['waiting'].title}: of a run by itself that ended 20" in page
    assert "overhead.json of an earlier run cannot be read" in page
    assert "no earlier run left emulation.json" in page
    capfd.readouterr()
    assert frame.main(bench, ["--only", "placement", "--write-docs"], program) == 0
    assert "kept" not in bench.page.read_text(encoding="utf-8")


def test_rows_of_a_short_run_are_joined_as_such(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    fresh = bench.folder / "fresh"
    for name in ("placement", "waiting"):
        write_rows(name, [make_row(name, [1.0], "ms")], folder=fresh)
        (bench.folder / f"{name}.sh").write_text(f"cp {fresh}/{name}.json {bench.folder}/", encoding="utf-8")

    def noted() -> str:
        capfd.readouterr()
        assert frame.main(bench, ["--only", "placement", "--join", "--write-docs"], program) == 0
        page = bench.page.read_text(encoding="utf-8")
        return next(line for line in page.splitlines() if "by itself that ended" in line)

    assert frame.main(bench, ["--only", "waiting", "--quick"], program) == 0
    assert "of a short run by itself" in noted()
    (bench.folder / "waiting.short").touch()
    os.utime(bench.folder / "waiting.short", (1.0, 1.0))  # as where its program was run again, without the frame
    assert "of a run by itself" in noted()
    assert frame.main(bench, ["--only", "waiting", "--quick"], program) == 0
    assert frame.main(bench, ["--only", "waiting"], program) == 0
    assert "of a run by itself" in noted()


def test_an_unknown_subject_is_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        frame.main(SCHEDULER, ["--only", "plaecment"])
    assert "there are side_by_side, placement" in capfd.readouterr().err


def test_parts_of_a_subject_are_handed_to_its_program() -> None:
    asked = frame.asked_for(WATCHDOG, ["--only", "node-killed-spare,goodput,leaf-cut", "--quick"])
    assert asked.chosen == {"faults": ("node-killed-spare", "leaf-cut"), "goodput": ()}
    assert frame.command(WATCHDOG, "faults", asked)[2:] == [
        *("benchmarks.watchdog.faults", "--quick", "--only", "node-killed-spare,leaf-cut")
    ]
    whole = frame.asked_for(WATCHDOG, ["--only", "faults,leaf-cut"])
    assert whole.chosen == {"faults": ()}


@pytest.mark.parametrize("name", WATCHDOG.subjects)
def test_every_subject_of_the_watchdogs_is_a_program_that_is_short_when_asked(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.watchdog.{name}", "--help"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    asked = frame.asked_for(WATCHDOG, ["--quick", "--only", name])
    assert frame.command(WATCHDOG, name, asked)[3:] == ["--quick"]
    if not (WATCHDOG.subjects[name].root and os.geteuid()):
        assert done.returncode == 0, done.stderr
        assert "--quick" in done.stdout


def test_how_long_it_takes_is_told_before() -> None:
    (quick,) = frame.estimated(WATCHDOG, frame.asked_for(WATCHDOG, ["--quick", "--only", "goodput,scale"]))
    assert quick.startswith("about 2 minutes: goodput 1, scale 2")
    (part,) = frame.estimated(WATCHDOG, frame.asked_for(WATCHDOG, ["--only", "leaf-cut"]))
    (all_of,) = frame.estimated(WATCHDOG, frame.asked_for(WATCHDOG, ["--only", "faults"]))
    assert float(part.split()[1]) < 10 < float(all_of.split()[1]) <= 60
    assert frame.estimated(SCHEDULER, frame.asked_for(SCHEDULER, ["--only", "placement"])) == []
