from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.command import (
    CommandError,
    CommandMissingError,
    CommandTimeoutError,
    Finished,
    answer_of,
    end_unfinished,
    finish,
    run,
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
