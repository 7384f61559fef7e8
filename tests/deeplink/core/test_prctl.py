"""A process that is a subreaper, and one that dies with its parent."""

from __future__ import annotations

import signal
import subprocess
import sys

ORPHAN = """
import os, time
from deeplink.core.prctl import become_subreaper
become_subreaper()
if not os.fork():
    child = os.fork()  # an orphan, once its parent is gone
    time.sleep(0.1) if not child else None
    os._exit(3 if not child else 0)
print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))
"""
LEFT = """
import os, sys, time
from deeplink.core.prctl import die_with
parent, (read, write) = os.getpid(), os.pipe()
if not os.fork():
    die_with(parent if sys.argv[1] == "living" else 1 << 22)
    os.write(write, b"x")
    time.sleep(600)
os.close(write)
if sys.argv[1] == "living":
    os.read(read, 1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def said(program: str, *arguments: str) -> str:
    argv = [sys.executable, "-c", program, *arguments]
    # Its output ends with the last process that has it.
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_subreaper_is_the_parent_of_orphans() -> None:
    assert said(ORPHAN) == "[0, 3]\n"


def test_a_process_dies_with_its_parent_and_at_once_where_that_is_gone() -> None:
    assert not said(LEFT, "living")
    assert said(LEFT, "gone") == f"{-signal.SIGKILL}\n"
