"""The simulation of 10,000 nodes, with fewer of them."""

from __future__ import annotations

import pytest

from benchmarks.scheduler import ten_thousand


def test_what_travels_in_files_is_measured() -> None:
    rows = {row.row: row for row in ten_thousand._files(300)}
    longest = rows["300 nodes: longest value in a rank's environment"]
    assert longest.reached
    assert rows["300 nodes: file of the members"].value * 1024 > longest.value * 10


@pytest.mark.slow
def test_every_node_is_asked_and_heard_through_its_leaf() -> None:
    found = ten_thousand._watched(160, 3.0, one_leaf=False)
    assert found["pace"] > 0
    # A heartbeat there and back; asked one by one it takes about 900 bytes.
    assert 160 * 50 < found["bytes"] < 160 * 600
