"""Members of another release among ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.cache.reader import Reader
from deeplink.rpc.plain import framing
from deeplink.rpc.plain.framing import name_of
from tests.cache.agents import write_tree
from tests.faults.model import InProcess
from tests.faults.processes import Nodes


@pytest.fixture
def nodes(tmp_path: Path, files: dict[str, bytes]) -> Iterator[Nodes]:
    """Two members that hold the samples."""
    nodes = Nodes.make(tmp_path, files, 2)
    members = InProcess(nodes)
    for number in range(2):
        members.start(number)
    nodes.pack(write_tree(tmp_path / "source", files))
    write_tree(tmp_path / "source", files)  # it is gone once it is packed
    yield nodes
    for number in range(2):
        members.kill(number)


def test_members_of_another_release_are_named_and_the_samples_come_from_the_source(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hello(nonce: bytes, token: str) -> bytes:
        return framing.HELLO.pack(framing.MAGIC, 99, nonce, name_of(token).encode())

    monkeypatch.setattr(framing, "hello", hello)
    with Reader.open("digits", config=nodes.config()) as reader:
        found = {reader.index.key(row): bytes(data) for row, data in enumerate(reader.read(range(len(reader))))}
        assert found == nodes.files
        assert reader.stats().source_samples == len(nodes.files)
    assert "speaks version 99 of the frames" in caplog.text
    assert "run one release on all nodes" in caplog.text
