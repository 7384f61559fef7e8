"""Which nodes fail together, as the list of the cache's members says it; pure."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

LEAST_APART = 8
"""Where less than one part in so many of the nodes' weight hangs elsewhere than on the largest leaf, nothing is
parted. Those few would have to hold a copy of everything: of two copies, four times what their SSDs are for or
more. And a job that has lost nearly all its nodes has no use for what they saved."""
MOST_NAMED = 16_384
"""Bytes of all names, beyond which leaves have numbers: the list goes into an environment variable of 128 KiB."""


def failure_domains(fabric: Fabric, weight: Mapping[NodeName, int]) -> dict[NodeName, str]:
    """Return the leaf switch of each node by its name; empty where all fail together, or too few apart.

    Nodes of which nobody knows where they hang have the domain "", all of them one.

    Args:
        fabric: where nodes hang.
        weight: the nodes, and how much each is to hold against the others.
    """
    held: Counter[tuple[str, ...]] = Counter()
    for node, much in weight.items():
        held[fabric.leaf(node)] += much
    apart = held.total() - max(held.values(), default=0)
    if apart * LEAST_APART < held.total() or not apart:
        if apart:
            log.info("copies of shards are not spread over leaves: nearly all nodes hang on one of %d", len(held))
        return {}
    names = {path: path[-1] if path else "" for path in held}
    if len(set(names.values())) < len(names):
        names = {path: ".".join(path) for path in held}
    if sum(len(names[fabric.leaf(node)].encode(errors="surrogatepass")) for node in weight) > MOST_NAMED:
        names = {path: str(number) if path else "" for number, path in enumerate(sorted(held))}
    return {node: names[fabric.leaf(node)] for node in weight}
