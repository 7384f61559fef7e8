"""The warden with real processes: nothing below it gets away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deeplink.scheduler.testbed.processes import ProcessId, marked
from tests.waiting import LIMIT_S

# Leaves its session, its parent and its name behind, as daemons and slurmstepd do.
AWAY = "setsid sh -c 'sleep 120 & echo $! > {pid}; sleep 120' & wait"


def poll(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def warden(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    mark = f"DEEPLINK_TEST={tmp_path}"
    daemon = ["sh", "-c", AWAY.format(pid=tmp_path / "pid")]
    with subprocess.Popen(
        [sys.executable, "-m", "deeplink.scheduler.testbed.loopback", *daemon],
        stdin=subprocess.PIPE,
        env={**os.environ, "DEEPLINK_TEST": str(tmp_path)},
    ) as process:
        try:
            poll(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
            yield process, mark
        finally:
            for who in marked(mark):
                who.send(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["term", "eof", "other word"])
def test_everything_below_it_ends_with_it(tmp_path: Path, how: str) -> None:
    with warden(tmp_path) as (process, mark):
        assert process.stdin is not None
        if how == "term":
            process.stdin.write(b"stay\n")
            process.stdin.close()
            process.terminate()
        elif how == "eof":
            process.stdin.close()
        else:
            process.stdin.write(b"leave\n")
            process.stdin.close()
        assert process.wait(LIMIT_S) == 0
        assert marked(mark) == []


@pytest.mark.slow
def test_it_stays_after_the_word_and_starts_what_is_gone_again_on_sighup(tmp_path: Path) -> None:
    with warden(tmp_path) as (process, mark):
        assert process.stdin is not None
        process.stdin.write(b"stay\n")
        process.stdin.close()
        for who in marked(mark):
            if who.pid != process.pid:
                who.send(signal.SIGKILL)
        poll(lambda: len(marked(mark)) == 1)
        (tmp_path / "pid").unlink()
        process.send_signal(signal.SIGHUP)
        poll((tmp_path / "pid").exists)
        assert process.poll() is None
        assert ProcessId.of(process.pid) is not None
        process.terminate()
        assert process.wait(LIMIT_S) == 0
        assert marked(mark) == []
