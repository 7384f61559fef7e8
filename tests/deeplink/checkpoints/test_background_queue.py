"""Work beside the training loop: the newest goes first, and a process ends though it hangs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from deeplink.checkpoints.background import Background, BackgroundQueue
from tests.waiting import LIMIT_S

HANGS = """
import sys, threading
from deeplink.checkpoints import background
background.EXIT_S = 0.5
line = background.BackgroundQueue("copying", lambda name: threading.Event().wait())
line.offer("step-1")
print("ends", flush=True)
"""

LATE = """
import threading, time
from deeplink.checkpoints import background
done = []
line = background.BackgroundQueue("copying", lambda name: (time.sleep(0.2), print("done", name, flush=True)))
line.begin()  # as `save_state` does, in the main thread

def saving():
    threading.main_thread().join()  # the process ends; this thread is waited for
    line.offer("step-2")

threading.Thread(target=saving).start()
"""


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.slow
def test_a_process_ends_though_a_copy_hangs() -> None:
    done = ran(HANGS)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
    assert "left behind" in done.stderr


@pytest.mark.slow
def test_a_save_that_ends_with_the_process_is_copied_still() -> None:
    done = ran(LATE)
    assert (done.returncode, done.stdout) == (0, "done step-2\n"), done.stderr


def no_more_threads(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_save_without_a_thread_fails_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    background, worked = Background("saving"), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError, match="new thread"):
            background.start(lambda: worked.append("first"))
    background.start(lambda: worked.append("second"))
    assert background.wait(LIMIT_S)
    assert worked == ["second"]


def test_a_copy_without_a_thread_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    line = BackgroundQueue("copying", lambda _name: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        line.offer("step-1")
    assert line.is_done(0)
    with pytest.raises(RuntimeError, match="new thread"):
        line.raise_failure()
    line.offer("step-2")
    assert line.is_done(LIMIT_S)
    line.close()


def test_what_waits_gives_way_and_what_fails_is_told_once() -> None:
    opened, worked = threading.Event(), list[str]()

    def work(name: str) -> None:
        assert opened.wait(LIMIT_S)
        worked.append(name)
        if name == "b":
            raise OSError(5, "I/O")

    line = BackgroundQueue("working", work)
    line.offer("a")
    while line.current != "a":
        pass
    assert not line.is_done(0)
    for name in "xyb":
        line.offer(name)
    opened.set()
    assert line.is_done(LIMIT_S)
    assert worked == ["a", "b"]
    with pytest.raises(OSError, match="I/O"):
        line.raise_failure()
    line.raise_failure()
    line.close()
    line.offer("c")
    assert line.is_done(LIMIT_S)
    assert worked == ["a", "b", "c"]
    line.close()
