"""srun's standard error: passed through whole, and overheard."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deeplink.scheduler.launch.srun import FailureWatcher, exit_code_of
from tests.waiting import LIMIT_S

DATA = Path(__file__).parents[2] / "data" / "slurm"
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
    ("written", "named"),
    [
        # As recorded with Slurm 24.11.5 and 26.05.5.
        (b"srun: error: --nodes is incompatible with --distribution=arbitrary\n", False),
        (b"srun: error: Unable to create step for job 4: Requested node configuration is not available\n", False),
        (b"srun: error: Task launch for StepId=7.2 failed on node n3: Invalid job credential\n", False),
        (b"", False),
        (b"srun: unrecognized option '--no-such'\n", False),
        (b"srun: option '--time' requires an argument\n", False),
        (b"srun: error: n0: task 1: Exited with exit code 5\n", True),
        (b"srun: error: n0: task 1: Some words that no version has said\n", True),
        (b"epoch 3: 50%|##   |srun: error: n0: task 1: Exited with exit code 5\n", True),
    ],
)
def test_an_end_of_sruns_own_is_told_from_that_of_a_rank(written: bytes, named: bool) -> None:
    watcher, _ = watched(written)
    assert watcher.is_rank_named is named
    said = watcher.failed(1)
    assert said.is_of_rank is named
    words = written.decode().removeprefix("srun: ").removeprefix("error: ").strip()
    assert words in said.said or named


def test_the_node_that_ranks_cannot_be_started_on_is_read() -> None:
    launch = b"srun: error: Task launch for StepId=7.2 failed on node n3: Invalid job credential\n"
    watcher, _ = watched(b"srun: error: a word of srun's\n" + launch)
    assert watcher.failed(1).node == "n3"
    watcher, _ = watched(launch + b"srun: error: n0: task 1: Exited with exit code 5\n")
    assert watcher.failed().node == "n0"


@pytest.mark.parametrize(
    "line",
    [
        b"srun: error: \x1b[31mn1: task 0: Exited with exit code 7\n",
        b"srun: error: n1: task 0: Exited with exit code \x1b]0;title\x07\n",
        b"srun: error: a word\x1b[2J of srun's\n",
        b"srun: error: Unable to create step for job 4: \x1b[2J\n",
        b"srun: error: Task launch for StepId=7.2 failed on node \x1b[1mn3: Invalid job credential\n",
    ],
)
def test_what_a_rank_writes_for_terminals_enters_no_record(
    line: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    watcher, _ = watched(line)
    for said in (watcher.said, watcher.node, watcher.unstarted, watcher.failed(1).said):
        assert said.isprintable()
    assert capfdbinary.readouterr().err == line, "the user's own output is passed on as it is"


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_each_run_of_srun_that_was_recorded_is_told_apart(version: str) -> None:
    """Five sruns that failed by themselves, then three whose ranks did, as recorded one behind the other."""
    said = (DATA / version / "1-busy" / "srun-own.txt.err").read_bytes().splitlines(keepends=True)
    first = next(number for number, line in enumerate(said) if b": task" in line)
    own, _ = watched(b"".join(said[:first]))
    assert not own.is_rank_named
    ranks, _ = watched(b"".join(said[first:]))
    assert (ranks.is_rank_named, ranks.code, ranks.said) == (True, 5, "rank 1 on n1: Exited with exit code 5")


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
            from deeplink.scheduler.launch.srun import FailureWatcher
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
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "137\n"
