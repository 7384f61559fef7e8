from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.command import (
    CommandError,
    CommandMissingError,
    CommandTimeoutError,
    Finished,
    answer_of,
    end_unfinished,
    finish,
    run,
    run_passing_on,
    spawn,
)
from tests.waiting import LIMIT_S


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_run_returns_what_was_written() -> None:
    assert run(python("print('hello')")) == "hello\n"


def test_a_failure_carries_the_code_and_what_was_said() -> None:
    with pytest.raises(CommandError) as caught:
        run(python("import sys; sys.exit('no such partition')"))
    assert (caught.value.code, caught.value.stderr.strip()) == (1, "no such partition")


def test_a_silence_that_exits_0_is_no_empty_answer() -> None:
    silent = Finished(("scontrol",), 0, "", "slurm_load_topo error: Socket timed out on send/recv operation\n")
    with pytest.raises(CommandError, match="Socket timed out"):
        answer_of(silent)
    none = Finished(("scontrol",), 0, "", "scontrol: error: No topology information available\n")
    assert answer_of(none) == ""
    assert answer_of(Finished(("x",), 0, "rows\n", "slurm_load_jobs error: one of two\n")) == "rows\n"


def test_a_missing_program_is_named() -> None:
    with pytest.raises(CommandMissingError, match="no-such-program"):
        run(["no-such-program"])
    with pytest.raises(CommandMissingError, match="no-such-program"):
        spawn(["no-such-program"])


def test_a_hanging_command_is_stopped_with_its_children() -> None:
    hangs = (
        "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    # The grandchild holds the output open: only killing the whole group lets the call return.
    with pytest.raises(CommandTimeoutError) as caught:
        run(python(hangs), timeout_s=0.5)
    assert caught.value.timeout_s == 0.5


def test_finish_feeds_stdin_and_tells_the_code() -> None:
    done = finish(python("import sys; print(sys.stdin.read().upper()); sys.exit(3)"), stdin="a")
    assert (done.code, done.stdout) == (3, "A\n")


def test_foreign_bytes_come_out_as_text_that_can_be_sent_and_shown() -> None:
    writes = (
        "import sys; out = sys.stdin.buffer.read(); sys.stdout.buffer.write(out); sys.stderr.buffer.write(out)"
    )
    done = finish(python(writes), stdin="caf\udce9 \x1b[2J\u202e\tüber\r\nend\n")
    assert done.stdout == done.stderr == "caf\\xe9 \\x1b[2J\\u202e\tüber\nend\n"


def test_who_ends_without_its_threads_leaves_no_command_behind(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", list[Finished]()
    hangs = python(f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)")
    waiting = threading.Thread(target=lambda: ended.append(finish(hangs, timeout_s=50)), daemon=True)
    waiting.start()
    end = time.monotonic() + LIMIT_S
    while not started.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    end_unfinished()
    waiting.join(LIMIT_S)
    assert [done.code for done in ended] == [-9]
    end_unfinished()  # nobody is left


ENV = dict(os.environ)


@pytest.fixture(params=["terminal", "pipe"])
def channel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pipe":
        monkeypatch.setattr(command, "_channel", os.pipe)


@pytest.mark.usefixtures("channel")
def test_what_it_writes_and_its_exit_code_come_back() -> None:
    said: list[bytes] = []
    code = run_passing_on(
        ["sh", "-c", "printf 'a\\nb\\377'; head -c 200000 /dev/zero; exit 7"], env=ENV, write=said.append
    )
    assert (code, b"".join(said)) == (7, b"a\nb\xff" + bytes(200_000))


def test_a_line_comes_while_the_command_goes_on(tmp_path: Path) -> None:
    """A program that asks whether it writes to a terminal, as the C library does, holds nothing back."""
    go = tmp_path / "go"
    waiting = f"import os, time\nprint('job 7')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    said: list[bytes] = []

    def write(data: bytes) -> None:
        said.append(data)
        go.touch()  # only now may it end

    env = {key: value for key, value in ENV.items() if key != "PYTHONUNBUFFERED"}
    assert run_passing_on([sys.executable, "-c", waiting], env=env, write=write) == 0
    assert said == [b"job 7\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_command_and_ends_us_alike(number: signal.Signals) -> None:
    code = (
        "import os, sys\n"
        "from deeplink.scheduler.slurm.command import end_as, run_passing_on\n"
        "def write(data):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "argv = ['sh', '-c', 'echo up; exec sleep 50']\n"
        "sys.exit(end_as(run_passing_on(argv, env=dict(os.environ), write=write)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == -number, done.stderr


def test_the_commands_own_answer_to_a_signal_counts() -> None:
    script = "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done"
    before = signal.getsignal(signal.SIGTERM)
    assert run_passing_on(["sh", "-c", script], env=ENV, write=lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_such_program_to_pass_on_to() -> None:
    with pytest.raises(CommandMissingError):
        run_passing_on(["no-such-program-here"], env=ENV, write=lambda _: None)
