"""Random and shuffled reads of one process from its own disk, warm and cold, beside all peers."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from benchmarks.cache import memory
from benchmarks.cache.lab import SIDES, in_turns
from benchmarks.cache.order import batches, expected
from benchmarks.cache.players import UnmeasuredError
from benchmarks.rows import make_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.cache.lab import Lab, Turns
    from benchmarks.cache.players import Answer
    from benchmarks.rows import Row

FOUR = 4096
NAMES = {FOUR: "4 KiB", 33_000: "33 KB", 1024: "1 KiB", 110_000: "110 KB"}
OURS = ("ours, batch", "ours, views")
BLOCKS = "ours, blocks"
RAW, FLAT, AHEAD, LITDATA = "raw files", "flat mmap", "flat mmap with WILLNEED", "litdata"
_RAW = "plain.RawFiles"
_WARM = tuple(side for side in SIDES if side not in {"plain.FlatAhead", "peers.WebDataset"})
_COLD = tuple(side for side in SIDES if side not in {"plain.FlatMap", "peers.WebDataset"})
_EPOCH = tuple(side for side in SIDES if side != "plain.FlatAhead")
_WHOLE = (*_COLD[:2], "ours.OursBlocks", *_COLD[2:], "peers.WebDataset")
_COLD_EPOCHS = (FOUR, 33_000)
_PASSES = 3
_MOST_RESIDENT = 0.1
"""Of a side's pages: some are touched by opening it."""


class WrongBytesError(Exception):
    """A side did not read the bytes that were written."""


def measure(lab: Lab) -> list[Row]:
    """Return all rows about local reads."""
    rows: list[Row] = []
    for size in lab.scale.sizes:
        name = NAMES[size]
        lab.say(f"local, {name}: {len(lab.source(size).digests)} files; every side packs them")
        for side in SIDES:
            _ready(lab, side, size)
        rows += _warm(lab, size, name) + _epoch(lab, size, name) + _cold(lab, size, name)
        if size in _COLD_EPOCHS:
            rows += _cold_epoch(lab, size, name)
        lab.close_all()
        if size != FOUR:  # which other subjects use
            lab.forget(size)
    return rows


def _ready(lab: Lab, side: str, size: int) -> None:
    try:
        if lab.has(side):
            lab.kept(side, size)
    except UnmeasuredError as problem:
        lab.drop(side, "reads", problem, for_good=True)


def checked(lab: Lab, size: int, seed: int, answer: Answer) -> Answer:
    """Return the answer of a side that read the first samples of an order.

    Raises:
        WrongBytesError: they were other bytes.
    """
    digests = lab.source(size).digests
    rows = chain.from_iterable(batches(seed, len(digests), answer.samples))
    if expected(digests, rows) != answer.digest:
        raise WrongBytesError(f"{answer.samples} samples of {size} bytes came to another digest than they have")
    return answer


def _touch(lab: Lab, size: int, side: str, _: str, seed: int) -> Answer:
    samples = len(lab.source(size).digests)
    count = lab.count(side, samples)
    answer = lab.player(side).ask("random", seed=seed, samples=samples, count=count, touch=True)
    return checked(lab, size, seed, answer)


def _first_touch(lab: Lab, size: int, side: str, way: str, seed: int) -> Answer:
    lab.open(side, size)
    return _touch(lab, size, side, way, seed)


def _locate(lab: Lab, size: int, side: str, _: str, seed: int) -> Answer:
    samples = len(lab.source(size).digests)
    count = lab.count(side, samples)
    answer = lab.player(side).ask("random", seed=seed, samples=samples, count=count, touch=False, passes=_PASSES)
    if answer.digest != answer.samples * size:
        raise WrongBytesError(f"{answer.samples} samples of {size} bytes came to {answer.digest} bytes")
    return answer


def _whole(lab: Lab, size: int, side: str, _: str, seed: int) -> Answer:
    answer = lab.player(side).ask("epoch", seed=seed)
    return checked(lab, size, seed, answer)


def cold_turn(lab: Lab, size: int, side: str, way: str, seed: int) -> Answer:
    """Return the answer of a side that reads some samples, of whose files nothing is in memory.

    Args and errors: as `_opened_cold`.
    """
    _opened_cold(lab, size, side, way)
    samples = len(lab.source(size).digests)
    count = min(lab.scale.cold, lab.count(side, samples))
    answer = lab.player(side).ask("random", seed=seed, samples=samples, count=count, touch=True)
    return checked(lab, size, seed, answer)


def _cold_whole(lab: Lab, size: int, side: str, way: str, seed: int) -> Answer:
    _opened_cold(lab, size, side, way)
    return _whole(lab, size, side, way, seed)


def _opened_cold(lab: Lab, size: int, side: str, way: str) -> None:
    """Have a side open its files again, with nothing of them in memory.

    Args:
        lab: where it is measured.
        size: of the samples.
        side: who reads.
        way: `names in memory`: of raw files names and inodes stay there.

    Raises:
        UnmeasuredError: its files stay in memory whatever we do.
    """
    files = lab.files_of(side, size)
    lab.close_all()
    memory.evict(files)
    player = lab.player(side)
    player.ask("open", source=str(lab.source(size).root), packed=str(lab.kept(side, size)))
    memory.evict(files)  # what opening it read ahead
    share = memory.resident(files)
    if share > _MOST_RESIDENT:
        raise UnmeasuredError(f"{share:.0%} of its files stay in memory")
    if side == _RAW and not way:
        memory.forget_names()


