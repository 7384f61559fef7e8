"""Has members bring shards, all of a version or those that a job or a drain needs, and counts what came."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache import membership
from deeplink.cache.errors import MemberError
from deeplink.cache.membership import RendezvousOrder, node_name
from deeplink.cache.replicate.budget import keep_to_budget
from deeplink.cache.replicate.fetching import Fetcher, FetchOutcome, WantedShard
from deeplink.cache.replicate.fill import fill
from deeplink.cache.replicate.residency import residency
from deeplink.cache.replicate.shard_recovery import stat_member
from deeplink.cache.store.store import Store
from deeplink.core.types import NodeName, ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.replicate.residency import VersionResidency
    from deeplink.cache.source.opening import SourceCap
    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.core.types import Member

log = logging.getLogger(__name__)

MOST_MEMBERS_AT_ONCE = 16
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
    """What a warming came to."""

    residency: VersionResidency  # by what members say they have verified
    brought: Mapping[str, int]  # bytes by origin: a member's name, "home", "source"
    problems: tuple[str, ...]  # why shards did not come, some of them
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether every shard has all the copies it is to have, verified."""
        return self.residency.whole_shards == self.residency.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """What came of a prefetch."""

    brought: Mapping[str, int]  # bytes by origin: a member's name, "home", "source"
    came: int  # copies of shards that are there now
    wanted: int
    problems: tuple[str, ...]  # why others did not come, some of them

    @property
    def bytes(self) -> int:
        """How much was moved."""
        return sum(self.brought.values())


