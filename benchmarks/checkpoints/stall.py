"""How long training stands still for a checkpoint: `save_state` beside a save that it waits for.

`python -m benchmarks.checkpoints.stall [--repeats N] [--mb N] [--folder F] [--json]` prints a table and writes
build/bench/checkpoints.json. Exit code 0 whether figures are reached or not.

Both sides take turns, in one process, on one folder, with the same state. The synchronous one is
`Checkpoints.save` with torch.save within, the way the training guide does it; and torch.save alone with an fsync,
for who would do without a manifest. Training steps (matrix products) run while a save goes on beside them: it is
told, too, how much slower they are meanwhile. A third side saves on a node's own disk first, from where it goes to
the shared folder and, between two real agents, to a partner's disk; all on this machine's one disk and cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.agents import agents
from benchmarks.program import hand_over, unwind_when_told
from benchmarks.rows import make_row
from deeplink.checkpoints import Checkpoints
from deeplink.core.publish import fsync_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.rows import Row

TENSOR_BYTES = 20 << 20
MOST_SHARE = 0.10


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Return float32 tensors of 20 MiB, so many megabytes in all."""
    count = max(1, (megabytes << 20) // TENSOR_BYTES)
    return {f"layer{number}.weight": torch.randn(TENSOR_BYTES // 4) for number in range(count)}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def step(matrix: torch.Tensor) -> None:
    """Do what stands for a training step: some 10 ms on one core."""
    for _ in range(4):
        matrix @ matrix


class Turns:
    """One turn after another in one folder.

    Args:
        folder: where to save.
        state: what is saved.
        env: of a rank whose node has a partner.
    """

    def __init__(self, folder: Path, state: dict[str, torch.Tensor], env: dict[str, str]) -> None:
        self._folder, self._state = folder, state
        self._checkpoints = Checkpoints(folder / "ours", keep=1)
        os.environ.update(env)
        self._with_partner = Checkpoints(folder / "theirs", local=folder / "disk", keep=1, lease_s=None)
        for name in env:
            del os.environ[name]
        self._with_partner.latest()
        self._number = 0
        self._matrix = torch.randn(384, 384)

    def asynchronous(self) -> tuple[float, float, float]:
        """Return the seconds of the stall, those until it was whole, and how much slower a step was meanwhile."""
        return self._beside(self._checkpoints)

    def partnered(self) -> tuple[float, float, float]:
        """Return the same of a save on this disk first, until it is shared and at the partner, too."""
        stall, whole, slower = self._beside(self._with_partner)
        found = list(self._folder.glob(f"n1/checkpoints/*/from-n0/step-{self._number:010d}.*"))
        if not found:
            raise RuntimeError("the partner has no copy")
        return stall, whole, slower

    def _beside(self, checkpoints: Checkpoints) -> tuple[float, float, float]:
        self._number += 1
        alone = statistics.median(timed(lambda: step(self._matrix)) for _ in range(50))
        began = time.monotonic()
        stall = timed(lambda: checkpoints.save_state({"model": self._state}, step=self._number))
        waiting = threading.Thread(target=checkpoints.wait)
        waiting.start()
        beside = []
        while waiting.is_alive():
            beside.append(timed(lambda: step(self._matrix)))
        waiting.join()
        return stall, time.monotonic() - began, statistics.mean(beside) / alone if beside else 1.0

    def synchronous(self) -> float:
        """Return the seconds of a save that is waited for."""
        self._number += 1

        def save() -> None:
            with self._checkpoints.save(step=self._number) as draft:
                torch.save({"model": self._state}, draft / "state.pt")

        return timed(save)

    def plain(self) -> float:
        """Return the seconds of torch.save and fsync alone."""
        path = self._folder / "plain.pt"

        def save() -> None:
            torch.save({"model": self._state}, path)
            fsync_path(path)

        return timed(save)


def measure(folder: Path, megabytes: int, repeats: int) -> list[Row]:
    """Return the rows."""
    stalls, wholes, slower, waited, plain = [], [], [], [], []
    copied = []
    with agents(folder, ["n0", "n1"]) as env:
        turns = Turns(folder, make_state(megabytes), env)
        first, _, _ = turns.asynchronous()  # takes its memory
        turns.partnered()
        for _ in range(repeats):
            waited.append(turns.synchronous())
            stall, whole, slow = turns.asynchronous()
            stalls.append(stall)
            wholes.append(whole)
            slower.append(slow)
            copied.append(turns.partnered())
            plain.append(turns.plain())
    state = f"{megabytes} MB state"
    of_ours = [stall / sync for stall, sync in zip(stalls, waited, strict=True)]
    of_plain = [stall / sync for stall, sync in zip(stalls, plain, strict=True)]
    return [
        make_row(f"{state}: stall beside a synchronous save", of_ours, at_most=MOST_SHARE),
        make_row(f"{state}: stall beside torch.save and fsync alone", of_plain),
        make_row(f"{state}: stall", stalls, "s"),
        make_row(f"{state}: the first stall of a process", [first], "s"),
        make_row(f"{state}: synchronous save", waited, "s"),
        make_row(f"{state}: torch.save and fsync alone", plain, "s"),
        make_row(f"{state}: asynchronous save, until it is whole", wholes, "s"),
        make_row(f"{state}: a training step while it is written", slower),
        make_row(
            f"{state}, with a partner: stall beside a synchronous save",
            [stall / sync for (stall, _, _), sync in zip(copied, waited, strict=True)],
            at_most=MOST_SHARE,
        ),
        make_row(f"{state}, with a partner: stall", [stall for stall, _, _ in copied], "s"),
        make_row(f"{state}, with a partner: until it is in all three places", [one for _, one, _ in copied], "s"),
        make_row(f"{state}, with a partner: a training step meanwhile", [slow for _, _, slow in copied]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--mb", type=int, default=500, metavar="N", help="size of the state in MiB")
    parser.add_argument("--folder", type=Path, help="where to save [default: a temporary one]")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="deeplink-stall-") as name:
        rows = measure(Path(name), asked.mb, asked.repeats)
    hand_over("checkpoints", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
