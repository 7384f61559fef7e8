"""What all programs of a benchmark share: options, rows handed over, an end that takes down what was started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from tests.waiting import LIMIT_S

TOP = Path(__file__).parents[2]
# A benchmark of one subject, a shell script that says when it is up and when it was told to end.
RUNS = """
import dataclasses, sys
from pathlib import Path
from benchmarks import frame
from benchmarks.program import unwind_when_told
from benchmarks.scheduler.__main__ import BENCH
unwind_when_told()
folder = Path(sys.argv[1])
bench = dataclasses.replace(BENCH, subjects={"placement": frame.Subject(title="it waits")}, folder=folder)
sys.exit(frame.main(bench, [], lambda *_: ["/bin/sh", str(folder / "waits.sh")]))
"""
WAITS = """trap 'sleep 1; touch {0}/tidy; exit 1' INT
touch {0}/up
while :; do sleep 0.1; done
"""


def test_rows_are_handed_over_as_a_table_or_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [make_row("fast", [1.0], "ms", at_most=2)]
    hand_over("mine", rows, as_json=False, folder=tmp_path)
    assert "reached" in capfd.readouterr().out
    hand_over("mine", rows, as_json=True, folder=tmp_path)
    said = json.loads(capfd.readouterr().out)
    assert [row["row"] for row in said] == ["fast"]
    assert said == json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))


def test_every_program_has_a_short_run_and_json() -> None:
    asked = options("benchmarks.x", "About.", quick="less").parse_args(["--quick", "--json"])
    assert (asked.quick, asked.json) == (True, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_what_was_started_and_is_told_in_a_line(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.sh").write_text(WAITS.format(tmp_path), encoding="utf-8")
    argv = [sys.executable, "-c", RUNS, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=TOP) as bench:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (tmp_path / "up").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert bench.stderr is not None
            bench.send_signal(number)
            said = bench.stderr.readline()
            bench.send_signal(number)  # whoever has no patience does not break off the tidying
            said += bench.stderr.read()
            bench.wait(LIMIT_S)
        finally:
            bench.kill()
    assert bench.returncode == 128 + number
    assert (tmp_path / "tidy").exists()
    assert said.splitlines() == [f"{number.name}: what was started is taken down"]
