"""A training's reads in their own process: epoch after epoch at full speed, every byte compared with the model.

python -m tests.faults.reading TASK

TASK is a JSON file (`Task`). What has been read so far is said as one line of JSON a few times a second. A byte on
standard input holds the loop between two batches until the next one; the end of standard input ends it once the
epoch is over that was begun then.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from deeplink.cache.reader import Reader
from deeplink.core.config import Config
from tests.faults import slow_source

SAY_S = 0.05
MOST_KEPT = 5
"""Failures told in full; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to read, and what it must be.

    Attributes:
        name: the dataset.
        config: settings that differ from the defaults.
        model: key -> xxh3-64 of its bytes, as 16 hexadecimal digits; all of the dataset.
        way: "batch" (arenas) or "views" (of mappings).
        batch: samples at a time.
    """

    name: str
    config: dict[str, Any]
    model: dict[str, str]
    way: str = "batch"
    batch: int = 32

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(dataclasses.asdict(self), default=str), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def settings(self) -> Config:
        """Return the configuration; texts become paths where a path belongs."""
        kinds = {found.name: str(found.type) for found in dataclasses.fields(Config)}
        given: dict[str, Any] = {
            name: Path(value) if "Path" in kinds[name] else value for name, value in self.config.items()
        }
        return dataclasses.replace(Config(), **given)


@dataclass
class Tally:
    """What has been read.

    Attributes:
        samples: delivered.
        epochs: read to their end.
        wrong: keys of samples whose bytes are not the model's.
        failed: reads that raised, as text.
        stall_s: the longest that the loop waited for a batch since it was last said.
        longest_s: the same, since the first batch.
        stats: what the reader says of itself.
    """

    samples: int = 0
    epochs: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stall_s: float = 0.0
    longest_s: float = 0.0
    stats: dict[str, int] = field(default_factory=dict)


class Loop:
    """Reads every row once an epoch, in a new order each time."""

    def __init__(self, reader: Reader, task: Task) -> None:
        self._reader, self._task = reader, task
        self._take: Callable[[Sequence[int]], Sequence[memoryview]] = (
            reader.views if task.way == "views" else reader.read
        )
        keys = list(reader.index.keys(range(len(reader))))
        if sorted(keys) != sorted(task.model):
            raise SystemExit("the dataset's keys are not the model's")
        self._keys = keys
        self._wanted = [int(task.model[key], 16) for key in keys]
        self.tally = Tally()

    def epoch(self, number: int) -> Iterator[None]:
        """Read every row; yields after each batch."""
        rows = list(range(len(self._keys)))
        random.Random(number).shuffle(rows)  # noqa: S311 - an order, no secret
        for start in range(0, len(rows), self._task.batch):
            self._batch(rows[start : start + self._task.batch])
            yield
        self.tally.epochs += 1

    def _batch(self, rows: Sequence[int]) -> None:
        tally, began = self.tally, time.monotonic()
        try:
            found = self._take(rows)
        except Exception as problem:
            if len(tally.failed) < MOST_KEPT:
                logging.getLogger(__name__).exception("a read failed")
            tally.failed.append(f"{type(problem).__name__}: {problem}")
            return
        waited = time.monotonic() - began
        tally.stall_s, tally.longest_s = max(tally.stall_s, waited), max(tally.longest_s, waited)
        for row, sample in zip(rows, found, strict=True):
            if xxhash.xxh3_64_intdigest(sample) != self._wanted[row]:
                tally.wrong.append(self._keys[row])
        tally.samples += len(rows)

    def say(self) -> None:
        """Write one line about what was read so far."""
        tally = self.tally
        tally.stats = dataclasses.asdict(self._reader.stats())
        kept = dataclasses.replace(tally, failed=tally.failed[:MOST_KEPT], wrong=tally.wrong[:MOST_KEPT])
        said = {**dataclasses.asdict(kept), "failures": len(tally.failed) + len(tally.wrong)}
        print(json.dumps(said), flush=True)  # noqa: T201 - it is what this program is for
        tally.stall_s = 0.0


def main(argv: list[str]) -> int:
    """Read until told to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    slow_source.register()
    task = Task.read(Path(argv[1]))
    with Reader.open(task.name, config=task.settings()) as reader:
        loop = Loop(reader, task)
        said, number, told = 0.0, 0, False
        while not told:
            for _ in loop.epoch(number):
                if time.monotonic() - said > SAY_S:
                    loop.say()
                    said = time.monotonic()
                told = told or not held_on_demand()
            number += 1
        loop.say()
    return 0


def held_on_demand() -> bool:
    """Wait where we are told to; False once we are told to end."""
    if not select.select([sys.stdin.fileno()], [], [], 0)[0]:
        return True
    if not os.read(sys.stdin.fileno(), 1):
        return False
    print(json.dumps({"held": True}), flush=True)  # noqa: T201 - the same
    return bool(os.read(sys.stdin.fileno(), 1))


def digests(files: dict[str, bytes]) -> dict[str, str]:
    """Return the model of a task: key -> xxh3-64 of its bytes."""
    return {key: f"{xxhash.xxh3_64_intdigest(data):016x}" for key, data in files.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
