"""Shuffled epochs through DataLoaders, without and with workers; at the end with JPEGs decoded."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from benchmarks.cache.lab import in_turns
from benchmarks.cache.local import FOUR, WrongBytesError, checked
from benchmarks.rows import make_row

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.cache.lab import Lab, Turns
    from benchmarks.cache.players import Answer
    from benchmarks.rows import Row

OURS, RAW, LITDATA, HF = "ours, batch", "raw files", "litdata", "HF datasets"
_OURS, _RAW = "ours.Ours", "plain.RawFiles"
_SIDES = (_OURS, _RAW, "peers.Litdata", "peers.HuggingFace")
_ITERATION, _NONE, _TWO, _AGAIN = "iteration", "0 workers", "2 workers", "0 workers, later epoch"
_ENTRIES = (
    *(f"{side}#{_NONE}" for side in _SIDES),
    *(f"{side}#{_TWO}" for side in _SIDES[:3]),
    f"{_OURS}#{_AGAIN}",
    f"{_RAW}#{_AGAIN}",
    f"peers.Litdata#{_AGAIN}",
    f"peers.Litdata#{_ITERATION}",
)
_JPEG_SIDE = 384
_NOISE = 72
"""Of 256: with quality 90 it makes JPEGs of some 76 KB of this size."""
_JPEGS_PER_MIB = 2


def measure(lab: Lab) -> list[Row]:
    """Return all rows about DataLoaders."""
    lab.say(f"DataLoader, 4 KiB: {len(lab.source(FOUR).digests)} files; every side packs them")
    lab.open_each(_SIDES, FOUR)
    lab.say("DataLoader, 4 KiB: shuffled epochs")
    turns = in_turns(lab, _ENTRIES, "DataLoader", partial(_passed, lab))
    lab.close_all()
    return [*_rows(turns), *_decoding(lab)]


def _passed(lab: Lab, side: str, way: str, seed: int) -> Answer:
    player = lab.player(side)
    if way == _ITERATION:
        return checked(lab, FOUR, seed, player.ask("epoch", seed=seed))
    workers = 2 if way == _TWO else 0
    # Workers take longer to start than an epoch of this benchmark does.
    before = 0 if way == _NONE else 1
    return checked(lab, FOUR, seed, player.ask("loader", seed=seed, workers=workers, decode=False, before=before))


def _rows(turns: Turns) -> list[Row]:
    def us(way: str) -> str:
        return f"{OURS}, {way}"

    what, rows = "shuffled epoch through DataLoader, 4 KiB", []
    ways = (_ITERATION, _NONE, _AGAIN)
    theirs = [name for name in (f"{LITDATA}, {way}" for way in ways) if name in turns.of]
    if theirs:
        best = f"litdata's fastest way ({turns.faster(*theirs)})"
        rows.append(
            make_row(f"{what}, 0 workers, later epochs: {best}", turns.over_best(us(_AGAIN), theirs), at_least=2)
        )
        rows.append(make_row(f"{what}, 0 workers, first epoch: {best}", turns.over_best(us(_NONE), theirs)))
    rows += [
        make_row(
            f"{what}, 0 workers, later epochs: raw files", turns.over(us(_AGAIN), f"{RAW}, {_AGAIN}"), at_least=4
        ),
        make_row(f"{what}, 0 workers, first epoch: raw files", turns.over(us(_NONE), f"{RAW}, {_NONE}")),
        make_row(
            f"{what}, 2 workers over 0 workers, later epochs", turns.over(us(_TWO), us(_AGAIN)), at_least=0.6
        ),
    ]
    others = (
        (_NONE, f"{HF}, {_NONE}"),
        (_TWO, f"{RAW}, {_TWO}"),
        (_TWO, f"{LITDATA}, {_TWO}"),
    )
    rows += [
        make_row(f"{what}: {other}", turns.over(us(way), other)) for way, other in others if other in turns.of
    ]
    if f"{RAW}, {_TWO}" in turns.of:
        rows.append(
            make_row(
                f"{what}, raw files, 2 workers over 0 workers, later epochs",
                turns.over(f"{RAW}, {_TWO}", f"{RAW}, {_AGAIN}"),
            )
        )
    rows += [make_row(f"{what}, samples per second: {name}", turns.rates(name), "1/s") for name in turns.of]
    return rows + [
        make_row(f"{what}, CPU: {name}", [a.cpu_s / (a.samples * FOUR / 1e9) for a in of], "s/GB")
        for name, of in turns.of.items()
        if _TWO not in name  # workers that go on count nowhere
    ]


def _decoding(lab: Lab) -> list[Row]:
    """Return the rows of end to end with decoding, where Pillow has most of the processor."""
    images = max(64, lab.scale.bytes // (1 << 20) * _JPEGS_PER_MIB)
    lab.say(f"DataLoader, JPEG: {images} images")
    source, packed = lab.work / "jpegs", lab.work / "jpegs-packed"
    length = _write_jpegs(source, images)
    lab.player(_OURS).ask("pack", source=str(source), packed=str(packed), ordered=True)
    for side in (_OURS, _RAW):
        lab.player(side).ask("open", source=str(source), packed=str(packed))
    digests: set[int] = set()

    def turn(side: str, way: str, seed: int) -> Answer:
        workers = 2 if way == _TWO else 0
        answer = lab.player(side).ask("loader", seed=seed, workers=workers, decode=True, before=1)
        digests.add(answer.digest)
        return answer

    turns = in_turns(lab, [f"{side}#{way}" for side in (_OURS, _RAW) for way in (_NONE, _TWO)], "JPEG", turn)
    lab.close_all()
    if len(digests) != 1:
        raise WrongBytesError(f"JPEGs came to {len(digests)} different sets of pixels")
    what = f"DataLoader end to end, JPEGs of {length / 1000:.0f} KB decoded"
    return [
        *(
            make_row(f"{what}, {way}: raw files", turns.over(f"{OURS}, {way}", f"{RAW}, {way}"))
            for way in (_NONE, _TWO)
        ),
        *(make_row(f"{what}, images per second: {name}", turns.rates(name), "1/s") for name in turns.of),
    ]


def _write_jpegs(root: Path, images: int) -> float:
    """Write images of gradients and noise, and return their mean length in bytes."""
    root.mkdir()
    draw = np.random.default_rng(3)
    slope = np.linspace(0, 255 - _NOISE, _JPEG_SIDE, dtype=np.float32)
    total = 0
    for number in range(images):
        noise = draw.integers(0, _NOISE, (_JPEG_SIDE, _JPEG_SIDE, 3), np.uint8)
        picture = (np.roll(slope, number)[:, None, None] * 0.5 + slope[None, :, None] * 0.5).astype(
            np.uint8
        ) + noise
        data = io.BytesIO()
        Image.fromarray(picture).save(data, "JPEG", quality=90)
        (root / f"{number:06d}.jpg").write_bytes(data.getvalue())
        total += len(data.getvalue())
    return total / images
