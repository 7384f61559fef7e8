"""Reads samples from other members: one batch per member and round, the next copy in the next round.

A member that has not begun to answer when it usually has is overtaken by the next copy's; one that stays silent is
skipped for a while; one that is busy is asked again when it said; one that lacks a shard is not asked for it again
at once.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import ownership
from deeplink.cache.errors import MemberBusyError, MemberDamagedError, MemberError, MemberSilentError
from deeplink.cache.remote import frames
from deeplink.cache.remote.batch_plan import Asking, BatchOutcome
from deeplink.cache.remote.breaker import Breaker
from deeplink.cache.remote.hedging import LatencyTracker
from deeplink.cache.remote.transport import Places
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.cache.batch import Batch
    from deeplink.cache.index import Index
    from deeplink.cache.remote.transport import BatchReply, Pending, Transport
    from deeplink.clock import Clock
    from deeplink.types import Member, NodeName

log = logging.getLogger(__name__)

_NOT_HELD_S = 10.0
"""How long a member that said it lacks a shard is not asked for it."""
_WHY: dict[int, str] = {
    cache_pb2.READ_STATUS_BAD_EXTENT: "its copy of the shard is laid out otherwise",
    cache_pb2.READ_STATUS_DAMAGED: "its copy of the shard is damaged",
}
_BUSY_S = 0.2
_MOST_BUSY_S = 2.0
"""A busy member is waited for so long at most, and not more often than this."""
_MOST_WAITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """What was asked of members since the fleet was opened.

    Attributes:
        requests: batches asked for, second requests not among them.
        second_requests: asked of another member because the first had not begun to answer.
        overtaken: requests that were given up because second ones had brought everything.
        busy: refused because the member had too much to do.
        failures: that ended otherwise.
    """

    requests: int = 0
    second_requests: int = 0
    overtaken: int = 0
    busy: int = 0
    failures: int = 0


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


@dataclass(slots=True, eq=False)
class _Busy:
    """Members that refused, and until when they are not to be asked."""

    until: dict[NodeName, float] = field(default_factory=dict)

    def is_now(self, name: NodeName, now: float) -> bool:
        return bool(self.until) and self.until.get(name, 0.0) > now


class MemberPool:
    """The other members. Safe to use from several threads; each process needs its own.

    Args:
        index: the dataset's version.
        members: all of them: the order in which the others are asked follows from all.
        transport: how batches come.
        clock: where time comes from.
        deadline_s: how long a member may take to begin its answer.
        node: this node's name, which may be a member's and is asked for nothing.
    """

    def __init__(
        self,
        index: Index,
        members: Sequence[Member],
        transport: Transport,
        clock: Clock,
        *,
        deadline_s: float,
        node: NodeName | None = None,
    ) -> None:
        self._index, self._transport, self._clock, self._deadline_s = index, transport, clock, deadline_s
        self._members = {member.name: member for member in members}
        self._known, self._node = ownership.standing(members), node
        self._breaker, self._pace, self._busy = Breaker(), LatencyTracker(deadline_s / 4), _Busy()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._not_held: dict[tuple[NodeName, int], float] = {}
        self._ranked: dict[int, tuple[NodeName, ...]] = {}

    def fill(
        self, rows: np.ndarray, positions: np.ndarray, batch: Batch, *, last_resort: bool = False
    ) -> BatchOutcome:
        """Put the samples of `rows` at `positions` into their places in `batch`, as far as members serve them.

        Args:
            rows: of the index, one per place of the batch; int64.
            positions: the places that are wanted; int64, sorted.
            batch: with room for all of `rows`; bytes at places that turn out missing are anything.
            last_resort: ask also who is being left alone for a while: there is nobody else any more.
        """
        skipped = frozenset() if last_resort else self._breaker.skipped(self._clock.monotonic())
        chain = partial(self._candidates, skipped=skipped, last_resort=last_resort)
        work = Asking(self._index, rows, np.asarray(positions, np.int64), batch, chain=chain)
        refused: set[NodeName] = set()
        waits = 0
        while len(work.left()):
            shares = work.shares()
            if shares:
                self._round(work, shares, refused)
            elif refused and waits < _MOST_WAITS:
                waits += 1
                self._wait_for(refused)
                for name in refused:
                    work.ask_again(name)
                refused.clear()
            else:
                break
        work.outcome.missing = work.left()
        return work.outcome

    def _candidates(self, shard: int, skipped: frozenset[NodeName], *, last_resort: bool) -> Sequence[NodeName]:
        """Return the members to be asked for a shard, in order: who is busy comes last."""
        ranked = self._ranked.get(shard)
        if ranked is None:
            everyone = ownership.ranked(self._index.shards[shard].id, self._members, self._known)
            ranked = self._ranked[shard] = tuple(name for name in everyone if name != self._node)
        if last_resort:
            return ranked
        if not (skipped or self._not_held or self._busy.until):
            return ranked
        now = self._clock.monotonic()
        found = [
            name
            for name in ranked
            if name not in skipped and (not self._not_held or self._not_held.get((name, shard), 0.0) <= now)
        ]
        return sorted(found, key=lambda name: self._busy.is_now(name, now))

    def _round(self, work: Asking, shares: Mapping[NodeName, np.ndarray], refused: set[NodeName]) -> None:
        """Ask each member for its share; all of them work at once."""
        going = self._asked(work, shares)
        doubted: set[tuple[NodeName, int]] = set()
        while going:
            numbers = self._transport.answering([call.pending for call in going], self._patience_s(going))
            now = self._clock.monotonic()
            for call in [going[number] for number in numbers]:
                if call in going:  # not given up since
                    going.remove(call)
                    self._finish(work, call, refused, doubted)
                    self._give_up_overtaken(work, going, now)
            for call in [call for call in going if now - call.began >= self._deadline_s]:
                going.remove(call)
                call.pending.cancel()
                self._failed(work, call, MemberSilentError(call.name, "no answer in time", is_late=True))
            going += self._second_calls(work, going, now)
        for name, shard in sorted(doubted):
            self._tell_doubt(name, shard)

    def _asked(
        self, work: Asking, shares: Mapping[NodeName, np.ndarray], first: _Call | None = None
    ) -> list[_Call]:
        calls = []
        for name, share in shares.items():
            for positions in work.parts(share):
                request, places = work.request(positions)
                began = self._clock.monotonic()
                pending = self._transport.start(self._members[name], request, self._deadline_s, places)
                calls.append(_Call(name, positions, pending, began, first, patience_s=self._pace.patience_s(name)))
                if first is None:
                    self._pace.asked()
                self._count("second_requests" if first else "requests")
        return calls

    def _patience_s(self, going: Sequence[_Call]) -> float:
        """Return for how long nothing is to be done but wait."""
        now = self._clock.monotonic()
        return max(
            0.0,
            min(call.began + (self._deadline_s if call.has_second else call.patience_s) - now for call in going),
        )

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
            self._count("overtaken")
            if call.first is None:
                pause = self._breaker.overtaken(call.name, now)
                if pause:
                    work.outcome.fail(call.positions, f"member {call.name}: others answer in its place")
                    log.warning("member %s is overtaken again and again; skipped for %.0f s", call.name, pause)

    def _finish(
        self, work: Asking, call: _Call, refused: set[NodeName], doubted: set[tuple[NodeName, int]]
    ) -> None:
        """Take what a member sent."""
        began = self._clock.monotonic()
        try:
            # Another copy's bytes may have come into the same places: what ends badly must not undo them.
            with work.safe(call.positions):
                answer = work.per_sample(call.positions, call.pending.result())
        except MemberBusyError as problem:
            # It is well: the next copy serves this time, or it is asked again when it said.
            wait_s = min((problem.retry_s or _BUSY_S) * (0.5 + random.random()), _MOST_BUSY_S)  # noqa: S311
            self._busy.until[call.name] = began + wait_s
            refused.add(call.name)
            log.info("%s; %d samples are read elsewhere", problem, len(call.positions))
            work.outcome.fail(work.left(call.positions), str(problem))
            self._count("busy")
            return
        except MemberError as problem:
            self._failed(work, call, problem)
            return
        self._pace.began(call.name, began - call.began)
        self._breaker.answered(call.name)
        self._take(work, call, answer, doubted)

    def _failed(self, work: Asking, call: _Call, problem: MemberError) -> None:
        left = work.left(call.positions)
        self._count("failures")
        work.outcome.fail(left, str(problem))
        if isinstance(problem, MemberDamagedError):
            self._breaker.answered(call.name)
            log.warning("%s; %d samples are read elsewhere", problem, len(left))
            return
        work.silent.add(call.name)
        pause = self._breaker.failed(call.name, self._clock.monotonic())
        log.warning("%s; skipped for %.0f s, %d samples are read elsewhere", problem, pause, len(left))

    def _take(self, work: Asking, call: _Call, answer: BatchReply, doubted: set[tuple[NodeName, int]]) -> None:
        status, is_new = answer.status, work.is_left(call.positions)
        is_ok = status == cache_pb2.READ_STATUS_OK
        is_taken = is_ok & is_new
        wrong = work.take(call.positions[is_taken], answer.checksums[is_taken])
        if len(wrong):
            key = self._index.key(int(work.rows[wrong[0]]))
            log.error("member %s sent other bytes for %r than were packed", call.name, key)
            work.outcome.fail(wrong, f"member {call.name}: the bytes have changed")
            doubted.update((call.name, shard) for shard in work.shards_of(wrong))
        if not is_ok.all():
            for code in sorted(set(status[~is_ok].tolist())):
                self._refused(work, call.name, call.positions[status == code], code)

    def _refused(self, work: Asking, name: NodeName, positions: np.ndarray, code: int) -> None:
        with self._lock:
            for shard in work.shards_of(positions):
                self._not_held[name, shard] = self._clock.monotonic() + _NOT_HELD_S
        if code == cache_pb2.READ_STATUS_NO_SHARD:
            for position in positions.tolist():
                work.outcome.problems[position].append(f"member {name}: it does not hold the shard")
        else:
            work.outcome.fail(positions, f"member {name}: {_WHY.get(code, f'status {code}')}")

    def _wait_for(self, refused: set[NodeName]) -> None:
        """Wait until the first of the busy members is to be asked again."""
        now = self._clock.monotonic()
        self._clock.sleep(max(0.0, min(self._busy.until.get(name, now) for name in refused) - now))

    def _tell_doubt(self, name: NodeName, shard: int) -> None:
        """Ask a member that sent wrong bytes of a shard to verify it, and others for the shard meanwhile."""
        with self._lock:
            self._not_held[name, shard] = self._clock.monotonic() + _NOT_HELD_S
        request = frames.ExtentsRequest(0, (), np.empty(0, frames.EXTENT), (self._index.shards[shard].id,))
        try:
            self._transport.start(self._members[name], request, self._deadline_s, Places.alone(request)).result()
        except MemberError as problem:
            log.warning("%s; it was not told that its shard is doubted", problem)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def stats(self) -> FleetStats:
        """Return what was asked of members so far."""
        with self._lock:
            return FleetStats(**self._counts)

    def close(self) -> None:
        """End all connections."""
        self._transport.close()
