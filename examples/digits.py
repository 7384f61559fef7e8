"""What the examples train on: small pictures of ten classes, made of noise and a pattern, the same everywhere."""

from __future__ import annotations

import os
import sys

import numpy as np

CLASSES, PIXELS, COUNT = 10, 64, 640
STEPS, BATCH = 30, 32
"""Optimiser steps of a whole run, and samples of all ranks together in one."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return `COUNT` pictures, float32 of shape (COUNT, PIXELS), and their classes, int64."""
    draw = np.random.default_rng(0)
    patterns = draw.normal(size=(CLASSES, PIXELS))
    classes = draw.integers(CLASSES, size=COUNT)
    pictures = patterns[classes] + 0.5 * draw.normal(size=(COUNT, PIXELS))
    return pictures.astype(np.float32), classes


def share(step: int, rank: int, world: int) -> np.ndarray:
    """Return the rows of one rank in one step: of any number of ranks, all together see the same ones."""
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % COUNT
    return rows[rank::world]


def say(text: str) -> None:
    """Write one line of a rank's to the job's output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def introduce(framework: str, rank: int, world: int) -> None:
    """Say which rank the framework takes this process for, and which one DeepLink started it as."""
    node, order = os.environ.get("DEEPLINK_NODE", "-"), os.environ.get("RANK", "-")
    say(f"{framework}: rank {rank} of {world} on {node}, started as {order}")
