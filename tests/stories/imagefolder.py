"""A user's own loop, which knows nothing of DeepLink: a folder of images, read as torchvision's ImageFolder does.

python imagefolder.py FOLDER EPOCHS WORKERS
"""

import hashlib
import os
import sys
import time
from multiprocessing import Pool

from PIL import Image

STEP, STEP_S = 64, 0.25


def find_classes(folder: str) -> list[str]:
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not classes:
        raise FileNotFoundError(f"Couldn't find any class folder in {folder}.")
    return classes


def make_dataset(folder: str) -> list[tuple[str, int]]:
    found = []
    for number, name in enumerate(find_classes(folder)):
        target = os.path.join(folder, name)
        if not os.path.isdir(target):
            continue
        for root, _, names in sorted(os.walk(target, followlinks=True)):
            found += [
                (os.path.join(root, each), number) for each in sorted(names) if each.lower().endswith(".png")
            ]
    return found


def load(path: str) -> bytes:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB").tobytes()


if __name__ == "__main__":
    samples = make_dataset(sys.argv[1])
    with Pool(int(sys.argv[3]) or 1) as workers:
        for epoch in range(1, int(sys.argv[2]) + 1):
            digest = hashlib.sha256()
            for first in range(0, len(samples), STEP):
                paths = [path for path, _ in samples[first : first + STEP]]
                for pixels in map(load, paths) if sys.argv[3] == "0" else workers.map(load, paths):
                    digest.update(pixels)
                time.sleep(STEP_S)
            print(f"epoch {epoch}: {len(samples)} images, {digest.hexdigest()[:16]}", flush=True)
