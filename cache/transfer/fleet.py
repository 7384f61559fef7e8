"""Reads samples from other members: one batch per member and round, the next copy in the next round.

Requests are hedged: past a member's usual latency the next copy is asked as well.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import membership
from deeplink.cache.errors import MemberBusyError, MemberError, MemberSilentError
from deeplink.cache.format import block
from deeplink.cache.membership import Breaker, LatencyTracker
from deeplink.cache.read.batch import by_shard
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import BatchReply, Places
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.read.batch import Batch
    from deeplink.cache.transfer.frames import Pending, Transport
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName, ShardId

log = logging.getLogger(__name__)

_ASKED_EXTENTS = 1024
"""Asked for at once: with a shard's name each they stay below `rpc.plain.LARGEST_REQUEST`."""
_MOST_BATCH_BYTES = 64 << 20
"""Samples asked of one member at once, so that a batch of giants does not fill the memory."""

_NOT_HELD_S = 10.0
"""How long a member that said it lacks a shard is not asked for it."""
_WHY: dict[int, str] = {
    cache_pb2.READ_STATUS_BAD_EXTENT: "its copy of the shard is laid out otherwise",
    cache_pb2.READ_STATUS_DAMAGED: "its copy of the shard is damaged",
    cache_pb2.READ_STATUS_FORBIDDEN: "the source's owner, group and modes do not let this user read it",
}
_BUSY_S = 0.2
_MOST_BUSY_S = 2.0
"""A busy member is waited for so long at most, and not more often than this."""
_MOST_WAITS = 3


@dataclass(slots=True, eq=False)
class BatchOutcome:
    """How a batch of reads from members went, by position."""

    missing: np.ndarray  # int64, sorted
    problems: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    failed: set[int] = field(default_factory=set)  # by some member; not holding the shard is no failure

    def go_on(self, later: BatchOutcome) -> None:
        """Add how it went with other members, who were asked for what was missing."""
        self.missing = later.missing
        for position, problems in later.problems.items():
            self.problems[position] += problems
        self.failed |= later.failed

    def fail(self, positions: np.ndarray, problem: str) -> None:
        """Note that a member failed to serve these."""
        for position in positions.tolist():
            self.problems[position].append(problem)
            self.failed.add(position)


