"""What a finding reads like."""

from __future__ import annotations

from deeplink.core.finding import Severity
from deeplink.scheduler.topology.network import TopologyCheck
from tests.hostile import NAMES


def test_a_finding_names_its_file_and_line() -> None:
    assert str(TopologyCheck.DUPLICATE.finding("n1 is there twice", "topology.conf", 7)) == (
        "topology.conf:7: duplicate: n1 is there twice"
    )
    assert str(TopologyCheck.FLAT.finding("4 nodes", "names")) == "names: flat: 4 nodes"
    assert str(TopologyCheck.DEGRADED.finding("a - b")) == "degraded: a - b"


def test_what_somebody_wrote_cannot_steer_the_terminal() -> None:
    for name in NAMES:
        assert str(TopologyCheck.UNKNOWN.finding(name, name, 1)).isprintable()


def test_what_need_not_be_mended_is_no_problem() -> None:
    assert TopologyCheck.UNEVEN.finding("").severity is Severity.NOTE
    assert TopologyCheck.DEGRADED.finding("").severity is Severity.WARNING
    assert TopologyCheck.NO_TOPOLOGY.finding("").severity is Severity.WARNING
