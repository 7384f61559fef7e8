"""What the demonstration trains on, for how long, and what the index says was to be delivered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.catalog import Catalog
from deeplink.demo.errors import DemoDataError

if TYPE_CHECKING:
    from pathlib import Path

BIG = 20_000  # images; beyond it two epochs teach enough


def has_torch() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is trained on, and for how long."""

    source: Path
    name: str
    train_root: str
    test_root: str
    size: int
    epochs: int
    batch_size: int
    steps: int
    bytes: int

    def command(self) -> list[str]:
        """Return the training command, to be run in the user's home."""
        script = "deeplink.demo.train" if has_torch() else "deeplink.demo.train_light"
        argv = ["python", "-m", script, self.name, "--train-root", self.train_root]
        argv += ["--test-root", self.test_root, "--epochs", str(self.epochs), "--size", str(self.size)]
        argv += ["--batch-size", str(self.batch_size), "--checkpoint-every", str(max(10, self.steps // 30))]
        return [*argv, "--checkpoints", "checkpoints", "--result", "result.json"]


def lesson(source: Path, ranks: int) -> Lesson:
    """Return how to train on a folder of images.

    Raises:
        DemoDataError: it holds nothing to train on.
    """
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only the demo needs it

    if not source.is_dir():
        raise DemoDataError(str(source), "is no folder")
    split = (source / "train").is_dir()
    test_root = next((name for name in ("test", "val") if (source / name).is_dir()), "train") if split else ""
    root = source / "train" if split else source
    images = [path for path in root.rglob("*") if path.is_file() and path.parent != root]
    if not images:
        raise DemoDataError(str(source), "holds no <class>/<file>")
    known = Image.registered_extensions()
    for path in images:
        if path.suffix.lower() not in known:
            raise DemoDataError(str(source), f"{path.relative_to(source)} is no image")
    try:
        with Image.open(images[0]) as image:
            size = min(28, *image.size)
    except UnidentifiedImageError as problem:
        raise DemoDataError(str(source), f"{images[0].name} is no image") from problem
    epochs = 2 if len(images) > BIG else max(2, min(40, 60_000 // len(images)))
    batch_size = 32 if len(images) > BIG else 16
    steps = epochs * -(-len(images) // (batch_size * ranks))
    total = sum(path.stat().st_size for path in images)
    train_root = "train" if split else ""
    name = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-") or "images"
    return Lesson(source, name, train_root, test_root, size, epochs, batch_size, steps, total)


@dataclass(frozen=True, slots=True)
class ExpectedDelivery:
    """What the index says was to be delivered: row numbers (int64) and checksums (uint64), one per sample."""

    rows: np.ndarray
    checksums: np.ndarray

    @classmethod
    def of(cls, catalog: Path, plan: Lesson) -> ExpectedDelivery:
        """Return it for the part of the dataset that was trained on, from the index alone."""
        index = Catalog(catalog).open(plan.name)
        rows = index.rows_below(plan.train_root)
        return cls(np.arange(rows.start, rows.stop), np.asarray(index.checksums[rows.start : rows.stop]))
