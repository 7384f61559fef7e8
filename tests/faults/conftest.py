"""Members for all tests, in order again for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cache.agents import small_files, write_tree
from tests.faults.processes import Nodes, Record


@pytest.fixture(scope="session")
def files() -> dict[str, bytes]:
    return small_files(400)


@pytest.fixture(scope="session")
def packed_nodes(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> Iterator[Nodes]:
    root = tmp_path_factory.mktemp("nodes")
    nodes = Nodes.make(root, files, 3)
    try:
        nodes.start()
        nodes.pack(write_tree(root / "source", files))
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def nodes(packed_nodes: Nodes) -> Iterator[Nodes]:
    """Three members that hold two copies of each shard, and no source."""
    packed_nodes.start()
    yield packed_nodes
    packed_nodes.start()


@pytest.fixture
def record(record_property: Record) -> Record:
    """Takes `("figure", text)`, which is shown at the end of the run."""
    return record_property


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        f"{report.nodeid.partition('::')[2]}: {figure}"
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, figure in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.section("faults")
        for line in sorted(lines):
            terminalreporter.line(line)
