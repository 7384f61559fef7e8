"""Members: which there are, which a shard belongs on (weighted rendezvous hashing), which not to wait for.

Those that did not answer are skipped, and of a slow one another is asked too (hedging).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from deeplink.core.config import Config, ConfigError
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import read_members
from deeplink.core.types import Member, NodeName
from deeplink.rpc.plain.framing import NO_SECRET
from deeplink.rpc.plain.local_socket import UNIX
from deeplink.rpc.tokens import TokenError, read_token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from deeplink.cache.name_hashes import NameHashes
    from deeplink.core.types import ShardId
    from deeplink.rpc.tokens import Credentials, Vouch

log = logging.getLogger(__name__)

_GIB = 1 << 30
_HASHES = float(1 << 64)

CANDIDATES = 64
"""So many members of a shard's order are to take it, at most: those that come after them are not looked at."""

_FEW = 48  # for so many members the order of all is found sooner
_SURE = 1e-9  # beyond what rounding does to a score


def node_name(config: Config) -> NodeName:
    """Return this node's member name: the configured one, Slurm's, or the host's."""
    return NodeName(config.node or os.environ.get("SLURMD_NODENAME", "") or socket.gethostname())


def configured_members(config: Config) -> tuple[Member, ...]:
    """Return all members, this node among them if it is one."""
    return _parsed(config.members, "members")


def _parsed(text: str, key: str) -> tuple[Member, ...]:
    try:
        return read_members(text)
    except ValueError as problem:
        raise ConfigError("configuration", key, str(problem)) from problem


def other_members(config: Config) -> tuple[Member, ...]:
    """Return the members but this node."""
    own = node_name(config)
    return tuple(member for member in configured_members(config) if member.name != own)


def members_token(config: Config, members: Sequence[Member]) -> str:
    """Return the token that calls to `members` carry; empty where there are none."""
    return _token_in(config.token_file) if members else ""


def _token_in(file: Path | None) -> str:
    if file is None:
        problem = "members are configured, and no file with their token"
        raise ConfigError(
            "configuration", "token_file", problem, "Let DEEPLINK_TOKEN_FILE name the agents' token."
        )
    return read_token(file)


@dataclass(frozen=True, slots=True)
class Tier:
    """Members that take the same credentials; those of a later tier are asked for what earlier ones lack."""

    members: tuple[Member, ...] = ()
    shown: Credentials = ""
    """What they are shown; empty: they look after their nodes, but cannot be asked from here."""

    @classmethod
    def of(cls, members: tuple[Member, ...], token_file: Path | None, vouch: Vouch | None) -> Tier:
        """Return these members, who are shown the token in a file; where that is not ours to read, who we are."""
        try:
            return cls(members, _token_in(token_file)) if members else cls()
        except TokenError as problem:
            if vouch is None or not isinstance(problem.__cause__, PermissionError):
                raise
            try:
                vouch("whether MUNGE is here")
            except DeepLinkError as missing:
                log.info("%s", missing)
                raise problem from problem.__cause__
            return cls(members, vouch)

    @classmethod
    def of_site(cls, config: Config, *, listed: str, token_file: Path | None, vouch: Vouch | None) -> Tier:
        """Return the standing cache beside which a job runs its own; a job goes on without it."""
        members: tuple[Member, ...] = ()
        try:
            members = _parsed(listed, "site_members")
            return cls.of(members, token_file, vouch)
        except DeepLinkError as problem:
            has_socket = config.node_socket is not None
            (log.info if has_socket else log.warning)("the standing cache is not asked: %s", problem)
            return cls(members) if has_socket else cls()

    @classmethod
    def of_node(cls, config: Config, node: NodeName) -> Tier:
        """Return the standing agent of this node, which answers every user at its socket, if one does."""
        path = config.node_socket
        try:
            is_there = path is not None and path.is_socket()
        except OSError:
            is_there = False
        return cls((Member(node, f"{UNIX}{path}"),), NO_SECRET) if is_there else cls()

    def tended(self, config: Config, node: NodeName) -> frozenset[NodeName]:
        """Return the nodes that a job's agents leave to these standing ones, as `node` sees it.

        None where these cannot be asked from here, and the one that is to look after this node is not there.
        """
        if self.shown or node not in self.names or self.of_node(config, node).members:
            return self.names
        return frozenset()

    def without(self, names: Collection[NodeName]) -> Tier:
        """Return the tier without the members of these names."""
        return Tier(tuple(member for member in self.members if member.name not in names), self.shown)

    @property
    def names(self) -> frozenset[NodeName]:
        """The names of the members."""
        return frozenset(member.name for member in self.members)


