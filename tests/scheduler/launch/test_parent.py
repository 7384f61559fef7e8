"""The process that holds a launcher's place: exit codes, signals, deaths, what is left at the end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deeplink.scheduler.launch import parent
from deeplink.scheduler.launch.launcher_role import RoleClaims, launcher_on, run_of
from tests.waiting import LIMIT_S, until

PREAMBLE = """
import os, signal, subprocess, sys, time
from collections import deque
from pathlib import Path
from deeplink.scheduler.launch.launcher_process import ParentLink

folder, code = Path(sys.argv[1]), 3
link = ParentLink.of_this_process(os.environ).greeted()
signals = deque()
link.forward(signals)

def note(line):
    with (folder / "notes").open("a") as file:
        file.write(f"{line}\\n")

def await_(found):
    while not found():
        time.sleep(0.01)

note(f"launcher {os.getpid()} {os.getppid()} {link.secret} {link.run} {sys.argv[2:]}")
"""


class Running:
    """A program that becomes a launcher and its parent."""

    def __init__(self, folder: Path, body: str, **options: object) -> None:
        self.folder = folder
        program = folder / "program.py"
        program.write_text(PREAMBLE + body)
        argv = [sys.executable, str(program), str(folder), "--option", "a b"]
        self.process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload] # options of it
            argv, stderr=subprocess.PIPE, text=True, **{"start_new_session": True, **options}
        )

    def notes(self) -> list[list[str]]:
        path = self.folder / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def noted(self, word: str, count: int = 1) -> list[str]:
        """Wait for the `count`-th note that begins with a word, and return it."""

        def found() -> list[list[str]]:
            return [words for words in self.notes() if words[0] == word]

        until(lambda: len(found()) >= count, LIMIT_S, lambda: str(self.notes()))
        return found()[count - 1]

    def launcher(self, count: int = 1) -> int:
        return int(self.noted("launcher", count)[1])

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors


def test_the_launcher_is_a_child_and_its_exit_code_the_parents(tmp_path: Path) -> None:
    running = Running(tmp_path, "sys.exit(code)")
    assert running.end() == (3, "")
    assert int(running.noted("launcher")[2]) == running.process.pid
    assert running.launcher() != running.process.pid


def test_a_parent_is_small(tmp_path: Path) -> None:
    running = Running(tmp_path, "time.sleep(600)")
    running.launcher()
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    scores = [
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (running.process.pid, running.launcher())
    ]
    os.kill(running.process.pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(running.launcher(), signal.SIGKILL)
    running.end()
    assert kib < 20 << 10, "the launcher itself has five times as much"
    assert scores[1] > scores[0] or scores[0] == 1000


def test_a_launcher_that_dies_is_followed_by_another_with_all_it_needs(tmp_path: Path) -> None:
    body = """
if link.died is None:
    child = subprocess.Popen(["sh", "-c", f"while [ ! -e {folder}/go ]; do sleep 0.05; done; exit 5"],
                             start_new_session=True)
    note(f"child {child.pid}")
    os.kill(os.getpid(), signal.SIGKILL)
notes = [line.split() for line in (folder / "notes").read_text().splitlines()]
child = next(int(words[1]) for words in notes if words[0] == "child")
assert link.end_of(child) is None
(folder / "go").touch()
await_(lambda: link.end_of(child) is not None)
note(f"ended {link.end_of(child)} {int(link.died)} {time.monotonic() - link.died_at:.1f}")
sys.exit(code)
"""
    running = Running(tmp_path, body)
    code, errors = running.end()
    assert code == 3, errors
    assert "the launcher was ended by signal 9; it is started again" in errors
    before, after = running.noted("launcher"), running.noted("launcher", 2)
    assert before[2:] == after[2:], "the same parent, secret, run and options"
    assert running.noted("ended")[1:3] == ["5", "9"]


def test_a_signal_counts_once_whoever_else_gets_it(tmp_path: Path) -> None:
    body = """
note("ready")
await_(lambda: signal.SIGTERM in signals)
time.sleep(0.5)
note("signals " + " ".join(str(int(number)) for number in signals))
sys.exit(code)
"""
    running = Running(tmp_path, body)
    running.noted("ready")
    os.killpg(running.process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    os.killpg(running.process.pid, signal.SIGTERM)
    assert running.end()[0] == 3
    assert running.noted("signals")[1:] == [str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))]


def test_ctrl_c_on_a_terminal_reaches_the_launcher_once(tmp_path: Path) -> None:
    body = """
