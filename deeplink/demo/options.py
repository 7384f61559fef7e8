"""The command line of the demonstration's training scripts."""

from __future__ import annotations

import argparse
from pathlib import Path


def options(lr: float, about: str) -> argparse.Namespace:
    """Read the command line.

    Args:
        lr: the learning rate where none is given.
        about: what the script does, one sentence.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("dataset", help="name given to `deeplink pack`")
    parser.add_argument("--train-root", default="train")
    parser.add_argument("--test-root", default="test")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--size", type=int, default=28, help="pixels along an edge")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--result", type=Path, help="JSON file for accuracy and digests")
    return parser.parse_args()
