"""Names and nothing else."""

from __future__ import annotations

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.network import TopologyCheck
from deeplink.scheduler.topology.sources.gathering import read_names, read_node_names


def test_names_of_clouds_are_read_folded_or_not() -> None:
    text = "# the pool\nip-10-0-1-17.internal\ngke-pool-a1b2-x7k9, n[0-2]  n7\n"
    reading = read_names(text, "names")
    assert list(reading.network.nodes) == ["ip-10-0-1-17.internal", "gke-pool-a1b2-x7k9", "n0", "n1", "n2", "n7"]
    assert [finding.check for finding in reading.findings] == [TopologyCheck.FLAT]
    assert fabric_of(reading.network).paths == {}


def test_dirt_is_noted_with_its_line() -> None:
    reading = read_names("n0\nn[1-\nn0 n0\nn[0-99999999]", "names")
    assert [(finding.line, finding.check) for finding in reading.findings] == [
        (2, TopologyCheck.UNREADABLE),
        (3, TopologyCheck.DUPLICATE),
        (4, TopologyCheck.UNREADABLE),
        (0, TopologyCheck.FLAT),
    ]
    assert list(reading.network.nodes) == ["n0"]


def test_no_names_are_no_flat_cluster() -> None:
    assert read_names("# nobody\n", "names").findings == ()


def test_slurms_nodes_make_the_same_graph() -> None:
    names = [NodeName("n0"), NodeName("n1")]
    assert read_node_names(names, "scontrol").network == read_names("n[0-1]", "names").network


def test_names_that_are_there_again_are_told_line_by_line() -> None:
    findings = read_names("n[0-999]\nn[0-999]\nn5", "names").findings
    assert [(finding.line, finding.text) for finding in findings[:-1]] == [
        (2, "1,000 names of it are also on line 1"),
        (3, "n5 is also on line 1"),
    ]