class Asking:
    """A batch being filled by members: what is still missing, which members to ask for it, in which requests."""

    def __init__(
        self,
        index: Index,
        rows: np.ndarray,
        positions: np.ndarray,
        batch: Batch,
        *,
        chain: Callable[[int], Sequence[NodeName]],
    ) -> None:
        self.rows, self.batch, self.count = rows, batch, len(positions)  # count: how many are missing
        self._index, self._chain, self._positions = index, chain, positions
        self._shards, self._lengths = index.shard[rows], batch.lengths
        self._has_long = bool(len(rows)) and int(self._lengths.max()) > block.SPAN
        self._is_left = np.ones(len(rows), bool)
        if len(positions) < len(rows):
            self._is_left[:] = False
            self._is_left[positions] = True
        self._tried: dict[int, set[NodeName]] = {}
        self.has_second = False  # some are asked of two members at once
        self.refused: set[NodeName] = set()  # busy: may be asked again after a while
        self.doubted: set[tuple[NodeName, int]] = set()  # members that sent wrong bytes, and of which shards
        self.silent: set[NodeName] = set()  # failed during this batch: it does not wait for one of them twice
        self.outcome = BatchOutcome(positions)

    def left(self, among: np.ndarray | None = None) -> np.ndarray:
        """Return the positions still missing."""
        positions = self._positions if among is None else among
        if not self.count:
            return positions[:0]
        if self.count == len(self._is_left):
            return positions
        found: np.ndarray = positions[self._is_left[positions]]
        return found

    def shares(self, among: np.ndarray | None = None) -> dict[NodeName, np.ndarray]:
        """Return which member to ask for which of what is left: each shard's next one that was not asked yet."""
        found: dict[NodeName, list[np.ndarray]] = {}
        left = self.left(among)
        for shard, places in by_shard(_at(self._shards, left)):
            tried = self._tried.setdefault(shard, set())
            name = next((name for name in self._chain(shard) if name not in tried | self.silent), None)
            if name is not None:
                tried.add(name)
                found.setdefault(name, []).append(left[places])
        return {
            name: groups[0] if len(groups) == 1 else np.sort(np.concatenate(groups))
            for name, groups in found.items()
        }

    def ask_refused_again(self) -> None:
        """Let the members that refused be asked once more for what is left."""
        for tried in self._tried.values():
            tried.difference_update(self.refused)
        self.refused.clear()

    def parts(self, positions: np.ndarray) -> Iterator[np.ndarray]:
        """Yield one member's share in pieces of a size that one request may have."""
        is_few = len(positions) <= _ASKED_EXTENTS and not self._has_long
        if is_few and self.batch.arena.nbytes <= _MOST_BATCH_BYTES:
            yield positions
            return
        lengths = self._lengths[positions]
        ends, counts = np.cumsum(lengths), np.cumsum(_pieces(lengths))
        start = 0
        while start < len(positions):
            before, asked = (int(ends[start - 1]), int(counts[start - 1])) if start else (0, 0)
            stop = min(
                int(np.searchsorted(ends, before + _MOST_BATCH_BYTES, side="right")),
                int(np.searchsorted(counts, asked + _ASKED_EXTENTS, side="right")),
            )
            stop = max(stop, start + 1)
            yield positions[start:stop]
            start = stop

    def request(
        self, positions: np.ndarray, id_of: Callable[[int], ShardId]
    ) -> tuple[frames.ExtentsRequest, Places]:
        """Return the request for these samples, and where their bytes go."""
        rows, starts = _at(self.rows, positions), _at(self.batch.offsets[:-1], positions)
        lengths = _at(self._lengths, positions)
        extents = np.empty(len(rows), frames.EXTENT)
        named: list[ShardId] = []
        for number, here in by_shard(_at(self._shards, positions)):
            extents["shard"][here] = len(named)
            named.append(id_of(number))
        if self._has_long and int(lengths.max()) > block.SPAN:
            return self._request_in_pieces(rows, starts, named, extents["shard"])
        extents["block"], extents["offset"] = self._index.block[rows], self._index.offset[rows]
        extents["length"] = lengths
        views = self.batch.views()
        if len(positions) < len(views):
            views = [views[position] for position in positions.tolist()]
        return frames.ExtentsRequest(0, named, extents), Places(self.batch.data, starts, views)

    def _request_in_pieces(
        self, rows: np.ndarray, starts: np.ndarray, named: list[ShardId], places: np.ndarray
    ) -> tuple[frames.ExtentsRequest, Places]:
        found, at = [], []
        for row, start, place in zip(rows.tolist(), starts.tolist(), places.tolist(), strict=True):
            for piece in self._index.pieces(row):
                found.append((place, *piece))
                at.append(start)
                start += piece[2]  # noqa: PLW2901 - each piece follows the last
        extents = np.array(found, frames.EXTENT)
        return frames.ExtentsRequest(0, named, extents), Places(self.batch.data, np.array(at, np.int64))

    def per_sample(self, positions: np.ndarray, answer: BatchReply) -> BatchReply:
        """Return each sample's status, of those of its pieces the worst, and checksum."""
        if len(answer.status) == len(positions):
            return answer
        counts = _pieces(self._lengths[positions])
        status = np.maximum.reduceat(answer.status, np.cumsum(counts) - counts)
        checksums = [block.checksum(self.batch[position]) for position in positions.tolist()]
        return BatchReply(status, np.array(checksums, np.uint64))

    @contextmanager
    def safe(self, positions: np.ndarray) -> Iterator[None]:
        """Keep those samples that have come already as they are, whatever is written over them meanwhile."""
        come = positions[~self._is_left[positions]].tolist()
        kept = [bytes(self.batch[position]) for position in come]
        try:
            yield
        finally:
            for position, sample in zip(come, kept, strict=True):
                self.batch[position][:] = sample

    def take(self, positions: np.ndarray, answer: BatchReply) -> np.ndarray:
        """Note the samples that came whole; return the positions of those that are not what was packed."""
        is_right = answer.checksums == self._index.checksums[_at(self.rows, positions)]
        if answer.is_ok and is_right.all():
            came, wrong = positions, positions[:0]
        else:
            is_ok = answer.status == cache_pb2.READ_STATUS_OK
            came = positions[is_ok & is_right]
            wrong = self.left(positions[is_ok & ~is_right])
        if self.has_second:  # another copy may have brought some of them
            came = came[self._is_left[came]]
        self._is_left[came] = False
        self.count -= len(came)
        return wrong

    def shards_of(self, positions: np.ndarray) -> list[int]:
        """Return the numbers of the shards that hold these, each once, sorted."""
        return sorted(set(self._shards[positions].tolist()))


