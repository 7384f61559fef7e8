"""Reads samples from other members: one batch per member and round, the next copy in the next round.

A member that stays silent is skipped for a while; one that lacks a shard is not asked for it again at once.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block, frames, ownership
from deeplink.cache.breaker import Breaker
from deeplink.cache.errors import MemberBusyError, MemberError
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.cache.index import Index
    from deeplink.cache.transport import Item, Transport
    from deeplink.clock import Clock
    from deeplink.types import Member, NodeName, ShardId

log = logging.getLogger(__name__)

_NOT_HELD_S = 10.0
"""How long a member that said it lacks a shard is not asked for it."""
_WHY: dict[int, str] = {
    cache_pb2.READ_STATUS_BAD_EXTENT: "its copy of the shard is laid out otherwise",
    cache_pb2.READ_STATUS_DAMAGED: "its copy of the shard is damaged",
}
_MOST_BATCH_BYTES = 64 << 20
"""Samples asked of one member at once, so that a batch of giants does not fill the memory."""


@dataclass(slots=True)
class Outcome:
    """How a batch of reads from members went.

    Attributes:
        problems: per position asked for, why members did not serve it.
        failed: positions that some member failed to serve (not holding a shard is no failure).
    """

    problems: dict[int, list[str]]
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Want:
    """A sample still to be had, and the members still to be asked for it."""

    position: int
    row: int
    candidates: list[NodeName]


class Fleet:
    """The other members. Safe to use from several threads; each process needs its own.

    Args:
        index: the dataset's version.
        members: the others; this node is not among them.
        transport: how batches come.
        clock: where time comes from.
        deadline_s: how long a member may take to answer.
    """

    def __init__(
        self, index: Index, members: Sequence[Member], transport: Transport, clock: Clock, *, deadline_s: float
    ) -> None:
        self._index, self._transport, self._clock, self._deadline_s = index, transport, clock, deadline_s
        self._members = {member.name: member for member in members}
        self._weights = ownership.weights(members)
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._not_held: dict[tuple[NodeName, int], float] = {}
        self._ranked: dict[int, tuple[NodeName, ...]] = {}

    def read(
        self,
        rows: np.ndarray,
        positions: Sequence[int],
        out: list[memoryview | None],
        *,
        last_resort: bool = False,
    ) -> Outcome:
        """Fill `out[p]` with the bytes of `rows[p]` for each of `positions` that some member serves whole.

        Args:
            rows: of the index.
            positions: the places in `rows` that are wanted.
            out: what came.
            last_resort: ask also who is being left alone for a while: there is nobody else any more.
        """
        wants = [
            _Want(p, int(rows[p]), self._candidates(int(self._index.shard[rows[p]]), last_resort=last_resort))
            for p in positions
        ]
        outcome = Outcome({want.position: [] for want in wants})
        while wants:
            by_member: dict[NodeName, list[_Want]] = {}
            for want in wants:
                if want.candidates:
                    by_member.setdefault(want.candidates.pop(0), []).append(want)
            self._round(by_member, out, outcome)
            wants = [want for want in wants if out[want.position] is None and want.candidates]
        return outcome

    def _candidates(self, shard: int, *, last_resort: bool) -> list[NodeName]:
        now = self._clock.monotonic()
        ranked = self._ranked.get(shard)
        if ranked is None:
            ranked = self._ranked[shard] = ownership.ranked(
                self._index.shards[shard].id, self._members, self._weights
            )
        if last_resort:
            return list(ranked)
        return [
            name
            for name in ranked
            if not self._breaker.is_skipped(name, now) and self._not_held.get((name, shard), 0.0) <= now
        ]

    def _round(
        self, by_member: dict[NodeName, list[_Want]], out: list[memoryview | None], outcome: Outcome
    ) -> None:
        """Ask each member for its share; all of them work at once."""
        calls = []
        doubted: set[tuple[NodeName, int]] = set()
        for name, wants in by_member.items():
            for part in self._parts(wants):
                request = self._request(part)
                calls.append((name, part, self._transport.start(self._members[name], request, self._deadline_s)))
        for name, part, call in calls:
            try:
                items = call.result()
            except MemberBusyError as problem:
                # It is well: the next copy serves this time, and it is asked again the next.
                log.info("%s; %d samples are read elsewhere", problem, len(part))
                _failed(part, str(problem), outcome)
                continue
            except MemberError as problem:
                pause = self._breaker.failed(name, self._clock.monotonic())
                log.warning("%s; skipped for %.0f s, %d samples are read elsewhere", problem, pause, len(part))
                _failed(part, str(problem), outcome)
                continue
            self._breaker.answered(name)
            doubted.update((name, shard) for shard in self._take(name, part, items, out, outcome))
        for name, shard in sorted(doubted):
            self._tell_doubt(name, shard)

    def _tell_doubt(self, name: NodeName, shard: int) -> None:
        """Ask a member that sent wrong bytes of a shard to verify it, and others for the shard meanwhile."""
        with self._lock:
            self._not_held[name, shard] = self._clock.monotonic() + _NOT_HELD_S
        request = frames.Request(0, (), np.empty(0, frames.EXTENT), (self._index.shards[shard].id,))
        try:
            self._transport.start(self._members[name], request, self._deadline_s).result()
        except MemberError as problem:
            log.warning("%s; it was not told that its shard is doubted", problem)

    def _parts(self, wants: list[_Want]) -> Iterable[list[_Want]]:
        part: list[_Want] = []
        size = extents = 0
        for want in wants:
            length = int(self._index.lengths[want.row])
            pieces = length // block.SPAN + 1
            if part and (size + length > _MOST_BATCH_BYTES or extents + pieces > frames.ASKED_EXTENTS):
                yield part
                part, size, extents = [], 0, 0
            part.append(want)
            size += length
            extents += pieces
        if part:
            yield part

    def _request(self, wants: list[_Want]) -> frames.Request:
        rows = np.array([want.row for want in wants], np.int64)
        place_of: dict[int, int] = {}
        places = [place_of.setdefault(number, len(place_of)) for number in self._index.shard[rows].tolist()]
        shards: list[ShardId] = [self._index.shards[number].id for number in place_of]
        if (self._index.lengths[rows] > block.SPAN).any():
            listed = [
                (place, *piece)
                for place, want in zip(places, wants, strict=True)
                for piece in self._index.pieces(want.row)
            ]
            return frames.Request(0, shards, np.array(listed, frames.EXTENT))
        extents = np.empty(len(rows), frames.EXTENT)
        extents["shard"], extents["block"] = places, self._index.block[rows]
        extents["offset"], extents["length"] = self._index.offset[rows], self._index.lengths[rows]
        return frames.Request(0, shards, extents)

    def _take(
        self,
        name: NodeName,
        part: list[_Want],
        items: list[Item],
        out: list[memoryview | None],
        outcome: Outcome,
    ) -> set[int]:
        """Hand out what came; return the shards of which other bytes came than were packed."""
        at, doubted = 0, set()
        for want in part:
            count = max(-(-int(self._index.lengths[want.row]) // block.SPAN), 1)
            mine, at = items[at : at + count], at + count
            bad = next((item.status for item in mine if not item.is_ok), None)
            if bad is not None:
                self._refused(name, want, bad, outcome)
                continue
            data = mine[0].data if count == 1 else memoryview(b"".join(item.data for item in mine))
            if block.checksum(data) != int(self._index.checksums[want.row]):
                key = self._index.key(want.row)
                log.error("member %s sent other bytes for %r than were packed", name, key)
                _failed([want], f"member {name}: the bytes have changed", outcome)
                doubted.add(int(self._index.shard[want.row]))
                continue
            out[want.position] = data
        return doubted

    def _refused(self, name: NodeName, want: _Want, status: int, outcome: Outcome) -> None:
        shard = int(self._index.shard[want.row])
        with self._lock:
            self._not_held[name, shard] = self._clock.monotonic() + _NOT_HELD_S
        if status == cache_pb2.READ_STATUS_NO_SHARD:
            outcome.problems[want.position].append(f"member {name}: it does not hold the shard")
        else:
            _failed([want], f"member {name}: {_WHY.get(status, f'status {status}')}", outcome)

    def close(self) -> None:
        """End all connections."""
        self._transport.close()


def _failed(wants: Iterable[_Want], problem: str, outcome: Outcome) -> None:
    for want in wants:
        outcome.problems[want.position].append(problem)
        outcome.failed.add(want.position)
