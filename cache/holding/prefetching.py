"""Has members bring the shards that `prefetch_plan` names, and counts what came and from where."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.errors import MemberError
from deeplink.cache.holding.fillclient import fill
from deeplink.cache.holding.warming import WarmCounts
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.cache.holding.prefetch_plan import Moves
    from deeplink.cache.holding.warming import WarmProgress
    from deeplink.types import Member, NodeName

MOST_MEMBERS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """What came of it.

    Attributes:
        brought: bytes by where they came from (a member's name, "home", "source").
        came: copies of shards that are there now.
        wanted: copies that were to come.
        problems: why others did not come, some of them.
    """

    brought: Mapping[str, int]
    came: int
    wanted: int
    problems: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """How much was moved."""
        return sum(self.brought.values())


def prefetch(
    moves: Moves,
    members: Sequence[Member],
    token: str,
    *,
    progress: Callable[[WarmProgress], None] = lambda _: None,
) -> Prefetched:
    """Have members bring shards; returns when each came or cannot be had. Started again, it goes on where it was.

    Args:
        moves: who brings what.
        members: all standing agents: whoever of them has a shard gives it.
        token: what calls carry.
        progress: told after each copy, from several threads, one at a time.
    """
    by_name = {member.name: member for member in members}
    tally = WarmCounts((moves.shards, moves.bytes), progress)

    def bring(node: NodeName, numbers: Sequence[int]) -> int:
        came = 0
        try:
            for reply in fill(by_name[node], token, moves.name, moves.index, numbers, members=members):
                here = reply.outcome in {cache_pb2.FILL_OUTCOME_HELD, cache_pb2.FILL_OUTCOME_FETCHED}
                problem = "" if here else f"member {node}: shard {reply.id}: {reply.problem}"
                tally.add(reply.bytes if here else 0, reply.origin, problem)
                came += here
        except MemberError as problem:
            tally.fail(str(problem))
        return came

    with ThreadPoolExecutor(MOST_MEMBERS_AT_ONCE) as pool:
        came = sum(pool.map(bring, moves.numbers.keys(), moves.numbers.values()))
    return Prefetched(brought=tally.brought, came=came, wanted=moves.shards, problems=tuple(tally.problems))
