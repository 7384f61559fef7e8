"""The demonstration as `make demo` runs it: a real Slurm, a node that loses its power, exactly-once delivery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S


@pytest.mark.cluster
@pytest.mark.parametrize(("backend", "said"), [("auto", "slurm"), ("loopback", "slurm-loopback")])
def test_the_story_ends_well_on_a_real_slurm(tmp_path: Path, backend: str, said: str) -> None:
    facts = tmp_path / "demo.json"
    argv = [sys.executable, "-m", "deeplink", "demo", "--name", f"demo-{os.getpid()}", "--facts", str(facts)]
    argv += ["--backend", backend]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3 * LIMIT_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(facts.read_text())
    assert found["backend"] == said
    assert found["digest_equal"]
    assert found["attempts"] == 2
    assert (found["ring_crossings"], found["ring_crossings_stock"]) == (2, 4)
    assert found["accuracy"] > 0.95
    assert found["detect_s"] is not None
    assert found["resume_s"] is not None
