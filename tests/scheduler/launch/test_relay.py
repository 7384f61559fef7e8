"""srun's standard error: passed through whole, and overheard."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deeplink.scheduler.launch.srun import FailureWatcher
from tests.waiting import LIMIT_S

DATA = Path(__file__).parents[2] / "data" / "slurm"


def watched(written: bytes, pieces: int = 7) -> tuple[FailureWatcher, int]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source:
        watcher = FailureWatcher(source)
        for start in range(0, len(written), pieces):
            os.write(writing, written[start : start + pieces])
        os.close(writing)
        watcher.finish()
    return watcher, len(written)


def test_bytes_that_are_no_text_stop_nothing(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    written = b"srun: error: Task launch for StepId=7.2 failed on node \xff: no\nand on\n"
    watcher, _ = watched(written)
    assert watcher.failed(1).node is None
    assert capfdbinary.readouterr().err == written


@pytest.mark.parametrize(
    "written",
    [
        # As recorded with Slurm 24.11.5 and 26.05.5.
        "srun: error: --nodes is incompatible with --distribution=arbitrary\n",
        "srun: error: Unable to create step for job 4: Requested node configuration is not available\n",
        "srun: error: Task launch for StepId=7.2 failed on node n3: Invalid job credential\n",
        "",
        "srun: unrecognized option '--no-such'\n",
        "srun: option '--time' requires an argument\n",
    ],
)
def test_why_srun_failed_by_itself_is_told(written: str) -> None:
    watcher, _ = watched(written.encode())
    said = watcher.failed(1)
    assert not said.is_of_rank
    assert written.removeprefix("srun: ").removeprefix("error: ").strip() in said.said
    assert not watcher.failed().said, "while it has not ended nothing has failed"


def test_the_node_that_ranks_cannot_be_started_on_is_read() -> None:
    launch = b"srun: error: Task launch for StepId=7.2 failed on node n3: Invalid job credential\n"
    watcher, _ = watched(b"srun: error: a word of srun's\n" + launch)
    assert watcher.failed(1).node == "n3"


@pytest.mark.parametrize(
    "line",
    [
        b"srun: error: a word\x1b[2J of srun's\n",
        b"srun: error: Unable to create step for job 4: \x1b[2J\n",
        b"srun: error: Task launch for StepId=7.2 failed on node \x1b[1mn3: Invalid job credential\n",
    ],
)
def test_what_a_rank_writes_for_terminals_enters_no_record(
    line: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    watcher, _ = watched(line)
    for said in (watcher.node, watcher.unstarted, watcher.failed(1).said):
        assert said.isprintable()
    assert capfdbinary.readouterr().err == line, "the user's own output is passed on as it is"


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_what_srun_said_of_itself_is_read_as_recorded(version: str) -> None:
    said = (DATA / version / "1-busy" / "srun-own.txt.err").read_bytes().splitlines(keepends=True)
    for line in said[: next(number for number, line in enumerate(said) if b": task" in line)]:
        assert "srun itself exited 1" in watched(line)[0].failed(1).said


def test_ranks_that_say_nothing_of_the_kind(capfd: pytest.CaptureFixture[str]) -> None:
    watcher, size = watched(b"x" * 200_000 + b"\n\xff\xfe no newline at the end", pieces=50_000)
    assert watcher.failed().said == ""
    assert len(os.fsencode(capfd.readouterr().err)) >= size - 8


def test_ranks_are_not_held_up_when_nobody_reads_our_own_standard_error(tmp_path: Path) -> None:
    script = tmp_path / "closed.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            from deeplink.scheduler.launch.srun import FailureWatcher
            reading, writing = os.pipe()
            watcher = FailureWatcher(os.fdopen(reading, "rb"))
            os.close(2)
            for _ in range(100):
                os.write(writing, b"y" * 50_000)
            os.write(writing, b"\\nsrun: error: Unable to create step for job 7: no\\n")
            os.close(writing)
            watcher.finish()
            print(watcher.failed(1).said)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "srun itself exited 1: Unable to create step for job 7: no\n"
