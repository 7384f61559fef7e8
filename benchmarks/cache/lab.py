"""What all subjects share: small files, what the sides packed of them, the sides' processes, and turns."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from benchmarks.cache import memory
from benchmarks.cache.child import side_named
from benchmarks.cache.players import Answer, Player, UnmeasuredError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path
    from types import TracebackType

PER_FOLDER = 1000
SIDES = (
    "ours.Ours",
    "ours.OursViews",
    "plain.RawFiles",
    "plain.FlatMap",
    "plain.FlatAhead",
    "plain.Sqlite",
    "peers.HuggingFace",
    "peers.HuggingFaceByHand",
    "peers.ArrayRecord",
    "peers.Mosaic",
    "peers.Litdata",
    "peers.WebDataset",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        bytes: of each set of small files, about.
        most_files: in a set.
        sizes: bytes of a file in each set that is read locally.
        repeats: of each figure.
        cold: samples read cold in a repeat.
        turn_s: about how long a slow side may take in a repeat; it reads fewer samples then.
        packed: files of 4 KiB that are packed.
        index: samples of the large index.
    """

    bytes: int = 96 << 20
    most_files: int = 20_000
    sizes: tuple[int, ...] = (4096, 33_000, 1024, 110_000)
    repeats: int = 7
    cold: int = 4096
    turn_s: float = 0.6
    packed: int = 20_000
    index: int = 10_000_000


