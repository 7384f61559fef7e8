"""The reference says what the code says."""

from __future__ import annotations

import subprocess
import sys

from tests.house import ROOT
from tests.reference import commands, errors
from tests.waiting import LIMIT_S


def test_the_page_is_what_the_code_says() -> None:
    argv = [sys.executable, "-m", "tests.reference", "--check"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_and_error_is_found() -> None:
    assert {"deeplink sbatch", "deeplink topology check"} <= {name for name, _ in commands()}
    found = {name: code for name, code, _ in errors()}
    assert (found["ConfigError"], found["FencedError"], found["DeepLinkError"]) == (2, 77, 1)
