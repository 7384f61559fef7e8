"""A training with DataLoader workers that goes on from its last step when a worker dies.

python -m tests.faults.training TASK

TASK as `tests.faults.reading` takes it; its way is "items" or "packed". Each step says who the workers are. A byte
on standard input holds it until the next one; the end of standard input ends it once the epoch is over. Its last
word is what was delivered: xxh3-64 -> how often.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash
from torch.utils.data import DataLoader

import deeplink
from deeplink.data import ResumableSampler
from deeplink.data.shared_batches import loader
from tests.faults.reading import Task, held_on_demand

WORKERS = 2
HANGS_S = 15.0
"""Who does not get on for so long says where it is."""


class Training:
    """Epoch after epoch; `saved` is of the last finished step, as a checkpoint would have it."""

    def __init__(self, task: Task) -> None:
        self._is_packed = task.way == "packed"
        self._dataset = deeplink.Dataset(task.name, labels=False, packed=self._is_packed, config=task.settings())
        self._batch = task.batch
        self.saved: tuple[dict[str, Any], Counter[str]] = ({}, Counter())
        self.deaths = 0

    def _loader(self, sampler: ResumableSampler) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
        if self._is_packed:
            return loader(self._dataset, sampler, **options)
        return DataLoader(self._dataset, batch_sampler=sampler, collate_fn=list, **options)

    def run(self) -> None:
        """Train until told to end."""
        told = False
        while not told:
            try:
                told = self._until_death()
            except RuntimeError as problem:
                if "DataLoader worker" not in str(problem):
                    raise
                self.deaths += 1

    def _until_death(self) -> bool:
        state, delivered = self.saved
        sampler = ResumableSampler(self._dataset, batch_size=self._batch)
        if state:
            sampler.load_state_dict(state)
        batches = self._loader(sampler)
        told = False
        while not told:
            for batch in batches:
                delivered = delivered + self._counted(batch)
                sampler.finished()
                self.saved = (sampler.state_dict(), delivered)
                self._say(sampler)
                told = told or not held_on_demand()
        return True

    def _counted(self, batch: Iterable[Any]) -> Counter[str]:
        samples = [sample.numpy() for sample in batch] if self._is_packed else batch
        return Counter(f"{xxhash.xxh3_64_intdigest(sample):016x}" for sample in samples)

    def _say(self, sampler: ResumableSampler) -> None:
        faulthandler.dump_traceback_later(HANGS_S)
        workers = [process.pid for process in multiprocessing.active_children()]
        said = {"epoch": sampler.epoch, "position": sampler.position, "deaths": self.deaths, "workers": workers}
        print(json.dumps(said), flush=True)  # noqa: T201 - it is what this program is for


def main(argv: list[str]) -> int:
    """Train until told to end."""
    training = Training(Task.read(Path(argv[1])))
    training.run()
    state, delivered = training.saved
    print(json.dumps({"epochs": state["epoch"], "delivered": delivered}), flush=True)  # noqa: T201 - the same
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