def weight_of(budget: int) -> int:
    """Return the weight of a member whose store may hold so many bytes: GiB, rounded down to a power of two.

    >>> weight_of(7 << 40), weight_of(100), weight_of(3 << 30)
    (4096, 1, 2)
    """
    return 1 << (max(budget // _GIB, 1).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class MemberAttributes:
    """What a list of members says of them beyond their names."""

    weight: Mapping[NodeName, int] = field(default_factory=dict)
    """How much each is to hold against the others; 1 for those not in it."""
    domain: Mapping[NodeName, str] = field(default_factory=dict)
    """The failure domain of each; those not in it count as one domain. Empty where all are in one."""


_ALIKE = MemberAttributes()


def standing(members: Iterable[Member]) -> MemberAttributes:
    """Return what `members` say of themselves, as `ranked` takes it."""
    listed = tuple(members)
    is_parted = len({member.domain for member in listed}) > 1
    return MemberAttributes(
        {member.name: member.weight for member in listed},
        {member.name: member.domain for member in listed} if is_parted else {},
    )


def scored(shard: ShardId, member: NodeName, known: MemberAttributes = _ALIKE) -> tuple[float, int, NodeName]:
    """Return what `ranked` orders a member by, the least first: minus its score, minus its hash, its name."""
    number = xxhash.xxh3_64_intdigest(f"{shard}\0{member}".encode())
    # Half a step off both ends: 0 has no logarithm, and that of 1 is 0.
    uniform = min((number + 0.5) / _HASHES, 1.0 - 2.0**-53)
    return known.weight.get(member, 1) / math.log(uniform), -number, member


def ranked(shard: ShardId, members: Iterable[NodeName], known: MemberAttributes = _ALIKE) -> tuple[NodeName, ...]:
    """Return the members in the order in which they are to hold `shard`; the first ones are its owners.

    `RendezvousOrder` gives the first of thousands sooner.

    By score, so that the order of two members does not depend on the others: -weight / ln(hash), the hash uniform
    in (0, 1) (Schindelhauer and Schomaker, SPAA 2005; Resch, SNIA SDC 2015). Equal scores: by hash, then by name.
    Then the best one of another domain than the first one's becomes the second, so that no domain has all copies.

    >>> ranked("00" * 20, ["n0", "n1", "n2"]) == ranked("00" * 20, ["n2", "n0", "n1"])
    True
    """
    placed = sorted(members, key=lambda member: scored(shard, member, known))
    if known.domain and placed:
        apart = _apart(placed, placed[:1], known)
        if apart is not None:
            placed.remove(apart)
            placed.insert(1, apart)
    return tuple(placed)


def _apart(order: Iterable[NodeName], holders: Collection[NodeName], known: MemberAttributes) -> NodeName | None:
    """Return the first in `order` of another domain than the one of all `holders`; None where there is none."""
    domain = known.domain
    held = {domain.get(name, "") for name in holders}
    if len(held) != 1:
        return None
    (one,) = held
    return next((name for name in order if domain.get(name, "") != one), None)


def next_holder(
    order: Sequence[NodeName], holders: Collection[NodeName], replicas: int, known: MemberAttributes = _ALIKE
) -> NodeName | None:
    """Return the member to take the next copy of a shard that `holders` have, owners or not; None: none is left.

    The first in `order`; for the last copy, where all others would be in one domain, the first of another one.
    """
    left = [name for name in order if name not in holders]
    if known.domain and holders and len(holders) == replicas - 1:
        apart = _apart(left, holders, known)
        if apart is not None:
            return apart
    return left[0] if left else None


class RendezvousOrder:
    """The order of `members` for each shard, as `membership.ranked` has it. Safe to use from several threads.

    Made once for a list of members; then a shard's first few cost about as much for thousands of members as for
    some dozens.

    >>> names = [f"n{number}" for number in range(1000)]
    >>> RendezvousOrder(names).first("00" * 20, 3) == ranked("00" * 20, names)[:3]
    True
    """

    def __init__(self, members: Iterable[NodeName], known: MemberAttributes | None = None) -> None:
        known = known or MemberAttributes()
        by_length: defaultdict[int, list[NodeName]] = defaultdict(list)
        for name in dict.fromkeys(members):
            by_length[len(name.encode())].append(name)
        self._names = [name for names in by_length.values() for name in names]
        is_parted = len({known.domain.get(name, "") for name in self._names}) > 1
        self._known = MemberAttributes(known.weight, known.domain if is_parted else {})
        self._hashes: NameHashes | None = None
        if len(self._names) > _FEW:
            from deeplink.cache.name_hashes import LONGEST, NameHashes  # noqa: PLC0415 - numpy: for many alone

            if max(by_length) <= LONGEST:
                weights = [known.weight.get(name, 1) for name in self._names]
                self._hashes = NameHashes(by_length.values(), weights, _SURE)

    def owners(self, shard: ShardId, replicas: int) -> tuple[NodeName, ...]:
        """Return the `replicas` members a shard belongs on, the first one first; all where there are fewer."""
        return self.first(shard, replicas)

    def first(self, shard: ShardId, count: int) -> tuple[NodeName, ...]:
        """Return the first `count` members in the order in which they are to hold `shard`; all where fewer."""
        if self._hashes is None or not self._hashes.takes(shard):
            return ranked(shard, self._names, self._known)[:count]
        hashes = self._hashes.of(shard)
        expected = count + 4 * count**0.5 + 4
        while expected < len(self._names) / 4:
            least = self._hashes.weight / expected
            # All that have such a score, or more, are among them.
            among = [self._names[number] for number in self._hashes.above(hashes, least)]
            order = ranked(shard, among, self._known)
            if len(order) >= max(count, 2) and self._is_sure(shard, order, count, least):
                return order[:count]
            expected *= 4
        return ranked(shard, self._names, self._known)[:count]

    def _is_sure(self, shard: ShardId, order: tuple[NodeName, ...], count: int, least: float) -> bool:
        """Tell whether none that is not in `order`, and whose score is below `least`, could be of the first."""
        domain = self._known.domain
        if count > 1 and domain and domain.get(order[0], "") == domain.get(order[1], ""):
            return False
        # The second may be there for its domain; of the others the last one has the lowest score.
        told = {order[count - 1], order[1]} if count > 1 else {order[0]}
        return all(scored(shard, name, self._known)[0] <= -least * (1 + _SURE) for name in told)


@dataclass(frozen=True, slots=True)
class AgentsAsked:
    """The agents that answer a reader, in the order in which they are asked: one for each node's data."""

    node: NodeName  # the reader's
    here: Tier  # the standing agent of this node, at its socket
    members: Tier  # of its job, on nodes that have no standing one; or as configured
    standing: Tier  # of the standing cache beside which the job runs its own

    @property
    def is_tended(self) -> bool:
        """Whether an agent brings to this node what is missed."""
        return any(self.node in tier.names for tier in (self.here, self.members, self.standing) if tier.shown)

    @property
    def has_token(self) -> bool:
        """Whether some of them serve this reader whatever the source lets it read."""
        return any(tier.shown and isinstance(tier.shown, str) for tier in (self.members, self.standing))


def agents_asked(config: Config, vouch: Vouch | None) -> AgentsAsked:
    """Return whom a reader with this configuration asks.

    Who may not read a token shows who he is where MUNGE is, else does without those agents. So does a node whose
    own agent is the only one. Raises TokenError or ConfigError where it is missing or wrong otherwise.
    """
    node, members = node_name(config), Tier()
    here = Tier.of_node(config, node)
    everyone = configured_members(config)
    try:
        members = Tier.of(everyone, config.token_file, vouch)
    except DeepLinkError as problem:
        is_refused = isinstance(problem.__cause__, PermissionError)
        if not here.members and not is_refused and any(member.name != node for member in everyone):
            raise
        if not here.members:
            log.warning("the members are not asked: %s", problem)
    standing = Tier.of_site(config, listed=config.site_members, token_file=config.site_token_file, vouch=vouch)
    members = members.without(standing.tended(config, node))
    return AgentsAsked(node, here, members, standing.without(here.names))


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
        if not (self._failures or self._until or self._overtaken):
            return
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
            if (times := self._times.get(member)) is None:
                times = self._times[member] = deque(maxlen=_LATENCIES_KEPT)
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
