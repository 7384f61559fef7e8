"""DataLoader workers die: torch ends the pass, and the next goes on exactly where the last step was finished."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from deeplink.cache.packer import pack
from tests.cache.agents import config_below, write_tree
from tests.faults.processes import Lines, let_go, started, task_of, tell
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow]


def killed_at_rest(popen: subprocess.Popen[bytes], lines: Lines, workers: Sequence[int], victim: int) -> None:
    """Kill a worker once all have read ahead as far as they may.

    torch tells the trainer of a death by SIGCHLD, at any moment. Where that error is lost, as one raised in a
    weakref's callback is, torch finds the death within 5 s, unless the worker died in the middle of a message
    longer than a pipe takes: then the read of its rest has no bound, not even by `DataLoader(timeout=...)`.
    At rest no message is half written.
    """
    tell(popen, b".")
    while "held" not in lines.next():
        pass
    used, before = [0], [1]
    while used != before:
        before = used
        time.sleep(0.1)
        used = [sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15])) for pid in workers]
    os.kill(victim, signal.SIGKILL)


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
            killed_at_rest(popen, lines, said["workers"], said["workers"][death % 2])
            said = lines.next()
        while said["deaths"] < 3:
            said = lines.next()
        assert popen.stdin is not None
        popen.stdin.close()
        while "delivered" not in said:
            said = lines.next()
        assert popen.wait(LIMIT_S) == 0, log.read_text()
    finally:
        let_go(popen)
    wanted = Counter(task.model.values())
    assert said["delivered"] == {digest: count * said["epochs"] for digest, count in wanted.items()}
