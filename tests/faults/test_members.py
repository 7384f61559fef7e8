"""A member dies, is frozen, or is started again while a training reads from it at full speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.processes import Nodes, Record, reading, survived, task_of

pytestmark = [pytest.mark.slow]


def test_a_member_is_killed(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    with reading(task_of(nodes.config(), nodes.files), tmp_path) as loop:
        nodes[0].kill()
        loop.await_epochs(2)
        stats = survived(loop, record)
    assert stats["failures"] > 0
    assert stats["healed"] == stats["failures"]
    assert stats["source_samples"] == 0
    assert "member n0" in loop.log()


def test_a_member_is_frozen_and_thawed(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    with reading(task_of(nodes.config(), nodes.files), tmp_path) as loop:
        nodes[1].freeze()
        loop.await_epochs(2)
        nodes[1].thaw()
        loop.await_epochs(1)
        stats = survived(loop, record)
    assert stats["source_samples"] == 0
    assert "member n1" in loop.log()


def test_every_member_is_started_anew_one_after_another(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    with reading(task_of(nodes.config(), nodes.files), tmp_path) as loop:
        for node in nodes.nodes:
            node.end()
            loop.await_epochs(1)
            node.start()
            node.await_ready()
        loop.await_epochs(1)
        stats = survived(loop, record)
    assert stats["source_samples"] == 0
