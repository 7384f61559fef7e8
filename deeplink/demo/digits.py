"""scikit-learn's bundled handwritten digits, written out as the small image files that training starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.publish import published_folder

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress

TEST_EVERY = 5  # each fifth image is for testing: 1,437 to train on, 360 to test with


def write_digits(folder: Path, progress: Progress | None = None) -> int:
    """Leave 1,797 PNG files of 8 x 8 pixels in `folder/{train,test}/<digit>/<number>.png`; return how many.

    The folder appears whole or not at all; one that is there already is taken as it is.

    Raises:
        OSError: the files cannot be written.
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
