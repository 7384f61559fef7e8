"""The demonstration without Slurm: real agents, real torch DDP, a node's processes really killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S


@pytest.mark.slow
def test_the_story_ends_well_under_the_local_launcher(tmp_path: Path) -> None:
    facts = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "deeplink", "demo", "--backend", "local", "--facts", str(facts)],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(facts.read_text())
    assert found["backend"] == "local"
    assert found["digest_equal"]
    assert found["attempts"] == 2
    assert found["accuracy"] > 0.95
    assert found["files"] == 1797
