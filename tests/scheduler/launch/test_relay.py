"""srun's standard error: passed through whole, and overheard."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deeplink.scheduler.launch.relay import FailureWatcher, exit_code_of

# As recorded: rank 1 exits 5, srun ends the others.
SAID = """\
srun: error: n0: task 1: Exited with exit code 5
srun: launch/slurm: _step_signal: Terminating StepId=9.0
srun: error: n2: task 2: Terminated
srun: error: n[4-5]: tasks 0,3: Terminated
"""


def watched(written: bytes, pieces: int = 7) -> tuple[FailureWatcher, int]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source:
        watcher = FailureWatcher(source)
        for start in range(0, len(written), pieces):
            os.write(writing, written[start : start + pieces])
        os.close(writing)
        watcher.finish()
    return watcher, len(written)


def test_the_first_failure_is_told_from_those_it_caused(capfd: pytest.CaptureFixture[str]) -> None:
    watcher, _ = watched(f"epoch 1\n{SAID}".encode())
    assert watcher.code == 5
    assert watcher.said == "rank 1 on n0: Exited with exit code 5"
    assert capfd.readouterr().err == f"epoch 1\n{SAID}"


def test_bytes_that_are_no_text_stop_nothing(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    written = b"srun: error: \xff: task 1: Exited with exit code 5\nand on\n"
    watcher, _ = watched(written)
    assert (watcher.code, watcher.failed().node) == (5, None)
    assert capfdbinary.readouterr().err == written


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("Exited with exit code 1", 1),
        ("Killed", 137),
        ("Terminated", 143),
        ("Segmentation fault", 139),
        ("Segmentation fault (core dumped)", 139),
        ("Aborted", 134),
        ("Out Of Memory", 137),
        ("hello", None),
    ],
)
def test_sruns_words_for_the_end_of_a_task(how: str, code: int | None) -> None:
    assert exit_code_of(how) == code


def test_ranks_that_say_nothing_of_the_kind(capfd: pytest.CaptureFixture[str]) -> None:
    watcher, size = watched(b"x" * 200_000 + b"\n\xff\xfe no newline at the end", pieces=50_000)
    assert watcher.code is None
    assert len(os.fsencode(capfd.readouterr().err)) >= size - 8


def test_ranks_are_not_held_up_when_nobody_reads_our_own_standard_error(tmp_path: Path) -> None:
    script = tmp_path / "closed.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            from deeplink.scheduler.launch.relay import FailureWatcher
            reading, writing = os.pipe()
            watcher = FailureWatcher(os.fdopen(reading, "rb"))
            os.close(2)
            for _ in range(100):
                os.write(writing, b"y" * 50_000)
            os.write(writing, b"\\nsrun: error: n0: task 0: Killed\\n")
            os.close(writing)
            watcher.finish()
            print(watcher.code)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "137\n"
