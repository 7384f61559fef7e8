"""The demonstration's training data and command, and what the index says was to be delivered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.catalog import Catalog
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import published_folder

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress

BIG = 20_000  # images; beyond it two epochs teach enough
LIGHT_EPOCHS = 4  # for one with torch: its steps take so little that a node would die after the last of them
TEST_EVERY = 5  # each fifth of scikit-learn's digits is for testing: 1,437 to train on, 360 to test with


def _unfit(folder: Path, problem: str) -> DeepLinkError:
    remedy = "Give a folder of image files as {train,test}/<class>/<file>, or <class>/<file>."
    return DeepLinkError(f"{folder}: {problem}", remedy=remedy, exit_code=2)


def has_torch() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training data, and for how long to train on it."""

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
    """Return how to train on a folder of images."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only the demo needs it

    if not source.is_dir():
        raise _unfit(source, "is no folder")
    split = (source / "train").is_dir()
    test_root = next((name for name in ("test", "val") if (source / name).is_dir()), "train") if split else ""
    root = source / "train" if split else source
    images = [path for path in root.rglob("*") if path.is_file() and path.parent != root]
    if not images:
        raise _unfit(source, "holds no <class>/<file>")
    known = Image.registered_extensions()
    for path in images:
        if path.suffix.lower() not in known:
            raise _unfit(source, f"{path.relative_to(source)} is no image")
    try:
        with Image.open(images[0]) as image:
            size = min(28, *image.size)
    except UnidentifiedImageError as problem:
        raise _unfit(source, f"{images[0].name} is no image") from problem
    epochs = 2 if len(images) > BIG else max(2, min(40, 24_000 // len(images)))
    epochs *= 1 if has_torch() else LIGHT_EPOCHS
    batch_size = 32 if len(images) > BIG else 16
    steps = epochs * -(-len(images) // (batch_size * ranks))
    total = sum(path.stat().st_size for path in images)
    train_root = "train" if split else ""
    name = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-") or "images"
    return Lesson(source, name, train_root, test_root, size, epochs, batch_size, steps, total)


@dataclass(frozen=True, slots=True)
class ExpectedDelivery:
    """The delivery that the index promises: row numbers (int64) and checksums (uint64), one per sample."""

    rows: np.ndarray
    checksums: np.ndarray

    @classmethod
    def of(cls, catalog: Path, plan: Lesson) -> ExpectedDelivery:
        """Return it for the part of the dataset that was trained on, from the index alone."""
        index = Catalog(catalog).open(plan.name)
        rows = index.rows_below(plan.train_root)
        return cls(np.arange(rows.start, rows.stop), np.asarray(index.checksums[rows.start : rows.stop]))


def write_digits(folder: Path, progress: Progress | None = None) -> int:
    """Write scikit-learn's digits, 1,797 PNG files of 8 x 8 pixels, to `folder/{train,test}/<digit>/<number>.png`.

    Returns how many. The folder appears whole or not at all; one that is there already is taken as it is.
    """
    if folder.exists():
        return sum(1 for _ in folder.rglob("*.png"))
    from PIL import Image  # noqa: PLC0415 - only the demo needs the imaging library and scikit-learn
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    # The data set stores 17 grey levels, 0 to 16; a PNG has 256.
    pixels = (digits.images * (255 / 16)).round().astype("uint8")
    task = progress.add_task("writing image files", total=len(pixels)) if progress else None
    with published_folder(folder) as draft:
        for number, (image, digit) in enumerate(zip(pixels, digits.target, strict=True)):
            split = "test" if number % TEST_EVERY == 0 else "train"
            home = draft / split / str(digit)
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(home / f"{number:04d}.png")
            if progress and task is not None:
                progress.advance(task)
    return len(pixels)