FULL = Scale()
QUICK = Scale(
    bytes=48 << 20,
    most_files=8000,
    sizes=(4096, 33_000),
    repeats=3,
    cold=2048,
    turn_s=0.3,
    packed=5000,
    index=1_000_000,
)
TINY = Scale(
    bytes=1 << 20, most_files=300, sizes=(4096,), repeats=2, cold=64, turn_s=0.1, packed=300, index=10_000
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder of small files.

    Attributes:
        root: the folder.
        size: bytes of each.
        digests: xxh3-64 of each, by row.
    """

    root: Path
    size: int
    digests: Sequence[int]

    @property
    def payload(self) -> int:
        """Bytes of all files."""
        return self.size * len(self.digests)


@dataclass(slots=True)
class Turns:
    """Answers of each side, by name, one per repeat; and which of them are peers that the best is chosen from."""

    of: dict[str, list[Answer]] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)

    def leave_out(self, name: str) -> None:
        """Take back what a side did: it did not come to the end."""
        for other in [other for other in self.of if other.partition(",")[0] == name]:
            del self.of[other]
        self.listed = {other for other in self.listed if other in self.of}

    def rates(self, name: str) -> list[float]:
        """Samples per second of a side, run by run."""
        return [answer.rate for answer in self.of[name]]

    def over(self, ours: str, theirs: str) -> list[float]:
        """How many times faster `ours` is, run by run."""
        return [a / b for a, b in zip(self.rates(ours), self.rates(theirs), strict=True)]

    def over_best(self, ours: str, others: Sequence[str]) -> list[float]:
        """How many times faster `ours` is than whichever of the others was the fastest in that run."""
        best = [max(rates) for rates in zip(*(self.rates(name) for name in others), strict=True)]
        return [a / b for a, b in zip(self.rates(ours), best, strict=True)]

    def faster(self, *names: str) -> str:
        """Return which of the sides has the higher median."""
        return max(
            (name for name in names if name in self.of), key=lambda name: float(np.median(self.rates(name)))
        )


class Lab:
    """Everything that subjects measure with. Made once, ended once.

    Args:
        work: an own, empty folder, on the file system that is measured.
        scale: how much.
        say: gets lines about what goes on.
        without: sides that take no part.
    """

    def __init__(
        self, work: Path, scale: Scale, say: Callable[[str], None], without: Collection[str] = ()
    ) -> None:
        self.work, self.scale, self.say = work, scale, say
        self.order = random.Random(7)  # noqa: S311 - an order, no secret
        self.missing: dict[str, str] = {}
        self.dropped = set(without)
        self._players: dict[str, Player] = {}
        self._sources: dict[int, Source] = {}
        self._packed: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for player in self._players.values():
            player.end()

    def player(self, where: str) -> Player:
        """Return the side's process, started when first asked for.

        Raises:
            UnmeasuredError: it cannot be started.
        """
        if where not in self._players:
            self._players[where] = Player(where, self.work / f"{where}.log")
        return self._players[where]

    def has(self, where: str) -> bool:
        """Tell whether a side takes part so far."""
        return where not in self.dropped

    def open(self, where: str, size: int) -> None:
        """Have a side open what it packed of the files of a size, again."""
        player, packed = self.player(where), self.kept(where, size)
        player.ask("close")
        player.ask("open", source=str(self.source(size).root), packed=str(packed))

    def open_each(self, sides: Sequence[str], size: int) -> None:
        """Open each of the sides, again; those that cannot are dropped."""
        for side in sides:
            try:
                if self.has(side):
                    self.open(side, size)
            except UnmeasuredError as problem:
                self.drop(side, "opening", problem, for_good=True)

    def close_all(self) -> None:
        """Have every side let go of its files; those that hold on to them are started again."""
        for where, player in list(self._players.items()):
            if player.side.lingers:
                self._players.pop(where).end()
            else:
                player.ask("close")

    def drop(self, where: str, what: str, why: UnmeasuredError, *, for_good: bool = False) -> str:
        """Note that a side could not be measured, and end its process: nobody knows what state it is in.

        Args:
            where: the side.
            what: what it could not do.
            why: the reason.
            for_good: it takes part in nothing from now on.

        Returns:
            The side's name.
        """
        name = side_named(where).name
        if where in self._players:
            self._players.pop(where).end()
        if for_good:
            self.dropped.add(where)
        self.missing[f"{what}: {name}"] = str(why)
        self.say(f"not measured: {what}: {name}: {why}")
        return name

    def source(self, size: int) -> Source:
        """Return small files of a size, written when first asked for."""
        if size not in self._sources:
            files = min(self.scale.most_files, self.scale.bytes // size)
            self._sources[size] = write_source(self.work / f"source-{size}", files, size)
        return self._sources[size]

    def kept(self, where: str, size: int) -> Path:
        """Return where a side's packed form of the files of a size lies, packed when first asked for.

        Raises:
            UnmeasuredError: it cannot be packed.
        """
        player, source = self.player(where), self.source(size)
        folder = self.work / f"{player.side.kept}-{size}"
        if (player.side.kept, size) not in self._packed:
            shutil.rmtree(folder, ignore_errors=True)
            player.ask("pack", source=str(source.root), packed=str(folder), ordered=True)
            self._packed.add((player.side.kept, size))
        return folder

    def forget(self, size: int) -> None:
        """Remove the files of a size and all that was packed of them."""
        source = self._sources.pop(size, None)
        if source is not None:
            shutil.rmtree(source.root)
        for entry in [entry for entry in self._packed if entry[1] == size]:
            shutil.rmtree(self.work / f"{entry[0]}-{size}", ignore_errors=True)
            self._packed.remove(entry)

    def files_of(self, where: str, size: int) -> list[str]:
        """Return what a side reads from."""
        folder = self.source(size).root if where == "plain.RawFiles" else self.kept(where, size)
        return memory.files_below(folder)

    def count(self, where: str, most: int) -> int:
        """Return how many samples a side is to read in a repeat, in whole batches as far as may be."""
        bound = int(self.player(where).side.samples_per_s * self.scale.turn_s)
        return min(most, max(256, bound // 256 * 256))

    def seed(self) -> int:
        """Return a seed for one repeat."""
        return self.order.randrange(1 << 30)


def write_source(root: Path, files: int, size: int, seed: int = 0) -> Source:
    """Write small files of random bytes, so that nothing can be compressed."""
    draw = np.random.default_rng([size, seed])
    digests = []
    for row in range(files):
        folder = root / f"{row // PER_FOLDER:04d}"
        if row % PER_FOLDER == 0:
            folder.mkdir(parents=True)
        data = draw.bytes(size)
        (folder / f"{row:07d}.bin").write_bytes(data)
        digests.append(xxhash.xxh3_64_intdigest(data))
    os.sync()  # what is not on disk cannot leave memory
    return Source(root=root, size=size, digests=digests)


def in_turns(lab: Lab, entries: Sequence[str], what: str, turn: Callable[[str, str, int], Answer]) -> Turns:
    """Have each entry do its work once per repeat, in an order drawn again for each.

    Args:
        lab: where.
        entries: a side, or a side's way of doing it: `peers.Litdata#iteration`. Those dropped do not take part.
        what: what they do, for the line that says why one did not.
        turn: one entry's turn, given the side, its way and the seed of the repeat.
    """
    turns, part = Turns(), [entry for entry in entries if lab.has(entry.partition("#")[0])]
    for _ in range(lab.scale.repeats):
        seed = lab.seed()
        for entry in lab.order.sample(part, len(part)):
            side, _, way = entry.partition("#")
            if entry not in part:  # dropped in this very repeat
                continue
            try:
                player = lab.player(side)
                name = f"{player.name}, {way}" if way else player.name
                answer = turn(side, way, seed)
            except UnmeasuredError as problem:
                part = [other for other in part if other.partition("#")[0] != side]
                turns.leave_out(lab.drop(side, what, problem))
                continue
            turns.of.setdefault(name, []).append(answer)
            if player.side.is_listed:
                turns.listed.add(name)
    return turns
