"""DataLoader workers die: torch ends the pass, and the next goes on exactly where the last step was finished."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from deeplink.cache.packer import pack
from tests.cache.agents import config_below, write_tree
from tests.faults.processes import BOUND_S, Lines, let_go, started, task_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("way", ["items", "packed"])
def test_a_dataloader_worker_is_killed(tmp_path: Path, files: dict[str, bytes], way: str) -> None:
    config = config_below(tmp_path)
    pack(str(write_tree(tmp_path / "source", files)), "digits", config=config)
    task = task_of(config, files, way=way, batch=8)
    log = tmp_path / "training.log"
    popen = started(["tests.faults.training", str(task.write(tmp_path / "task.json"))], log)
    try:
        lines = Lines(popen, log.read_text)
        said = lines.next()
        for death in range(3):
            while said["deaths"] < death or not said["position"] or len(said["workers"]) < 2:
                said = lines.next()
            os.kill(said["workers"][death % 2], signal.SIGKILL)
        while said["deaths"] < 3:
            said = lines.next()
        assert popen.stdin is not None
        popen.stdin.close()
        while "delivered" not in said:
            said = lines.next()
        assert popen.wait(BOUND_S) == 0, log.read_text()
    finally:
        let_go(popen)
    wanted = Counter(task.model.values())
    assert said["delivered"] == {digest: count * said["epochs"] for digest, count in wanted.items()}