def _warm(lab: Lab, size: int, name: str) -> list[Row]:
    lab.say(f"local, {name}: warm random reads")
    first = in_turns(lab, _WARM, f"warm, {name}", partial(_first_touch, lab, size))
    again = in_turns(lab, [*_WARM[:2], _RAW, "plain.FlatMap"], f"warm again, {name}", partial(_touch, lab, size))
    views = in_turns(lab, _WARM, f"views, {name}", partial(_locate, lab, size))
    what = f"local warm random, {name}"
    four = size == FOUR
    rows = [
        *_against(first, f"{what}, consumed and verified at first touch", {RAW: 4, FLAT: 0.7} if four else {}),
        *_against_best(first, f"{what}, consumed and verified at first touch", 3 if four else None),
        *_against(again, f"{what}, consumed, verified before", {}),
        *_against(views, f"{what}, views", {RAW: 10, FLAT: 0.7} if four else {}, ours=OURS[1], only=(RAW, FLAT)),
        *_against_best(views, f"{what}, views", 3 if four else None, ours=OURS[1]),
        *_limit(first, f"{what}, consumed", FLAT),
    ]
    return rows + _costs(first, what, size)


def _epoch(lab: Lab, size: int, name: str) -> list[Row]:
    lab.say(f"local, {name}: a shuffled epoch, warm")
    lab.open_each(_EPOCH, size)
    turns = in_turns(lab, _EPOCH, f"epoch, {name}", partial(_whole, lab, size))
    return _against(turns, f"shuffled epoch, {name}, warm, each by its own iteration", {})


def _cold(lab: Lab, size: int, name: str) -> list[Row]:
    lab.say(f"local, {name}: cold random reads")
    turns = in_turns(lab, [*_COLD, f"{_RAW}#names in memory"], f"cold, {name}", partial(cold_turn, lab, size))
    what = f"local cold random batches of 256, {name}"
    goals: dict[str, float] = {FOUR: {RAW: 8, AHEAD: 0.9}, 33_000: {RAW: 2, AHEAD: 0.9}}.get(size, {})
    return [
        *_against(turns, what, goals),
        *_against_best(turns, what, None),
        *_limit(turns, what, AHEAD),
        *_costs(turns, what, size),
    ]


def _limit(turns: Turns, what: str, flat: str) -> list[Row]:
    """Return how many times faster than others a flat file is: with it alone, what could be had."""
    peers = _peers(turns)
    rows = [make_row(f"{what}, the limit: {flat} over {RAW}", turns.over(flat, RAW))]
    if peers:
        best = turns.faster(*peers)
        rows.append(
            make_row(f"{what}, the limit: {flat} over the best peer ({best})", turns.over_best(flat, peers))
        )
    return rows


def _peers(turns: Turns) -> list[str]:
    return [name for name in turns.of if name in turns.listed]


def _cold_epoch(lab: Lab, size: int, name: str) -> list[Row]:
    lab.say(f"local, {name}: a shuffled epoch, cold")
    turns = in_turns(lab, _WHOLE, f"cold epoch, {name}", partial(_cold_whole, lab, size))
    what = f"shuffled epoch, {name}, cold, each by its own iteration"
    return [
        *_against(turns, what, {}, ours=BLOCKS),
        *_against(turns, f"{what}, exact shuffle", {}, only=(RAW, FLAT, AHEAD)),
        *_costs(turns, what, size),
    ]


def _against(
    turns: Turns,
    what: str,
    goals: dict[str, float],
    *,
    ours: str | None = None,
    only: Sequence[str] | None = None,
) -> list[Row]:
    """Return a row for each other side: how many times faster we are."""
    us = ours or turns.faster(*OURS)
    others = [name for name in turns.of if not name.startswith("ours") and (only is None or name in only)]
    return [
        make_row(f"{what} ({us}): {other}", turns.over(us, other), at_least=goals.get(other)) for other in others
    ]


def _against_best(turns: Turns, what: str, goal: float | None, *, ours: str | None = None) -> list[Row]:
    """Return a row for the best of the peers that the issue lists."""
    us, peers = ours or turns.faster(*OURS), _peers(turns)
    if not peers:
        return []
    return [
        make_row(
            f"{what} ({us}): the best peer ({turns.faster(*peers)})", turns.over_best(us, peers), at_least=goal
        )
    ]


def _costs(turns: Turns, what: str, size: int) -> list[Row]:
    """Return what each side costs: samples/s, CPU s per GB, bytes by read calls and from disk over the payload."""
    kinds: dict[str, tuple[str, Callable[[Answer], float]]] = {
        "samples per second": ("1/s", lambda answer: answer.rate),
        "CPU": ("s/GB", lambda answer: answer.cpu_s / (answer.samples * size / 1e9)),
        "bytes by read calls over payload": ("B/B", lambda answer: answer.by_calls / (answer.samples * size)),
        "bytes from disk over payload": ("B/B", lambda answer: answer.from_disk / (answer.samples * size)),
    }
    return [
        make_row(f"{what}, {kind}: {name}", [of(answer) for answer in answers], unit)
        for kind, (unit, of) in kinds.items()
        for name, answers in turns.of.items()
    ]
