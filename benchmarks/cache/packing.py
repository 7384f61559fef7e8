"""Packing files of 4 KiB that are in memory, until all is on disk, beside all peers; and the space it takes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cache import memory
from benchmarks.cache.lab import in_turns, write_source
from benchmarks.rows import make_row

if TYPE_CHECKING:
    from benchmarks.cache.lab import Lab, Source, Turns
    from benchmarks.cache.players import Answer
    from benchmarks.rows import Row

SIZE = 4096
WHAT = "packing, 4 KiB, warm source"
OURS = "ours, batch"
_GOALS = {"flat mmap": 0.8, "MosaicML Streaming": 1.3}
_NAMES = {"flat mmap": "one flat file", "MosaicML Streaming": "MDSWriter", "litdata": "litdata optimize"}
_PACKERS = (
    "ours.Ours",
    "plain.FlatMap",
    "plain.Tar",
    "plain.Sqlite",
    "peers.HuggingFace",
    "peers.ArrayRecord",
    "peers.Mosaic",
    "peers.Litdata",
    "peers.WebDataset",
)


def measure(lab: Lab) -> list[Row]:
    """Return all rows about packing and space."""
    lab.say(f"packing: {lab.scale.packed} files of 4 KiB by {len(_PACKERS)} sides")
    source = write_source(lab.work / "packing", lab.scale.packed, SIZE)
    space: dict[str, float] = {}

    def turn(side: str, _way: str, _seed: int) -> Answer:
        return _packed(lab, source, side, space)

    turns = in_turns(lab, _PACKERS, WHAT, turn)
    shutil.rmtree(source.root)
    return _rows(turns, space)


def _packed(lab: Lab, source: Source, side: str, space: dict[str, float]) -> Answer:
    player, folder = lab.player(side), lab.work / "packed"
    try:
        found = player.ask("pack", source=str(source.root), packed=str(folder), ordered=False)
        space[player.name] = sum(_size(path) for path in memory.files_below(folder)) / source.payload
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return dataclasses.replace(found, samples=len(source.digests))


def _size(path: str) -> int:
    return Path(path).stat().st_size


def _rows(turns: Turns, space: dict[str, float]) -> list[Row]:
    rows = [
        make_row(f"{WHAT}: {_NAMES.get(name, name)}", turns.over(OURS, name), at_least=_GOALS.get(name))
        for name in turns.of
        if name != OURS
    ]
    rows += [make_row(f"{WHAT}, files per second: {_NAMES.get(n, n)}", turns.rates(n), "1/s") for n in turns.of]
    rows += [
        make_row(
            f"{WHAT}, CPU: {_NAMES.get(name, name)}", [a.cpu_s / (a.samples * SIZE / 1e9) for a in answers], "s/GB"
        )
        for name, answers in turns.of.items()
    ]
    for name, share in space.items():
        title = "shards and index" if name == OURS else _NAMES.get(name, name)
        rows.append(
            make_row(f"space, 4 KiB, over payload: {title}", [share], at_most=1.03 if name == OURS else None)
        )
    return rows
