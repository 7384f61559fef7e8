"""The script in docs/training.md, run as it stands there: killed in the middle, resumed on more ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from deeplink.cache.packer import pack
from deeplink.checkpoints import Checkpoints
from deeplink.core.config import Config
from tests.processes import free_ports
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable

GUIDE = Path(__file__).parents[3] / "docs" / "training.md"


class Ranks:
    """One attempt: as many processes of the script as there are ranks."""

    def __init__(self, script: Path, env: dict[str, str], attempt: str, world: int) -> None:
        env = {
            **env,
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "DEEPLINK_ATTEMPT": attempt,
            "OMP_NUM_THREADS": "1",
        }
        self.logs = [script.parent / f"{attempt}-{rank}.log" for rank in range(world)]
        self.processes = [
            self._started(script, log, {**env, "RANK": str(rank)}) for rank, log in enumerate(self.logs)
        ]

    @staticmethod
    def _started(script: Path, log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, str(script), "pictures"],
                cwd=script.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def wait_until(self, holds: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() in {None, 0} for process in self.processes), self.said()
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT_S)


@pytest.mark.slow
def test_the_guides_script_killed_and_resumed_on_more_ranks_feeds_every_sample_once(tmp_path: Path) -> None:
    for number in range(300):
        home = tmp_path / "tree" / "train" / str(number % 3)
        home.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number % 256).save(home / f"{number}.png")
    config = Config(catalog=tmp_path / "c", store=tmp_path / "s", state=tmp_path / "st", node="n0", replicas=1)
    pack(str(tmp_path / "tree"), "pictures", config=config)
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found
    script = tmp_path / "train.py"
    script.write_text(found[1])
    env = {
        **os.environ,
        "DEEPLINK_CATALOG": str(config.catalog),
        "DEEPLINK_STORE": str(config.store),
        "DEEPLINK_NODE": "n0",
    }
    first = Ranks(script, env, "7.0.0", 2)
    try:
        seen = Checkpoints(tmp_path / "checkpoints", readonly=True)
        first.wait_until(lambda: seen.latest() is not None, 90)
    finally:
        first.kill()
    before = seen.latest()
    assert before is not None
    second = Ranks(script, env, "7.0.1", 3)
    try:
        second.wait_until(lambda: all(process.poll() == 0 for process in second.processes), 120)
    finally:
        second.kill()
    assert second.said().count("every sample exactly once: True") == 3
    after = seen.latest()
    assert after is not None
    assert after.step > before.step
    assert str(after.attempt) == "7.0.1"
