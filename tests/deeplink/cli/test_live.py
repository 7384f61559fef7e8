"""`status --watch` and `top` on a terminal: repainted in place, heeding keys, leaving it as it was."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock
from tests.scheduler.jobs.left import launched
from tests.scheduler.jobs.programs import TOPOLOGY, Programs, job, nodes
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deeplink", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
            start_new_session=True,
        )
        os.close(slave)
        self.said = ""

    def until(self, text: str, bound_s: float = LIMIT_S) -> str:
        """Read until a text comes; return what was said from before it."""
        end = time.monotonic() + bound_s
        while not re.search(text, self.said):
            assert time.monotonic() < end, self.said
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        assert re.search(text, self.said), self.said
        said, self.said = self.said, ""
        return said

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def ended(self) -> int:
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self.master)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    slurm = Programs(tmp_path / "slurm")
    facts = {"scontrol show node": nodes(["n0", "n1", "n2"], "ALLOCATED"), "scontrol show topology": TOPOLOGY}
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    slurm.say(jobs=[job(7, UserName=user)], **facts)
    launched(tmp_path / "state", 7, SystemClock().unix())
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DEEPLINK", "NO_COLOR"))
    }
    own = {"PATH": f"{slurm.bin}:{os.environ['PATH']}", "DEEPLINK_STATE": str(tmp_path / "state")}
    return {**kept, **own, "DEEPLINK_CONFIG": os.devnull, "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def started() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


def test_a_watched_job_is_repainted_in_place_and_ctrl_c_leaves_its_last_state(
    env: dict[str, str], started: list[Terminal]
) -> None:
    terminal = Terminal(["status", "7", "--watch=0.5"], env)
    started.append(terminal)
    first = terminal.until(r"incident")
    assert "\x1b[?1049h" in first  # the alternate screen
    assert "\x1b[32m" in first  # colours
    again = terminal.until(r"incident")
    assert "\x1b[2J" not in again  # never cleared
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.ended() == 130
    assert "\x1b[?1049l" in terminal.said
    assert "\x1b[?25h" in terminal.said  # the cursor is back
    assert "job 7" in terminal.said.rpartition("\x1b[?1049l")[2]


def test_a_slurm_that_hangs_does_not_hold_the_screen(
    env: dict[str, str], started: list[Terminal], tmp_path: Path
) -> None:
    terminal = Terminal(["status", "7", "--watch=0.5"], env)
    started.append(terminal)
    terminal.until(r"incident")
    slurm = Programs.__new__(Programs)
    slurm.folder, slurm.said = tmp_path / "slurm", {"slow": {"squeue": 60.0}}
    slurm.say()
    terminal.until(r"no answer of Slurm or of the storage for [1-9]")
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.ended() == 130


def test_no_color_is_heeded(env: dict[str, str], started: list[Terminal]) -> None:
    terminal = Terminal(["status", "7", "--watch=0.5"], {**env, "NO_COLOR": "1"})
    started.append(terminal)
    said = terminal.until(r"incident")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", said)
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.ended() == 130


def test_top_heeds_keys_and_q_ends_it(env: dict[str, str], started: list[Terminal]) -> None:
    terminal = Terminal(["top", "--interval", "30"], env)
    started.append(terminal)
    terminal.until(r"by job")
    terminal.press("r")
    terminal.until(r"by rate")
    terminal.press("rx")
    terminal.until(r"by rate \(turned\)")
    terminal.press("q")
    assert terminal.ended() == 0
    assert "\x1b[?1049l" in terminal.said
