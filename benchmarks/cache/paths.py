"""What `deeplink run --paths` costs a call, on paths of other folders and on those that it serves.

python -m benchmarks.cache.paths

Nanoseconds of this process on a CPU, warm: what other processes do counts less so.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import deeplink.paths
from benchmarks.rows import machine
from deeplink.cache.packer import pack
from deeplink.core.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLS, _REPEATS, _FILES = 5_000, 9, 256
_BYTES = 4096


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - as scripts do
        return file.read()


def _ns(call: Callable[[str], object], paths: list[str]) -> float:
    began = time.process_time_ns()
    for number in range(_CALLS):
        call(paths[number % len(paths)])
    return (time.process_time_ns() - began) / _CALLS


def main() -> None:
    """Print a line for each kind of call: the least of several turns, without served paths and with them."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        config = Config(catalog=base / "catalog", store=base / "store", node="here")
        for name in ("packed", "other"):
            (base / name).mkdir()
            for number in range(_FILES):
                (base / name / f"{number:05}").write_bytes(os.urandom(_BYTES))
        pack(str(base / "packed"), "packed", config=config)
        rows = {
            f"{what}, {name} folder": (call, [str(base / name / f"{number:05}") for number in range(_FILES)])
            for name in ("other", "packed")
            for what, call in (("os.stat", os.stat), ("open, read, close", _read))
        }
        taken: dict[str, tuple[list[float], list[float]]] = {row: ([], []) for row in rows}
        for _ in range(_REPEATS):
            for row, (call, paths) in rows.items():
                taken[row][0].append(_ns(call, paths))
            deeplink.paths.install(config=config)
            for row, (call, paths) in rows.items():
                taken[row][1].append(_ns(os.stat if row.startswith("os.stat") else call, paths))
            deeplink.paths.uninstall()
    sys.stdout.write(f"{machine()}\n{'':34}{'files, ns':>12}{'--paths, ns':>14}{'more, ns':>12}\n")
    for row, (without, within) in taken.items():
        least, ours = min(without), min(within)
        sys.stdout.write(f"{row:34}{least:>12,.0f}{ours:>14,.0f}{ours - least:>12,.0f}\n")


if __name__ == "__main__":
    main()