def _at(column: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a column at positions that are sorted, each once: itself for as many as it has."""
    found: np.ndarray = column if len(positions) == len(column) else column[positions]
    return found


def _pieces(lengths: np.ndarray) -> np.ndarray:
    """Return how many extents samples of these lengths are."""
    found: np.ndarray = np.maximum(-(-lengths // block.SPAN), 1)
    return found


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way; `first` is the one it is to overtake."""

    name: NodeName
    positions: np.ndarray
    pending: Pending
    began: float
    first: _Call | None = None
    has_second: bool = False
    patience_s: float = 0.0


class MemberPool:
    """The members, this node's own agent last. Safe to use from several threads; each process needs its own."""

    def __init__(
        self,
        index: Index,
        members: Sequence[Member],
        transport: Transport,
        clock: Clock,
        *,
        deadline_s: float,
        node: NodeName | None = None,
        most: int = membership.CANDIDATES,
        count: Callable[..., None] = lambda **_counts: None,
    ) -> None:
        """So many members at `most`, and `node`, are asked for a shard; `count` takes fields of `ReadStats`."""
        self._count, self._most = count, most
        self._index, self._transport, self._clock, self._deadline_s = index, transport, clock, deadline_s
        self._members = {member.name: member for member in members}
        self._order, self._node = membership.RendezvousOrder(self._members, membership.standing(members)), node
        self._breaker, self._pace = Breaker(), LatencyTracker(deadline_s / 4)
        self._busy_until: dict[NodeName, float] = {}
        self._is_said = False  # that a member may not give us something
        self._lock = threading.Lock()
        self._not_held: dict[tuple[NodeName, int], float] = {}
        self._ranked: dict[int, tuple[NodeName, ...]] = {}
        self._ids: dict[int, ShardId] = {}

    def fill(
        self, rows: np.ndarray, positions: np.ndarray, batch: Batch, *, last_resort: bool = False
    ) -> BatchOutcome:
        """Put the samples of `rows` at `positions` into their places in `batch`, as far as members serve them."""
        skipped = frozenset() if last_resort else self._breaker.skipped(self._clock.monotonic())
        chain = partial(self._candidates, skipped=skipped, last_resort=last_resort)
        work = Asking(self._index, rows, np.asarray(positions, np.int64), batch, chain=chain)
        waits = 0
        while work.count:
            shares = work.shares()
            if shares:
                self._round(work, shares)
            elif work.refused and waits < _MOST_WAITS:
                waits += 1
                now = self._clock.monotonic()
                again = min(self._busy_until.get(name, now) for name in work.refused)
                self._clock.sleep(max(0.0, again - now))
                work.ask_refused_again()
            else:
                break
        work.outcome.missing = work.left()
        return work.outcome

    def _candidates(self, shard: int, skipped: frozenset[NodeName], *, last_resort: bool) -> Sequence[NodeName]:
        """Return the members to be asked for a shard, in order; the busy ones last."""
        ranked = self._ranked.get(shard)
        if ranked is None:
            everyone = self._order.first(self._index.shards[shard].id, self._most)
            # This node's own agent is last: the sample was not here a moment ago, and it is to bring its shard.
            own = (self._node,) if self._node in self._members else ()
            ranked = self._ranked[shard] = (*(name for name in everyone if name != self._node), *own)
        if last_resort:
            return ranked
        if not (skipped or self._not_held or self._busy_until):
            return ranked
        now = self._clock.monotonic()
        found = [
            name
            for name in ranked
            if name not in skipped and (not self._not_held or self._not_held.get((name, shard), 0.0) <= now)
        ]
        return sorted(found, key=lambda name: self._busy_until.get(name, 0.0) > now)

    def _id_of(self, shard: int) -> ShardId:
        found = self._ids.get(shard)
        if found is None:
            found = self._ids[shard] = self._index.shards[shard].id
        return found

    def _round(self, work: Asking, shares: Mapping[NodeName, np.ndarray]) -> None:
        """Ask each member for its share; all of them work at once."""
        going = self._asked(work, shares)
        while going:
            numbers = self._transport.answering([call.pending for call in going], self._patience_s(going))
            now = self._clock.monotonic()
            for call in [going[number] for number in numbers]:
                if call in going:  # not given up since
                    going.remove(call)
                    self._finish(work, call)
                    self._give_up_overtaken(work, going, now)
            for call in [call for call in going if now - call.began >= self._deadline_s]:
                going.remove(call)
                call.pending.cancel()
                self._failed(work, call, MemberSilentError(call.name, "no answer in time", is_late=True))
            going += self._second_calls(work, going, now)
        for name, shard in sorted(work.doubted):
            self._report_doubt(name, shard)
        work.doubted.clear()

    def _asked(
        self, work: Asking, shares: Mapping[NodeName, np.ndarray], first: _Call | None = None
    ) -> list[_Call]:
        calls = []
        work.has_second |= first is not None
        for name, share in shares.items():
            for positions in work.parts(share):
                request, places = work.request(positions, self._id_of)
                began = self._clock.monotonic()
                pending = self._transport.start(self._members[name], request, self._deadline_s, places)
                calls.append(_Call(name, positions, pending, began, first, patience_s=self._pace.patience_s(name)))
                if first is None:
                    self._pace.asked()
                    self._count(requests=1)
                else:
                    self._count(second_requests=1)
        return calls

    def _patience_s(self, going: Sequence[_Call]) -> float:
        """Return for how long there is nothing to do but wait."""
        waits = (call.began + (self._deadline_s if call.has_second else call.patience_s) for call in going)
        return max(0.0, min(waits) - self._clock.monotonic())

    def _second_calls(self, work: Asking, going: Sequence[_Call], now: float) -> list[_Call]:
        """Ask the next copies for what has not begun to come in its usual time, within bounds."""
        found: list[_Call] = []
        for call in going:
            # A second may be late too, where two members fail at once: it has a third.
            if call.has_second or now - call.began < call.patience_s:
                continue
            call.has_second = True  # or cannot have one
            if self._pace.may_ask_twice():
                found += self._asked(work, work.shares(call.positions), call)
        return found

    def _give_up_overtaken(self, work: Asking, going: list[_Call], now: float) -> None:
        for call in list(going):
            if len(work.left(call.positions)):
                continue
            going.remove(call)
            call.pending.cancel()
            self._count(overtaken=1)
            if call.first is None:
                pause = self._breaker.overtaken(call.name, now)
                if pause:
                    work.outcome.fail(call.positions, f"member {call.name}: others answer in its place")
                    log.warning(
                        "member %s is often slower than the second member asked; skipped for %.0f s",
                        call.name,
                        pause,
                    )

    def _finish(self, work: Asking, call: _Call) -> None:
        """Take what a member sent."""
        began = self._clock.monotonic()
        try:
            # Another copy's bytes may have come into the same places: what ends badly must not undo them.
            with work.safe(call.positions) if work.has_second else nullcontext():
                answer = work.per_sample(call.positions, call.pending.result())
        except MemberBusyError as problem:
            # It is well: the next copy serves this time, or it is asked again when it said.
            wait_s = min((problem.retry_s or _BUSY_S) * (0.5 + random.random()), _MOST_BUSY_S)  # noqa: S311
            self._busy_until[call.name] = began + wait_s
            work.refused.add(call.name)
            log.info("%s; %d samples are read elsewhere", problem, len(call.positions))
            work.outcome.fail(work.left(call.positions), str(problem))
            self._count(busy=1)
            return
        except MemberError as problem:
            self._failed(work, call, problem)
            return
        self._pace.began(call.name, began - call.began)
        self._breaker.answered(call.name)
        self._take(work, call, answer)

    def _failed(self, work: Asking, call: _Call, problem: MemberError) -> None:
        left = work.left(call.positions)
        work.outcome.fail(left, str(problem))
        if problem.is_well:
            self._breaker.answered(call.name)
            log.warning("%s; %d samples are read elsewhere", problem, len(left))
            return
        work.silent.add(call.name)
        pause = self._breaker.failed(call.name, self._clock.monotonic())
        log.warning("%s; skipped for %.0f s, %d samples are read elsewhere", problem, pause, len(left))

    def _take(self, work: Asking, call: _Call, answer: BatchReply) -> None:
        wrong = work.take(call.positions, answer)
        if len(wrong):
            key = self._index.key(int(work.rows[wrong[0]]))
            log.error("member %s sent other bytes for %r than were packed", call.name, key)
            work.outcome.fail(wrong, f"member {call.name}: the bytes have changed")
            work.doubted.update((call.name, shard) for shard in work.shards_of(wrong))
        if not answer.is_ok:
            for code in sorted(set(answer.status.tolist()) - {cache_pb2.READ_STATUS_OK}):
                self._refused(work, call.name, call.positions[answer.status == code], code)

    def _refused(self, work: Asking, name: NodeName, positions: np.ndarray, code: int) -> None:
        with self._lock:
            for shard in work.shards_of(positions):
                self._not_held[name, shard] = self._clock.monotonic() + _NOT_HELD_S
        if code == cache_pb2.READ_STATUS_NO_SHARD:
            for position in positions.tolist():
                work.outcome.problems[position].append(f"member {name}: it does not hold the shard")
        else:
            why = f"member {name}: {_WHY.get(code, f'status {code}')}"
            work.outcome.fail(positions, why)
            if code == cache_pb2.READ_STATUS_FORBIDDEN and not self._is_said:
                self._is_said = True
                log.warning("%s; home and source are tried, where the file system decides", why)

    def _report_doubt(self, name: NodeName, shard: int) -> None:
        """Have a member that sent wrong bytes of a shard verify it; meanwhile others are asked for the shard."""
        with self._lock:
            self._not_held[name, shard] = self._clock.monotonic() + _NOT_HELD_S
        request = frames.ExtentsRequest(0, (), np.empty(0, frames.EXTENT), (self._index.shards[shard].id,))
        try:
            self._transport.start(self._members[name], request, self._deadline_s, Places.alone(request)).result()
        except MemberError as problem:
            log.warning("%s; the doubt about its shard was not reported to it", problem)

    def close(self) -> None:
        """End all connections."""
        self._transport.close()
