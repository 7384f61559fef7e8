from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
DRIVERS = Path(sys.prefix) / "s3"


@pytest.mark.slow
def test_s3_and_the_web_are_sources_and_homes_like_any_other(tmp_path: Path) -> None:
    # In a process of its own: what S3's driver needs is not of the versions that the rest of the tests have.
    assert DRIVERS.is_dir(), f"{DRIVERS} is missing: `make test` installs it"
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.source.on_s3", str(tmp_path)],
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(DRIVERS)},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
