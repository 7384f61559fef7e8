"""Has every member bring its share of a version, and counts what they have verified when all is done."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache import ownership
from deeplink.cache.errors import MemberError
from deeplink.cache.holding.fetching import Fetcher, FetchOutcome, WantedShard
from deeplink.cache.holding.fillclient import fill
from deeplink.cache.holding.local_budget import keep_to_budget
from deeplink.cache.holding.recovery import stat_member
from deeplink.cache.holding.residency import residency
from deeplink.cache.membership import node_name
from deeplink.cache.store import Store
from deeplink.types import NodeName, ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.cache.holding.residency import VersionResidency
    from deeplink.cache.index import Index
    from deeplink.cache.sources.bucket import SourceCap
    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.types import Member

log = logging.getLogger(__name__)

_MOST_ASKED_AT_ONCE = 64
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmProgress:
    """How far a warming is, in copies of shards; `brought` counts bytes that were not here before."""

    copies: int
    total_copies: int
    bytes: int
    total_bytes: int
    brought: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """What a warming came to.

    Attributes:
        residency: what is where now, by what members say they have verified.
        brought: per origin (a member's name, "home", "source") the bytes that came from there.
        problems: why shards did not come, some of them.
        seconds: how long it took.
    """

    residency: VersionResidency
    brought: Mapping[str, int]
    problems: tuple[str, ...]
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether every shard has all the copies it is to have, verified."""
        return self.residency.whole_shards == self.residency.shards


class WarmCounts:
    """Counts what came, over all threads.

    Args:
        total: copies of shards, and bytes, that are to come.
        listener: told after each.
    """

    def __init__(self, total: tuple[int, int], listener: Callable[[WarmProgress], None]) -> None:
        self._listener, self._lock = listener, threading.Lock()
        self._total = total
        self._done = self._bytes = 0
        self.brought: dict[str, int] = {}
        self.problems: list[str] = []

    def add(self, size: int, origin: str, problem: str) -> None:
        """Take note of one copy of a shard."""
        with self._lock:
            self._done += 1
            self._bytes += size
            if origin:
                self.brought[origin] = self.brought.get(origin, 0) + size
            if problem:
                self.fail(problem)
            self._listener(
                WarmProgress(
                    copies=self._done,
                    total_copies=self._total[0],
                    bytes=self._bytes,
                    total_bytes=self._total[1],
                    brought=sum(self.brought.values()),
                )
            )

    def fail(self, problem: str) -> None:
        """Take note of what went wrong, once."""
        if problem not in self.problems and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)


def held_by(members: Sequence[Member], token: str, clock: Clock) -> dict[NodeName, Mapping[ShardId, bool] | None]:
    """Return, per member, the shards it holds and whether it has verified them; None for who does not answer."""

    def ask(member: Member) -> Mapping[ShardId, bool] | None:
        try:
            reply = stat_member(member, token, clock)
        except MemberError as problem:
            log.warning("%s", problem)
            return None
        return {ShardId(shard.id): shard.verified for shard in reply.shards}

    with ThreadPoolExecutor(_MOST_ASKED_AT_ONCE) as pool:
        return dict(zip([member.name for member in members], pool.map(ask, members), strict=True))


def warm(
    index: Index,
    name: str,
    members: Sequence[Member],
    token: str,
    *,
    replicas: int,
    clock: Clock,
    progress: Callable[[WarmProgress], None] = lambda _: None,
) -> WarmResult:
    """Have members bring what they are to hold of a version; returns when all of it is verified or cannot be had.

    Members that do not answer are passed over: their share goes to the others. First copies come first, so that
    the second ones come from members and not once more from the source.

    Args:
        index: the version.
        name: its dataset.
        members: all of them.
        token: what calls carry.
        replicas: copies of each shard.
        clock: where time comes from.
        progress: told after each copy, from several threads, one at a time.
    """
    began = clock.monotonic()
    answering = [
        member
        for member, held in zip(members, held_by(members, token, clock).values(), strict=True)
        if held is not None
    ]
    names, known = [member.name for member in answering], ownership.standing(answering)
    copies = min(replicas, len(answering))
    tally = WarmCounts(_total(index, copies), progress)
    order = [ownership.owners(entry.id, names, copies, known) for entry in index.shards]

    def bring(member: Member, numbers: Sequence[int]) -> None:
        try:
            for reply in fill(member, token, name, index, numbers, members=members):
                here = reply.outcome in {cache_pb2.FILL_OUTCOME_HELD, cache_pb2.FILL_OUTCOME_FETCHED}
                problem = "" if here else f"member {member.name}: shard {reply.id}: {reply.problem}"
                tally.add(reply.bytes if here else 0, reply.origin, problem)
        except MemberError as problem:
            tally.fail(str(problem))

    with ThreadPoolExecutor(_MOST_ASKED_AT_ONCE) as pool:
        for copy in range(copies):
            shares = {
                member: [number for number, owners in enumerate(order) if owners[copy] == member.name]
                for member in answering
            }
            list(pool.map(bring, *zip(*((m, share) for m, share in shares.items() if share), strict=True)))
    stats = held_by(members, token, clock)
    found = residency(index, stats, replicas=replicas, known=ownership.standing(members))
    return WarmResult(
        residency=found,
        brought=tally.brought,
        problems=tuple(tally.problems),
        seconds=clock.monotonic() - began,
    )


def _total(index: Index, copies: int) -> tuple[int, int]:
    return len(index.shards) * copies, sum(entry.bytes for entry in index.shards) * copies


def warm_here(
    index: Index,
    config: Config,
    *,
    cap: SourceCap,
    clock: Clock,
    progress: Callable[[WarmProgress], None] = lambda _: None,
) -> WarmResult:
    """Bring all of a version into this node's own store, where there are no members; as `warm` else.

    The store keeps to its budget: other shards that can be had again leave, and what does not fit does not come.
    """
    began, store = clock.monotonic(), Store(config.store)
    keep_to_budget(store, config, clock, staying={entry.id for entry in index.shards})
    fetcher = Fetcher(store, "", clock, cap=cap)
    tally = WarmCounts(_total(index, 1), progress)
    for number in range(len(index.shards)):
        wanted = WantedShard.of(index, number)
        found = fetcher.fetch(wanted)
        while found.outcome is FetchOutcome.BUSY:  # ends with the process that is at it
            clock.sleep(0.2)
            found = fetcher.fetch(wanted)
        problem = "" if found.outcome.is_here else f"shard {wanted.id}: {found.problem}"
        tally.add(wanted.bytes if found.outcome.is_here else 0, found.origin, problem)
    held = {shard: store.is_verified(shard) for shard in store.ids()}
    return WarmResult(
        residency=residency(index, {node_name(config): held}, replicas=1),
        brought=tally.brought,
        problems=tuple(tally.problems),
        seconds=clock.monotonic() - began,
    )
