"""A whole leaf is lost at once: half of the members die together while a training reads from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from deeplink.cache import membership
from deeplink.cache.reader import Reader
from deeplink.core.types import NodeName, ShardId
from tests.cache.agents import write_tree
from tests.faults.processes import Nodes, Record, reading, survived, task_of

pytestmark = [pytest.mark.slow]

COPIES = 2


@contextmanager
def packed(root: Path, files: dict[str, bytes], domains: Sequence[str]) -> Iterator[Nodes]:
    """Run four members that hold two copies of each shard; the source is away."""
    nodes = Nodes.make(root, files, 4, domains)
    try:
        nodes.start()
        nodes.pack(write_tree(root / "source", files))
        yield nodes
    finally:
        nodes.stop()


def lose_leaf(nodes: Nodes) -> set[NodeName]:
    """Kill the first half of the members; return who is left."""
    for node in nodes.nodes[:2]:
        node.kill()
    return {NodeName(node.name) for node in nodes.nodes[2:]}


def owners(nodes: Nodes) -> dict[ShardId, set[NodeName]]:
    """Return who is to hold each shard."""
    names, known = [member.name for member in nodes.members], membership.standing(nodes.members)
    with Reader.open("digits", config=nodes.config()) as reader:
        return {entry.id: {*membership.ranked(entry.id, names, known)[:COPIES]} for entry in reader.index.shards}


def test_a_leaf_is_lost_and_every_sample_still_comes_from_members(
    files: dict[str, bytes], record: Record, tmp_path: Path
) -> None:
    with packed(tmp_path, files, ("leaf0", "leaf0", "leaf1", "leaf1")) as nodes:
        held = {shard: {node.name for node in nodes.nodes if node.store.has(shard)} for shard in owners(nodes)}
        assert held == owners(nodes)  # the packers, on the members, went by the domains as we do
        with reading(task_of(nodes.config(), nodes.files), tmp_path) as loop:
            left = lose_leaf(nodes)
            loop.await_epochs(2)
            stats = survived(loop, record)
        assert stats["source_samples"] == 0
        with Reader.open("digits", config=nodes.config()) as reader:
            views = reader.read(range(len(reader)))
            assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
            assert (reader.stats().peer_samples, reader.stats().source_samples) == (len(files), 0)
        assert all(len(names & left) == 1 for names in held.values())


def test_without_domains_some_samples_are_lost_with_a_leaf(
    files: dict[str, bytes], record: Record, tmp_path: Path
) -> None:
    with packed(tmp_path, files, ()) as nodes:
        (tmp_path / "moved").rename(tmp_path / "source")  # for what is lost to be counted, not to fail
        left = lose_leaf(nodes)
        lost = {shard for shard, names in owners(nodes).items() if not names & left}
        with Reader.open("digits", config=nodes.config()) as reader:
            samples = Counter(reader.index.shards[number].id for number in reader.index.shard.tolist())
            gone = sum(samples[shard] for shard in lost)
            views = reader.read(range(len(reader)))
            assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
            assert reader.stats().source_samples == gone > 0
        record(
            "figure",
            f"{len(lost)} of {len(samples)} shards, {gone} of {len(files)} samples, had both copies there",
        )
