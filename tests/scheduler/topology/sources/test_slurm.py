"""topology.conf and `scontrol show topology`, clean and dirty."""

from __future__ import annotations

import pytest

from deeplink.scheduler.slurm.parse import parse_topology
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.network import TopologyCheck
from deeplink.scheduler.topology.sources.slurm_topology import read_slurm, read_switches
from tests.scheduler.topology.fabrics import SCONTROL, TOPOLOGY_CONF


def problems(text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.check) for finding in read_slurm(text, "topology.conf").findings]


def test_a_clean_file_is_read_whole() -> None:
    reading = read_slurm(TOPOLOGY_CONF, "topology.conf")
    assert reading.findings == ()
    assert fabric_of(reading.network).paths == {
        "n0": ("spine", "leaf0"),
        "n1": ("spine", "leaf0"),
        "n2": ("spine", "leaf1"),
        "n3": ("spine", "leaf1"),
    }
    assert [(one.name, one.level, one.link_speed) for one in reading.network.switches.values()] == [
        ("leaf0", 0, 100),
        ("leaf1", 0, None),
        ("spine", 1, None),
    ]


def test_what_scontrol_says_is_the_same_live_and_from_a_file() -> None:
    text = SCONTROL.read_text()
    saved = read_slurm(text, "saved")
    assert saved.findings == ()
    assert saved.network == read_switches(parse_topology(text), "live").network
    chains = {node: row.name for row in parse_topology(text) if not row.switches for node in row.nodes}
    assert {node: path[-1] for node, path in fabric_of(saved.network).paths.items()} == chains


def test_settings_are_read_without_regard_to_case_and_lines_may_go_on() -> None:
    text = "switchname=leaf \\\n  NODES=n[0-1],\\\nn2\\\n LinkSpeed=1\n"
    reading = read_slurm(text, "topology.conf")
    assert reading.findings == ()
    assert sorted(reading.network.nodes) == ["n0", "n1", "n2"]


def test_blanks_around_the_sign_and_quotes_are_as_slurm_takes_them() -> None:
    text = 'SwitchName = leaf  Nodes = "n[0-1]"\nSwitchName=top Nodes= Switches= leaf LinkSpeed =7'
    reading = read_slurm(text, "topology.conf")
    assert reading.findings == ()
    assert fabric_of(reading.network).paths == {"n0": ("top", "leaf"), "n1": ("top", "leaf")}
    assert reading.network.switches["top"].link_speed == 7


def test_a_tower_of_switches_takes_no_time_by_its_square() -> None:
    lines = ["SwitchName=s0 Nodes=n[0-3]", *(f"SwitchName=s{n} Switches=s{n - 1}" for n in range(1, 8000))]
    network = read_slurm("\n".join(lines), "topology.conf").network
    assert len(fabric_of(network).paths) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SwitchName=a Nodes=n0\nSwitchName=b Nodes=n[0-1]", [(2, TopologyCheck.DUPLICATE)]),
        ("SwitchName=a Nodes=n0\nSwitchName=a Nodes=n1", [(2, TopologyCheck.DUPLICATE)]),
        ("\nSwitchName=a Switches=b", [(2, TopologyCheck.UNKNOWN)]),
        ("SwitchName=a Nodes=n[0-", [(1, TopologyCheck.UNREADABLE)]),
        ("SwitchName=a Nodes=n[0-99999999]", [(1, TopologyCheck.UNREADABLE)]),
        ("SwitchName=a Nodes=n0 Colour=red", [(1, TopologyCheck.UNREADABLE)]),
        ("SwitchName=a Nodes=n0 Nodes=n1", [(1, TopologyCheck.UNREADABLE)]),
        ("SwitchName=a LinkSpeed=fast", [(1, TopologyCheck.UNREADABLE)]),
        ("hello", [(1, TopologyCheck.UNREADABLE), (1, TopologyCheck.UNREADABLE)]),
        ("SwitchName=a! Nodes=n0", [(1, TopologyCheck.UNREADABLE)]),
        (
            "SwitchName=a Switches=b\nSwitchName=b Switches=a",
            [(1, TopologyCheck.UNREADABLE), (2, TopologyCheck.UNREADABLE)],
        ),
        ("SwitchName=a Switches=b Nodes=n0\nSwitchName=b Nodes=n1", [(1, TopologyCheck.UNREADABLE)]),
        ("BlockName=a Nodes=n0\nBlockSizes=4,8", [(1, TopologyCheck.TAKEN)]),
        (f"SwitchName=a Nodes=n{'9' * 5000}", [(1, TopologyCheck.UNREADABLE)]),
    ],
)
def test_dirt_is_noted_with_its_line(text: str, expected: list[tuple[int, TopologyCheck]]) -> None:
    assert problems(text) == expected


def test_of_a_node_on_two_leaves_the_first_counts() -> None:
    network = read_slurm("SwitchName=a Nodes=n0\nSwitchName=b Nodes=n[0-1]", "topology.conf").network
    assert fabric_of(network).paths == {"n0": ("a",), "n1": ("b",)}


def test_a_bad_line_costs_no_other() -> None:
    broken = TOPOLOGY_CONF.replace("SwitchName=leaf1 Nodes=n2,n3", "SwitchName=leaf1 Nodes=n2,n[3")
    reading = read_slurm(broken, "topology.conf")
    assert [(finding.line, finding.check) for finding in reading.findings] == [
        (3, TopologyCheck.UNREADABLE),
        (4, TopologyCheck.UNKNOWN),
    ]
    assert fabric_of(reading.network).paths == {"n0": ("spine", "leaf0"), "n1": ("spine", "leaf0")}


def test_switches_in_a_circle_keep_what_hangs_below_them() -> None:
    text = "SwitchName=l Nodes=n0\nSwitchName=a Switches=b,l\nSwitchName=b Switches=a"
    network = read_slurm(text, "topology.conf").network
    assert fabric_of(network).paths == {"n0": ("a", "l")}
