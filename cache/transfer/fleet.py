"""Reads samples from other members: one batch per member and round, the next copy in the next round.

Requests are hedged: past a member's usual latency the next copy is asked as well.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import membership
from deeplink.cache.errors import MemberBusyError, MemberError, MemberSilentError
from deeplink.cache.rendezvous import CANDIDATES, RendezvousOrder
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import Asking, BatchOutcome, Places
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.read.batch import Batch
    from deeplink.cache.transfer.frames import BatchReply
    from deeplink.cache.transfer.transport import Pending, Transport
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName

log = logging.getLogger(__name__)

_FIRST_SKIP_S = 5.0
_LONGEST_SKIP_S = 60.0
_PROBE_S = 5.0
"""How long a member that is tried again has to answer before another batch may try it."""
_MOST_OVERTAKEN = 3

_LATENCIES_KEPT = 128
_LATENCIES_ENOUGH = 16
_SECOND_SHARE = 0.05
"""Second requests over first ones, at most."""
_MOST_SAVED_REQUESTS = 4.0
_PERCENTILE = 0.95
_SHORTEST_PATIENCE_S = 0.02
"""Less is noise of the machine's own scheduling."""
_UNKNOWN_PATIENCE_S = 0.1
_RECOMPUTED_EVERY = 16

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


class Breaker:
    """Which members to skip because they did not answer: after each failure in a row 5 s, doubling, 60 s at most.

    After that one batch is tried on it; the others follow when that was answered. A member that others overtake
    three times in a row, without an answer of its own between, has failed too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[NodeName, int] = {}
        self._overtaken: dict[NodeName, int] = {}
        self._until: dict[NodeName, float] = {}
        self._tried: set[NodeName] = set()

    def failed(self, member: NodeName, now: float) -> float:
        """Note that a member did not answer; return how long it is skipped, seconds."""
        with self._lock:
            if self._until.get(member, 0.0) > now and member not in self._tried:
                return self._until[member] - now  # another thread waited for the same silence
            failures = self._failures.get(member, 0)
            self._tried.discard(member)
            self._failures[member] = failures + 1
            pause = min(_FIRST_SKIP_S * 2.0 ** min(failures, 10), _LONGEST_SKIP_S)
            self._until[member] = now + pause
            return pause

    def overtaken(self, member: NodeName, now: float) -> float:
        """Note that another member answered in its place; return how long it is skipped, seconds, or 0."""
        with self._lock:
            count = self._overtaken[member] = self._overtaken.get(member, 0) + 1
            if count < _MOST_OVERTAKEN:
                return 0.0
            self._overtaken.pop(member)
        return self.failed(member, now)

    def answered(self, member: NodeName) -> None:
        """Note that a member answered: its failures are forgotten."""
        with self._lock:
            self._failures.pop(member, None)
            self._until.pop(member, None)
            self._tried.discard(member)
            self._overtaken.pop(member, None)

    def skipped(self, now: float) -> frozenset[NodeName]:
        """Return the members that one batch skips; each whose time is over is tried by this batch alone."""
        if not self._until:
            return frozenset()
        with self._lock:
            found = frozenset(member for member, until in self._until.items() if until > now)
            for member in self._until.keys() - found:
                self._until[member] = now + _PROBE_S
                self._tried.add(member)
            return found


class LatencyTracker:
    """How fast each member begins to answer: past that a second one is asked, within bounds. Thread-safe."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._times: dict[NodeName, deque[float]] = {}
        self._patience: dict[NodeName, float] = {}
        self._seen = 0
        self._saved = _MOST_SAVED_REQUESTS

    def asked(self) -> None:
        """Note a first request: it earns a part of a second one."""
        with self._lock:
            self._saved = min(self._saved + _SECOND_SHARE, _MOST_SAVED_REQUESTS)

    def began(self, member: NodeName, seconds: float) -> None:
        """Note how long a member took to begin its answer."""
        with self._lock:
            times = self._times.setdefault(member, deque(maxlen=_LATENCIES_KEPT))
            times.append(seconds)
            self._seen += 1
            if len(times) >= _LATENCIES_ENOUGH and (
                self._seen % _RECOMPUTED_EVERY == 0 or member not in self._patience
            ):
                self._patience[member] = sorted(times)[int(len(times) * _PERCENTILE)]

    def patience_s(self, member: NodeName) -> float:
        """Return how long to wait for a member before another is asked too."""
        known = self._patience.get(member, _UNKNOWN_PATIENCE_S)
        return min(max(known, _SHORTEST_PATIENCE_S), self._longest_s)

    def may_ask_twice(self) -> bool:
        """Tell whether a second request is within the bounds; it is counted then."""
        with self._lock:
            if self._saved < 1.0:
                return False
            self._saved -= 1.0
            return True


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
        count: Callable[..., None] = lambda **_counts: None,
    ) -> None:
        """`count` is called with fields of `ReadStats`: requests, second_requests, overtaken, busy."""
        self._count = count
        self._index, self._transport, self._clock, self._deadline_s = index, transport, clock, deadline_s
        self._members = {member.name: member for member in members}
        self._order, self._node = RendezvousOrder(self._members, membership.standing(members)), node
        self._breaker, self._pace = Breaker(), LatencyTracker(deadline_s / 4)
        self._busy_until: dict[NodeName, float] = {}
        self._is_said = False  # that a member may not give us something
        self._lock = threading.Lock()
        self._not_held: dict[tuple[NodeName, int], float] = {}
        self._ranked: dict[int, tuple[NodeName, ...]] = {}

    def fill(
        self, rows: np.ndarray, positions: np.ndarray, batch: Batch, *, last_resort: bool = False
    ) -> BatchOutcome:
        """Put the samples of `rows` at `positions` into their places in `batch`, as far as members serve them."""
        skipped = frozenset() if last_resort else self._breaker.skipped(self._clock.monotonic())
        chain = partial(self._candidates, skipped=skipped, last_resort=last_resort)
        work = Asking(self._index, rows, np.asarray(positions, np.int64), batch, chain=chain)
        waits = 0
        while len(work.left()):
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
            everyone = self._order.first(self._index.shards[shard].id, CANDIDATES)
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
        for name, share in shares.items():
            for positions in work.parts(share):
                request, places = work.request(positions)
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
            with work.safe(call.positions):
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
        status, is_new = answer.status, work.is_left(call.positions)
        is_ok = status == cache_pb2.READ_STATUS_OK
        is_taken = is_ok & is_new
        wrong = work.take(call.positions[is_taken], answer.checksums[is_taken])
        if len(wrong):
            key = self._index.key(int(work.rows[wrong[0]]))
            log.error("member %s sent other bytes for %r than were packed", call.name, key)
            work.outcome.fail(wrong, f"member {call.name}: the bytes have changed")
            work.doubted.update((call.name, shard) for shard in work.shards_of(wrong))
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
