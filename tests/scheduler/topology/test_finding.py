"""What a finding reads like."""

from __future__ import annotations

from deeplink.scheduler.topology.finding import TopologyFinding, TopologyFindingKind
from tests.hostile import NAMES


def test_a_finding_names_its_file_and_line() -> None:
    assert str(TopologyFinding(TopologyFindingKind.DUPLICATE, "n1 is there twice", "topology.conf", 7)) == (
        "topology.conf:7: duplicate: n1 is there twice"
    )
    assert str(TopologyFinding(TopologyFindingKind.FLAT, "4 nodes", "names")) == "names: flat: 4 nodes"
    assert str(TopologyFinding(TopologyFindingKind.DEGRADED, "a - b")) == "degraded: a - b"


def test_what_somebody_wrote_cannot_steer_the_terminal() -> None:
    for name in NAMES:
        assert str(TopologyFinding(TopologyFindingKind.UNKNOWN, name, name, 1)).isprintable()


def test_what_need_not_be_mended_is_no_problem() -> None:
    assert not TopologyFindingKind.UNEVEN.problem
    assert TopologyFindingKind.DEGRADED.problem
    assert TopologyFindingKind.NO_TOPOLOGY.problem
