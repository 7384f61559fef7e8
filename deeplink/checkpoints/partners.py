"""Whose disk keeps the copy of a node's checkpoints: pure, and the same for all who have the list of members."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.types import Member, NodeName


def partners(node: NodeName, members: Sequence[Member]) -> tuple[Member, ...]:
    """Return who keeps copies for `node`, the first choice first; all members but itself.

    The first choices of all nodes are all different: nobody keeps for two, and where no failure domain holds more
    than half of the members, each lies in another domain than the node it keeps for. Of the others, those of
    another domain come first, in turn.

    >>> from deeplink.types import parse_members
    >>> four = parse_members("a=h:1*1@x,b=h:2*1@x,c=h:3*1@y,d=h:4*1@y")
    >>> [[one.name for one in partners(node, four)] for node in "abcd"]
    [['c', 'd', 'b'], ['d', 'c', 'a'], ['a', 'b', 'd'], ['b', 'a', 'c']]
    """
    domains: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda one: one.name):
        domains.setdefault(member.domain, []).append(member)
    blocks = sorted(domains.values(), key=lambda block: (-len(block), block[0].domain))
    ring = [member for block in blocks for member in block]
    at = next((place for place, member in enumerate(ring) if member.name == node), None)
    if at is None:
        return tuple(ring)
    # A step as long as the largest block leads out of every block, unless that block is more than half of all.
    step = len(blocks[0]) if len(blocks) > 1 else 1
    turn = [ring[(at + step + further) % len(ring)] for further in range(len(ring))]
    others = [member for member in turn if member.name != node]
    first, rest = others[:1], others[1:]
    here = ring[at].domain
    return (*first, *sorted(rest, key=lambda one: one.domain == here))
