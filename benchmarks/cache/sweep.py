"""A source that is slow, and room for a part of the data: our store beside the kernel's own cache of raw files.

The source is a folder of small files on a disk that the kernel slows down for the process that reads (blkio or io
controller: a token bucket). The peer is the page cache, which is least recently used: raw files read under a
bound on memory of that part of the data. Ours is a store, in memory like the page cache, that holds as much in
shards and reads the rest from the source, whose pages are dropped before each epoch. Each epoch is an exact
shuffle of all samples, drawn again; batches are read ahead by one thread on both sides.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cache import memory
from benchmarks.cache.lab import Turns
from benchmarks.cache.limits import Limits
from benchmarks.cache.local import checked
from benchmarks.cache.players import Player, UnmeasuredError
from benchmarks.cache.sides.ours import NAME, config_in
from benchmarks.rows import make_row
from deeplink.cache.packer import pack
from deeplink.cache.store.store import Store

if TYPE_CHECKING:
    from benchmarks.cache.lab import Lab
    from benchmarks.cache.players import Answer
    from benchmarks.rows import Row

SIZE = 33_000
BATCH = 32
SHARES = (0.35, 0.5, 0.75)
RATE = 80 << 20
_PER_SHARD = 48
_SLACK = 8 << 20
"""Of memory, for batches on their way."""
_DEMAND = 1.6
"""Of what the source gives, that training would read: more than it gives, and with half of the data kept less."""
_OURS, _PAGES, _NONE = "ours", "page cache", "no cache"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One side of an experiment.

    Attributes:
        player: its process.
        dropped: what leaves memory before each epoch.
    """

    player: Player
    dropped: list[str]

    def epoch(self, lab: Lab, seed: int, step_s: float) -> Answer:
        """Read all samples once, in steps that take `step_s` each when all is there."""
        memory.evict(self.dropped)
        samples = len(lab.source(SIZE).digests)
        answer = self.player.ask("paced", seed=seed, samples=samples, batch=BATCH, step_s=step_s)
        return checked(lab, SIZE, seed, answer)


def measure(lab: Lab) -> list[Row]:
    """Return the rows of the sweep, and those of training against a throttled source.

    Raises:
        UnmeasuredError: there are no control groups to be had.
    """
    if not Path("/dev/shm").is_dir():  # noqa: S108 - it is memory that is wanted
        raise UnmeasuredError("no /dev/shm, in which the store would lie")
    source = lab.source(SIZE)
    lab.say(f"sweep: {len(source.digests)} files of 33 KB, {RATE >> 20} MiB/s from the source")
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="deeplink-bench-", dir="/dev/shm")))
        config = dataclasses.replace(config_in(folder / "all"), shard_bytes=_PER_SHARD * SIZE)
        pack(str(source.root), NAME, config=config)
        rows: list[Row] = []
        for share in SHARES:
            rows += _shared(lab, folder, share)
    return rows


def _kept(folder: Path, share: float) -> Path:
    """Return a copy of the packed form whose store holds that share of the shards."""
    part = folder / f"{share:.2f}"
    shutil.copytree(folder / "all", part, copy_function=shutil.copy2)
    store = Store(config_in(part).store)
    shards = store.ids()
    for shard in shards[round(share * len(shards)) :]:
        store.remove(shard)
    return part


def _shared(lab: Lab, folder: Path, share: float) -> list[Row]:
    source, part = lab.source(SIZE), _kept(folder, share)
    own = lab.work / "page-cache-source"  # its pages must stay when those of the others' source are dropped
    shutil.copytree(source.root, own, dirs_exist_ok=True)
    os.sync()
    files = memory.files_below(source.root)
    memory.evict([*files, *memory.files_below(own)])
    with ExitStack() as ends:
        readings: dict[str, Reading] = {}
        for name in (_OURS, _PAGES, _NONE):
            bound = int(share * source.payload) + _SLACK if name == _PAGES else None
            group = f"{lab.work.name}-{name.replace(' ', '-')}"
            limits = ends.enter_context(Limits(group, lab.work, read_bytes_s=RATE, memory=bound))
            where = "ours.Ours" if name == _OURS else "plain.RawFiles"
            player = ends.enter_context(Player(where, lab.work / f"sweep-{name}.log"))
            player.ask("open", source=str(own if name == _PAGES else source.root), packed=str(part))
            limits.hold(player.pid)
            readings[name] = Reading(player, [] if name == _PAGES else files)
        readings[_PAGES].epoch(lab, lab.seed(), 0)  # fills it
        rows = _swept(lab, readings, share)
        if share == SHARES[1]:
            rows += _trained(lab, readings, share)
    shutil.rmtree(part)
    return rows


def _epochs(lab: Lab, readings: dict[str, Reading], names: tuple[str, ...], step_s: float) -> Turns:
    """Return an epoch of each side per repeat."""
    turns = Turns()
    for _ in range(lab.scale.repeats):
        seed = lab.seed()
        for name in lab.order.sample(names, len(names)):
            turns.of.setdefault(name, []).append(readings[name].epoch(lab, seed, step_s))
    return turns


def _swept(lab: Lab, readings: dict[str, Reading], share: float) -> list[Row]:
    lab.say(f"sweep: room for {share:.0%} of the data")
    turns = _epochs(lab, readings, (_OURS, _PAGES), 0)
    what = f"room for {share:.0%} of the data, throttled source, exact shuffle"
    return [
        make_row(f"{what}: epochs, over the page cache's (LRU)", turns.over(_OURS, _PAGES)),
        make_row(f"{what}, samples not read from the source: ours", [_hit(a) for a in turns.of[_OURS]], "share"),
        make_row(
            f"{what}, samples not read from the source: page cache", [_hit(a) for a in turns.of[_PAGES]], "share"
        ),
    ]


def _hit(answer: Answer) -> float:
    pages = -(-SIZE // mmap.PAGESIZE)
    return 1 - answer.from_disk / (answer.samples * pages * mmap.PAGESIZE)


def _trained(lab: Lab, readings: dict[str, Reading], share: float) -> list[Row]:
    """Return which share of the speed without any reading is left, as NoPFS gives it."""
    step_s = BATCH * SIZE / (_DEMAND * RATE)
    lab.say(f"throttled source: training that wants {_DEMAND:g} times what it gives, room for {share:.0%}")
    turns = _epochs(lab, readings, (_OURS, _PAGES, _NONE), step_s)
    what = f"training against a source that gives 1/{_DEMAND:g} of what it wants, room for {share:.0%} of the data"
    return [
        make_row(
            f"{what}, of the speed without any reading: {name}",
            [-(-answer.samples // BATCH) * step_s / answer.seconds for answer in answers],
            "share",
        )
        for name, answers in turns.of.items()
    ]