class _Counts:
    """Counts what came, over all threads."""

    def __init__(self, total: tuple[int, int], listener: Callable[[WarmProgress], None]) -> None:
        self._listener, self._lock = listener, threading.Lock()
        self._total_copies, self._total_bytes = total
        self._done = self._bytes = 0
        self.came = 0
        self.brought: dict[str, int] = {}
        self._problems: dict[str, None] = {}

    def add(self, size: int, origin: str, problem: str) -> None:
        """Note one copy of a shard; one with a problem did not come."""
        with self._lock:
            self._done += 1
            if problem:
                self.fail(problem)
            else:
                self.came += 1
                self._bytes += size
            if origin:
                self.brought[origin] = self.brought.get(origin, 0) + (0 if problem else size)
            self._listener(
                WarmProgress(
                    copies=self._done,
                    total_copies=self._total_copies,
                    bytes=self._bytes,
                    total_bytes=self._total_bytes,
                    brought=sum(self.brought.values()),
                )
            )

    def fail(self, problem: str) -> None:
        """Note what went wrong, once."""
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems[problem] = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why shards did not come, some of them."""
        return tuple(self._problems)

    def take(self, member: NodeName, replies: Iterable[cache_pb2.FillReply]) -> None:
        """Count what a member brings, as it says so."""
        try:
            for reply in replies:
                is_here = reply.outcome in {cache_pb2.FILL_OUTCOME_HELD, cache_pb2.FILL_OUTCOME_FETCHED}
                problem = "" if is_here else f"member {member}: shard {reply.id}: {reply.problem}"
                self.add(reply.bytes, reply.origin, problem)
        except MemberError as problem:
            self.fail(str(problem))


def held_by(members: Sequence[Member], token: str, clock: Clock) -> dict[NodeName, Mapping[ShardId, bool] | None]:
    """Return, per member, the shards it holds and whether it has verified them; None where it does not answer."""

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
    """
    began = clock.monotonic()
    held = held_by(members, token, clock)
    answering = {member.name: member for member in members if held[member.name] is not None}
    copies = min(replicas, len(answering))
    counts = _Counts(_total(index, copies), progress)
    known = membership.standing(answering.values())
    order = RendezvousOrder(answering, known)
    holders = [order.owners(entry.id, copies) for entry in index.shards]
    for copy in range(copies):
        shares: dict[NodeName, list[int]] = {}
        for number, owners in enumerate(holders):
            shares.setdefault(owners[copy], []).append(number)
        _bring(Moves(index, name, shares, copies), members, token, counts, at_once=_MOST_ASKED_AT_ONCE)
    found = residency(index, held_by(members, token, clock), replicas=replicas, known=membership.standing(members))
    return WarmResult(
        residency=found, brought=counts.brought, problems=counts.problems, seconds=clock.monotonic() - began
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
    counts = _Counts(_total(index, 1), progress)
    for number in range(len(index.shards)):
        wanted = WantedShard.of(index, number)
        while (found := fetcher.fetch(wanted)).outcome is FetchOutcome.BUSY:  # ends with the process that is at it
            clock.sleep(0.2)
        problem = "" if found.outcome.is_here else f"shard {wanted.id}: {found.problem}"
        counts.add(wanted.bytes, found.origin, problem)
    held = {shard: store.is_verified(shard) for shard in store.ids()}
    return WarmResult(
        residency=residency(index, {node_name(config): held}, replicas=1),
        brought=counts.brought,
        problems=counts.problems,
        seconds=clock.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class Moves:
    """Which members are to bring which shards of one version."""

    index: Index
    name: str  # of the dataset
    numbers: Mapping[NodeName, Sequence[int]]  # of shards, by the member that is to bring them
    copies: int  # of shards that are to lie there in all, those that do already included
    silent: tuple[NodeName, ...] = ()  # nodes that were to have some, and have no agent that answers

    @property
    def bytes(self) -> int:
        """How much is to be brought."""
        shards = self.index.shards
        return sum(shards[number].bytes for numbers in self.numbers.values() for number in numbers)

    @property
    def shards(self) -> int:
        """How many copies of shards are to be brought."""
        return sum(map(len, self.numbers.values()))


def for_job(
    name: str,
    index: Index,
    nodes: Collection[NodeName],
    members: Sequence[Member],
    held: Mapping[NodeName, Mapping[ShardId, bool] | None],
    *,
    replicas: int,
    domains: Mapping[NodeName, str] | None = None,
) -> Moves:
    """Return what a job's nodes do not have yet of what they will own: the job's members are its nodes."""
    weight = {member.name: member.weight for member in members if member.name in nodes}
    known = membership.MemberAttributes(weight, domains or {})
    order = RendezvousOrder(nodes, known)
    missing: dict[NodeName, list[int]] = {}
    silent: set[NodeName] = set()
    copies = 0
    for number, entry in enumerate(index.shards):
        for owner in order.owners(entry.id, replicas):
            there = held.get(owner)
            copies += 1
            if there is None:
                silent.add(owner)
            elif not there.get(entry.id, False):
                missing.setdefault(owner, []).append(number)
    return Moves(index, name, _tupled(missing), copies, tuple(sorted(silent)))


def off_node(
    name: str,
    index: Index,
    node: NodeName,
    members: Sequence[Member],
    held: Mapping[NodeName, Mapping[ShardId, bool] | None],
) -> Moves:
    """Return the shards that a node alone holds, each for the member that owns it where that node is no member."""
    own = held.get(node) or {}
    others = {one: there for one, there in held.items() if one != node and there is not None}
    known = membership.standing(members)
    missing: dict[NodeName, list[int]] = {}
    alone = [
        number
        for number, entry in enumerate(index.shards)
        if entry.id in own and not any(there.get(entry.id, False) for there in others.values())
    ]
    if others:
        order = RendezvousOrder(others, known)
        for number in alone:
            (owner,) = order.owners(index.shards[number].id, 1)
            missing.setdefault(owner, []).append(number)
    return Moves(index, name, _tupled(missing), len(alone))


def _tupled(numbers: Mapping[NodeName, Sequence[int]]) -> dict[NodeName, tuple[int, ...]]:
    return {node: tuple(those) for node, those in sorted(numbers.items())}


def _bring(moves: Moves, members: Sequence[Member], token: str, counts: _Counts, *, at_once: int) -> None:
    def call(node: NodeName) -> None:
        numbers = moves.numbers[node]
        counts.take(node, fill(by_name[node], token, moves.name, moves.index, numbers, members=members))

    by_name = {member.name: member for member in members}
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(call, moves.numbers))


def prefetch(
    moves: Moves,
    members: Sequence[Member],
    token: str,
    *,
    progress: Callable[[WarmProgress], None] = lambda _: None,
) -> Prefetched:
    """Have members fetch shards; returns when each came or cannot be had. A second run goes on."""
    counts = _Counts((moves.shards, moves.bytes), progress)
    _bring(moves, members, token, counts, at_once=MOST_MEMBERS_AT_ONCE)
    return Prefetched(brought=counts.brought, came=counts.came, wanted=moves.shards, problems=counts.problems)
