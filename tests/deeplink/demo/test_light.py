"""The demo's training without torch: two ranks in numpy, resumed, every sample exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.data import DeliveryDigest
from deeplink.demo.story import ExpectedDelivery, lesson, write_digits
from tests.waiting import LIMIT_S

NO_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_module("deeplink.demo.train_light", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_learn_without_torch_and_go_on_where_they_were_saved(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    plan = lesson(tmp_path / "digits", 2)
    env = {**os.environ, "HOME": str(tmp_path), "DEEPLINK_STORE": str(tmp_path / "store")}
    env |= {"DEEPLINK_CATALOG": str(tmp_path / "catalog")}
    python = [sys.executable, "-m", "deeplink"]

    def run(*argv: str) -> None:
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=3 * LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run(*python, "pack", "digits", "digits")
    options = ["digits", "--size", "8", "--batch-size", "16", "--checkpoints", "saved", "--result", "result.json"]
    accuracy = 0.0
    for epochs in (2, 5):
        train = [sys.executable, "-c", NO_TORCH, *options, "--epochs", str(epochs)]
        run(*python, "run", "--local", "2", "--", *train)
        result = json.loads((tmp_path / "result.json").read_text())
        delivered = DeliveryDigest()
        delivered.load_state_dict(result["digest"])
        expected = ExpectedDelivery.of(tmp_path / "catalog", plan)
        assert delivered.equal(DeliveryDigest.expected(expected, epochs))
        assert result["steps"] == epochs * 45
        accuracy = result["accuracy"]
    assert accuracy > 0.85
