"""The file of a shard outlives what it was made with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

# The module that the file is closed with goes first.
KEPT_TO_THE_END = """
import os, pathlib, sys
import deeplink.cache.read.mapped as mapped
held = os.kept = mapped.ShardFile(pathlib.Path(sys.argv[1]), "shard", mapped=sys.argv[2] == "True")
held.read([0], [3], cold=False)
"""


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_is_open_as_the_interpreter_ends_goes_quietly(tmp_path: Path, *, mapped: bool) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"samples")
    argv = [sys.executable, "-c", KEPT_TO_THE_END, str(path), str(mapped)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
