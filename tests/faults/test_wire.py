"""What comes from a member is broken or late, while a training reads at full speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.config import Config
from deeplink.core.types import Member, NodeName, format_members
from tests.faults.processes import Nodes, Record, reading, survived, task_of
from tests.faults.proxies import HOST, Proxy, flipping, late, proxy, same

pytestmark = [pytest.mark.slow]


@pytest.fixture
def between(nodes: Nodes) -> Iterator[Proxy]:
    """What lies between the reader and n0."""
    with proxy([nodes[0].port]) as made:
        yield made


def config_by(nodes: Nodes) -> Config:
    far = Member(NodeName("n0"), f"{HOST}:{nodes[0].port}")
    return nodes.config(members=format_members((far, *nodes.members[1:])))


def test_bits_flip_on_the_way(nodes: Nodes, between: Proxy, record: Record, tmp_path: Path) -> None:
    with reading(task_of(config_by(nodes), nodes.files), tmp_path) as loop:
        between.down = flipping(1, every=10_000)
        between.up = flipping(2, every=2_000)
        loop.await_stats(lambda stats: stats["failures"] >= 10)
        between.down = between.up = same
        loop.await_epochs(1)
        stats = survived(loop, record)
    assert stats["source_samples"] == 0
    assert "member n0" in loop.log()


def test_answers_come_late(nodes: Nodes, between: Proxy, record: Record, tmp_path: Path) -> None:
    with reading(task_of(config_by(nodes), nodes.files), tmp_path) as loop:
        between.down = late(4.0)
        loop.await_epochs(2)
        between.down = same
        loop.await_epochs(1)
        stats = survived(loop, record)
    assert stats["source_samples"] == 0
    assert "member n0" in loop.log()
