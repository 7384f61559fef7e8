"""The scripts of docs/laptop-to-cluster.md, run as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from PIL import Image

from deeplink.cache.packer import pack
from deeplink.checkpoints import Checkpoints
from deeplink.core.config import Config
from tests.deeplink.training.test_training_guide import Ranks

PAGE = Path(__file__).parents[3] / "docs" / "laptop-to-cluster.md"
PRELUDE = """
import io, numpy, torch
from PIL import Image

def decode(data):
    return torch.from_numpy(numpy.array(Image.open(io.BytesIO(data)))).float() / 255

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = []

def train_step(images, labels):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    steps.append(len(labels))

"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has packed 300 photos."""
    for number in range(300):
        folder = tmp_path / "photos" / "train" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number % 256).save(folder / f"{number}.png")
    config = Config(catalog=tmp_path / "c", store=tmp_path / "s", state=tmp_path / "st", node="n0", replicas=1)
    pack(str(tmp_path / "photos"), "photos", config=config)
    return {
        **os.environ,
        "DEEPLINK_CATALOG": str(config.catalog),
        "DEEPLINK_STORE": str(config.store),
        "DEEPLINK_NODE": "n0",
    }


def run(script: str, env: dict[str, str], folder: Path, world: int = 1, attempt: str = "7.0.0") -> str:
    path = folder / "train.py"
    path.write_text(script)
    ranks = Ranks(path, env, attempt, world)
    try:
        ranks.wait_until(lambda: all(process.poll() == 0 for process in ranks.processes), 300)
    finally:
        ranks.kill()
    return ranks.said()


@pytest.mark.slow
def test_the_pages_scripts_train_and_resume(env: dict[str, str], tmp_path: Path) -> None:
    plain, resuming, whole = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loop = "for images, labels in loader:\n    train_step(images, labels)\nprint(sum(steps))\n"
    assert run(PRELUDE + plain + loop, env, tmp_path) == "300\n"

    script = PRELUDE + resuming.replace("every=500", "every=2") + "print(sum(steps), sampler.epoch)\n"
    killed = script.replace(
        "    steps.append(len(labels))", "    steps.append(len(labels))\n    len(steps) == 7 and 1 / 0"
    )
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(killed, env, tmp_path)
    found = Checkpoints(tmp_path / "checkpoints", readonly=True).latest()
    assert found is not None
    left = 3 * 300 - found.meta["sampler"]["epoch"] * 300
    said = int(run(script, env, tmp_path, attempt="7.0.1").split()[0])
    assert left - 300 < said <= left
    again, epochs = map(int, run(script, env, tmp_path, attempt="7.0.2").split())
    assert again < 2 * 64  # no more than came after the last save
    assert epochs == 3

    (tmp_path / "ddp").mkdir()
    assert run(whole, env, tmp_path / "ddp", world=2).count("epoch ") == 3
