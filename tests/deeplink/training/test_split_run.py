"""A real run of two ranks with two DataLoader workers each: where their time goes is in the job's own journal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.core import process_metrics as names
from deeplink.scheduler.jobs.job_folder import read_folder
from deeplink.scheduler.jobs.measured import measured
from deeplink.scheduler.journal.journal import Journal
from tests.deeplink.data.packed_things import packed_below
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow]
STEPS = 400


def test_the_split_of_two_ranks_with_two_workers_each(tmp_path: Path) -> None:
    config = packed_below(tmp_path)
    script = Path(__file__).with_name("split_rank.py")
    argv = [sys.executable, "-m", "deeplink", "run", "--local", "1", "--nproc-per-node", "2", "--"]
    argv += [sys.executable, str(script), "even", str(STEPS), "1"]
    env = {
        "DEEPLINK_CATALOG": str(config.catalog),
        "DEEPLINK_STORE": str(config.store),
        "DEEPLINK_STATE": str(tmp_path / "own"),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        argv,
        check=False,
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "own" / "jobs").iterdir()
    job = int(folder.name)
    left = read_folder(folder, job)
    newest = left.points[-1].metrics
    assert newest[names.STEPS] >= STEPS - 30, "the last report is one of the last steps"
    assert newest[names.LOCAL_SAMPLES] >= 0.9 * STEPS * 16, "what workers read is counted"
    assert newest[names.LOCAL_BYTES] == pytest.approx(100 * newest[names.LOCAL_SAMPLES]), "100 bytes each"
    with Journal(folder / "journal.sqlite", read_only=True) as journal:
        made = measured(journal.points(job), journal.rank_times(job))
    assert made.binds is not None
    assert made.binds.cause == "others", made.binds
    assert made.binds.shares["checkpoint"] > 0
    assert made.binds.slowest is not None, "400 steps of 30 ms take over ten seconds"
    assert (made.binds.slowest.rank, made.binds.slowest.factor > 1.5) == (1, True), made.binds
    assert "rank 1" in made.binds.text
    spans = [row for row in made.rows if row.span_s > 0.3]
    assert spans
    for row in spans:  # a report is sent a moment after it is made, and its counters are of that moment
        assert sum(row.parts_s.values()) == pytest.approx(row.span_s, abs=0.15), row
    assert sum(row.parts_s["checkpoint"] for row in made.rows) == pytest.approx(0.2, abs=0.1)
    assert newest[names.LOADED_SAMPLES] == pytest.approx(16 * newest[names.STEPS], rel=0.05)
    assert all(row.samples_per_s for row in spans)
