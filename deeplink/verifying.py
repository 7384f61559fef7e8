"""Reads every sample of a version from every node that holds it, and compares it with what was packed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.batch import Batch
from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.packing.rebuilding import rows_of
from deeplink.cache.reads.copying import Copying
from deeplink.cache.reads.mapped import ShardFile
from deeplink.cache.remote.fleet import MemberPool
from deeplink.cache.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.cache.index import Index
    from deeplink.cache.remote.transport import Transport
    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.shard_inventory import HeldCopy, Holdings
    from deeplink.types import NodeName, SampleKey, ShardId

_BATCH_BYTES, _BATCH_SAMPLES = 16 << 20, 4096


class CopyState(enum.Enum):
    """What was found out about a copy of a shard."""

    WHOLE = "whole"
    """Every sample was read, and is what was packed."""
    PRESENT = "present"
    """It is there, of the right size; nothing was read."""
    WRONG = "wrong"
    """It is of the wrong size, or samples in it are not what was packed, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A shard on one node.

    Attributes:
        node: which.
        state: what was found out.
        wrong: the samples that are not what was packed, or could not be read.
        problem: what is wrong, in words; empty where nothing is.
    """

    node: NodeName
    state: CopyState
    wrong: tuple[SampleKey, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What was found out about a shard.

    Attributes:
        shard: which.
        samples, bytes: of the version in it; bytes are those of the samples.
        copies: by node.
    """

    shard: ShardId
    samples: int
    bytes: int
    copies: tuple[Copy, ...]

    @property
    def is_right(self) -> bool:
        """Whether there is a copy, and nothing wrong with any."""
        return bool(self.copies) and all(
            copy.state in {CopyState.WHOLE, CopyState.PRESENT} for copy in self.copies
        )


class VersionVerification:
    """The copies of one version.

    Args:
        index: the version.
        config: where this node's store is, and how long a member may take.
        held: which node holds what.
        transport: how samples come from members.
        clock: where time comes from.
    """

    def __init__(self, index: Index, config: Config, held: Holdings, transport: Transport, clock: Clock) -> None:
        self._index, self._config, self._held = index, config, held
        self._transport, self._clock = transport, clock
        self._members = {member.name: member for member in held.members}

    def total(self) -> int:
        """Return how many samples there are to be read, in all copies."""
        return sum(entry.samples * len(self._held.holders(entry.id)) for entry in self._index.shards)

    def reports(self, *, quick: bool, progress: Callable[[int, int], None]) -> Iterator[ShardReport]:
        """Yield what is found out about one shard after another.

        Args:
            quick: look at sizes alone; read nothing.
            progress: is told the samples and bytes read since it was last called.

        Raises:
            IndexFormatError: the index is damaged.
        """
        for number, entry in enumerate(self._index.shards):
            rows = rows_of(self._index, number)
            copies = []
            for node in self._held.holders(entry.id):
                held = (self._held.nodes[node] or {})[entry.id]
                copy = self._looked_at(node, held, entry.bytes)
                if not quick and copy.state is CopyState.PRESENT:
                    copy = self._read(node, number, rows, progress)
                copies.append(copy)
            yield ShardReport(entry.id, len(rows), int(self._index.lengths[rows].sum()), tuple(copies))

    @staticmethod
    def _looked_at(node: NodeName, held: HeldCopy, expected: int) -> Copy:
        if held.bytes == expected:
            return Copy(node, CopyState.PRESENT)
        return Copy(node, CopyState.WRONG, (), f"its file has {held.bytes:,} bytes, and should have {expected:,}")

    def _read(self, node: NodeName, number: int, rows: np.ndarray, progress: Callable[[int, int], None]) -> Copy:
        wrong: list[int] = []
        problems: list[str] = []
        for part in _parts(self._index.lengths[rows]):
            some = rows[part]
            found = self._wrong_here(number, some) if node == self._held.here else self._wrong_there(node, some)
            wrong += [int(some[position]) for position in found]
            problems += found.values()
            progress(len(some), int(self._index.lengths[some].sum()))
        if not wrong:
            return Copy(node, CopyState.WHOLE)
        return Copy(node, CopyState.WRONG, tuple(self._index.key(row) for row in wrong), problems[0])

    def _wrong_here(self, number: int, rows: np.ndarray) -> dict[int, str]:
        """Return the positions in `rows` that this node's copy has wrong, and what is wrong."""
        entry = self._index.shards[number]
        batch = Batch.empty(self._index.lengths[rows])
        work = Copying(self._index, rows, batch)
        everything = np.arange(len(rows))
        try:
            path = Store(self._config.store, make=False).path(entry.id)
            work.add(number, ShardFile(path, entry.id, mapped=False, expected=entry.bytes), everything, cold=True)
            problems = work.copy()
        except (ShardCorruptError, OSError) as problem:
            problems = [(number, problem)]
        if problems:
            return dict.fromkeys(everything.tolist(), str(problems[0][1]))
        wanted = self._index.checksums[rows].tolist()
        sums = [block.checksum(sample) for sample in batch.views()]
        return {p: "the bytes have changed" for p, (a, b) in enumerate(zip(sums, wanted, strict=True)) if a != b}

    def _wrong_there(self, node: NodeName, rows: np.ndarray) -> dict[int, str]:
        """Return the positions in `rows` that a member's copy has wrong, and what is wrong."""
        # One for each batch: it would not ask again for a shard that it was sent wrong bytes of.
        deadline_s = self._config.read_deadline_ms / 1000
        member = MemberPool(
            self._index, [self._members[node]], self._transport, self._clock, deadline_s=deadline_s
        )
        outcome = member.fill(rows, np.arange(len(rows)), Batch.empty(self._index.lengths[rows]))
        return {p: "; ".join(outcome.problems[p]) or "it is not served" for p in outcome.missing.tolist()}


def _parts(lengths: np.ndarray) -> Iterator[slice]:
    """Yield the parts of a list of samples that are read at once."""
    start = size = 0
    for position, length in enumerate(lengths.tolist()):
        if position > start and (size + length > _BATCH_BYTES or position - start == _BATCH_SAMPLES):
            yield slice(start, position)
            start, size = position, 0
        size += length
    if start < len(lengths):
        yield slice(start, len(lengths))