note("ready")
await_(lambda: signals)
time.sleep(0.5)
note("signals " + " ".join(str(int(number)) for number in signals))
sys.exit(code)
"""
    ours, theirs = pty.openpty()
    running = Running(tmp_path, body, stdin=theirs, preexec_fn=_take_terminal)
    try:
        running.noted("ready")
        os.write(ours, b"\x03")
        assert running.end()[0] == 3
    finally:
        os.close(ours)
        os.close(theirs)
    assert running.noted("signals")[1:] == [str(int(signal.SIGINT))]


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_told_to_end_before_it_can_pass_that_on_a_launcher_ends(tmp_path: Path) -> None:
    body = """
link._is_forwarded = False
note("ready")
time.sleep(600)
"""
    running = Running(tmp_path, body)
    running.noted("ready")
    running.process.terminate()
    assert running.end()[0] == 128 + signal.SIGTERM


def test_launchers_that_die_again_and_again_are_followed_by_a_last_one(tmp_path: Path) -> None:
    body = """
note(f"last {link.is_last}")
if link.is_last:
    sys.exit(137)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    running = Running(tmp_path, body)
    code, errors = running.end()
    assert code == 137
    assert "5 times in 10 minutes: the run ends" in errors
    assert [words[1] for words in running.notes() if words[0] == "last"] == ["False"] * 5 + ["True"]


def test_what_is_left_at_the_end_is_ended_and_what_was_there_before_is_not(tmp_path: Path) -> None:
    body = """
if link.died is None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note(f"child {child.pid}")
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(code)
"""
    program = tmp_path / "program.py"
    program.write_text(PREAMBLE + body)
    script = f"sleep 30 >/dev/null 2>&1 & echo $! > {tmp_path}/other; exec {sys.executable} {program} {tmp_path}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 3
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    (child,) = [int(words[1]) for words in notes if words[0] == "child"]
    assert not Path(f"/proc/{child}").exists()
    other = int((tmp_path / "other").read_text())
    assert Path(f"/proc/{other}").exists()
    os.kill(other, signal.SIGKILL)


def test_a_launcher_hears_of_its_parents_death_and_then_of_signals_itself(tmp_path: Path) -> None:
    body = """
note("ready")
await_(lambda: link.gone_s() is not None)
note("gone")
await_(lambda: link._late)
note(f"none {len(signals)}")
link.heed()
note("signals " + " ".join(str(int(number)) for number in signals))
"""
    running = Running(tmp_path, body)
    running.noted("ready")
    running.process.kill()
    running.noted("gone")
    os.kill(running.launcher(), signal.SIGTERM)
    assert running.noted("none")[1] == "0"
    assert running.noted("signals")[1:] == [str(int(signal.SIGTERM))]
    running.end()


@pytest.mark.parametrize("said", ["", "1 5", "x"])
def test_a_link_of_a_launcher_above_is_not_taken(said: str, tmp_path: Path) -> None:
    running = Running(tmp_path, "sys.exit(code)", env={**os.environ, "DEEPLINK_PARENT": said})
    assert running.end()[0] == 3


def test_without_the_runs_secret_nothing_is_followed() -> None:
    argv = [sys.executable, "-I", "-S", parent.__file__, "0", "1", "0.0", "/bin/echo", "started"]
    ended = subprocess.run(argv, check=False, input="", capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no secret" in ended.stderr


@pytest.mark.parametrize("by", ["n2", launcher_on("n1")])
def test_elsewhere_one_that_came_late_holds_no_place(by: str, tmp_path: Path) -> None:
    assert RoleClaims(tmp_path, run_of("the-secret")).claim(2, by)
    body = """
from pathlib import Path; import os, sys
from deeplink.scheduler.launch.launcher_process import ParentLink
from deeplink.scheduler.launch.launcher_role import RoleClaims
link = ParentLink.of_this_process(os.environ).greeted()
print(link.given_up(RoleClaims(Path(sys.argv[1]), link.run), "n1"), link.term)
"""
    module = "deeplink.scheduler.launch.launcher_process"
    argv = [sys.executable, "-m", module, "1", "0.0", sys.executable, "-c", body, str(tmp_path)]
    ended = subprocess.run(
        argv, check=False, input="the-secret\n", capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.stdout == ("0 1\n" if by == "n2" else "None 2\n"), ended.stderr
