"""What a benchmark's rank says of itself."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.waiting import LIMIT_S

SAY = "from benchmarks.watchdog.rank import process_unix; print(process_unix())"


def test_a_rank_knows_when_its_process_was_started() -> None:
    before = time.time()
    said = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    after = time.time()
    assert before - 0.05 <= float(said.stdout) <= after
