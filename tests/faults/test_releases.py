"""Members of another release among ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.cache.reader import Reader
from deeplink.cache.serve import server
from tests.cache.agents import write_tree
from tests.faults.model import InProcess
from tests.faults.processes import Nodes


@pytest.fixture
def foreign(tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Two members whose port for samples speaks what this release does not."""
    monkeypatch.setattr(server, "PROTOCOL", 99)
    nodes = Nodes.make(tmp_path, files, 2)
    members = InProcess(nodes)
    for number in range(2):
        members.start(number)
    nodes.pack(write_tree(tmp_path / "source", files))
    yield nodes
    for number in range(2):
        members.kill(number)


def test_a_member_with_another_protocol_is_read_through_the_port_that_all_releases_share(
    foreign: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    with Reader.open("digits", config=foreign.config()) as reader:
        for _ in range(2):
            found = {
                reader.index.key(row): bytes(data) for row, data in enumerate(reader.read(range(len(reader))))
            }
            assert found == foreign.files
        assert reader.stats().failures == 0
    assert "speaks protocol 99" in caplog.text
