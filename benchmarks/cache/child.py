"""One side's process: takes a request per line of JSON, does it, answers with a line of JSON.

python -m benchmarks.cache.child ours.Ours
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.cache import order
from benchmarks.cache.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cache.sides.base import Side


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in both)


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def _measured(work: Callable[[], tuple[int, int]]) -> dict[str, Any]:
    gc.collect()
    io, cpu_s, began = _io(), _cpu_s(), time.perf_counter()
    samples, digest = work()
    seconds = time.perf_counter() - began
    after = _io()
    return {
        "seconds": seconds,
        "cpu_s": _cpu_s() - cpu_s,
        "samples": samples,
        "digest": digest,
        "by_calls": after["rchar"] - io["rchar"],
        "from_disk": after["read_bytes"] - io["read_bytes"],
    }


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


class Child:
    """Answers requests about one side."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked; return what was measured.

        Raises:
            AttributeError: there is no such request.
        """
        do: Callable[..., dict[str, Any]] = getattr(self, f"_do_{request.pop('do')}")
        return do(**request)

    def _do_pack(self, source: str, packed: str, *, ordered: bool) -> dict[str, Any]:
        def work() -> tuple[int, int]:
            self._side.pack(Path(source), Path(packed), ordered=ordered)
            _sync(Path(packed))
            return 0, 0

        return _measured(work)

    def _do_open(self, source: str, packed: str) -> dict[str, Any]:
        self._side.open(Path(source), Path(packed))
        return {}

    def _do_close(self) -> dict[str, Any]:
        self._side.close()
        gc.collect()
        return {}

    def _do_random(self, seed: int, samples: int, count: int, *, touch: bool, passes: int = 1) -> dict[str, Any]:
        wanted = order.batches(seed, samples, count) * passes
        use = order.consume if touch else order.locate
        return _measured(lambda: use(self._side.read(wanted)))

    def _do_paced(
        self, seed: int, samples: int, batch: int, step_s: float = 0.0, passes: int = 1
    ) -> dict[str, Any]:
        """Read all samples as training does: a step takes `step_s` once its batch is there."""
        rows = [row for part in order.batches(seed, samples, samples) for row in part]
        wanted = [rows[start : start + batch] for start in range(0, samples, batch)] * passes
        pace = Pace(self._side, step_s)
        before = self._side.from_source()
        found = _measured(lambda: order.consume(pace.read(wanted)))
        from_source = self._side.from_source() - before
        waited = {"longest_s": pace.longest_s, "failed": pace.failed, "why": pace.why}
        return {**found, **waited, "from_source": from_source}

    def _do_singles(self, seed: int, samples: int, count: int) -> dict[str, Any]:
        """Read samples one by one; the seconds are the median of one."""
        times = []
        for rows in ([row] for part in order.batches(seed, samples, count) for row in part):
            began = time.perf_counter()
            order.consume(self._side.read([rows]))
            times.append(time.perf_counter() - began)
        return {"seconds": statistics.median(times), "samples": 1}

    def _do_epoch(self, seed: int) -> dict[str, Any]:
        return _measured(lambda: order.consume(self._side.epoch(seed)))

    def _do_loader(self, seed: int, workers: int, *, decode: bool, before: int) -> dict[str, Any]:
        """Take all samples through the DataLoader; `before` passes of the same loader are not measured."""
        once = self._side.loader(seed, workers, decode=decode)
        for _ in range(before):
            order.consume(once())
        return _measured(lambda: order.consume(once()))


def side_named(name: str) -> Side:
    """Return a side by module and class, as in `ours.Ours`."""
    module, _, kind = name.partition(".")
    found: Side = getattr(importlib.import_module(f"benchmarks.cache.sides.{module}"), kind)()
    return found


def serve(side: Side, asked: TextIO, answers: TextIO) -> None:
    """Answer each line until there are no more; what goes wrong is an answer too."""
    child = Child(side)
    for line in asked:
        try:
            found = child.answer(json.loads(line))
        except Exception as problem:  # noqa: BLE001 - a peer may raise anything, and the others go on
            found = {"error": f"{type(problem).__name__}: {problem}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def main() -> None:
    """Serve on standard input and output; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(side_named(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
