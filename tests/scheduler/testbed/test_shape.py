from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.shape import CTL, MOST_NODES, Shape


@given(
    spines=st.integers(1, 3),
    leaves=st.integers(1, 4),
    per_leaf=st.integers(1, 8),
    interleave=st.booleans(),
)
def test_every_node_hangs_on_one_leaf_and_every_switch_but_the_core_on_one_above(
    spines: int, leaves: int, per_leaf: int, interleave: bool
) -> None:
    shape = Shape(spines=spines, leaves=leaves, nodes_per_leaf=per_leaf, interleave=interleave)
    on_leaves = [node for switch in shape.switches for node in switch.nodes]
    assert sorted(on_leaves) == sorted(shape.nodes)
    below = [name for switch in shape.switches for name in switch.switches]
    assert sorted(below) == sorted(switch.name for switch in shape.switches if switch.up)
    for switch in shape.switches:
        assert all(shape.above(node) == switch.name for node in switch.nodes)
        assert len(switch.nodes) in {0, per_leaf}
    seen: set[str] = set()
    for switch in shape.switches:
        assert not switch.up or switch.up in seen
        seen.add(switch.name)


@given(nodes=st.integers(1, MOST_NODES))
def test_any_number_of_nodes_has_a_shape_and_an_address_each(nodes: int) -> None:
    shape = Shape.of(nodes)
    assert shape.node_count == len(shape.nodes) == nodes
    addresses = [ipaddress.ip_address(shape.address(machine)) for machine in shape.machines]
    assert len(set(addresses)) == nodes + 1
    network = ipaddress.ip_network("10.77.0.0/24")
    assert all(address in network and address != network.broadcast_address for address in addresses)


def test_interleaved_names_do_not_follow_the_leaves() -> None:
    shape = Shape.parse("1x2x2", interleave=True)
    assert [shape.above(node) for node in shape.nodes] == ["leaf0", "leaf1", "leaf0", "leaf1"]
    plain = Shape.parse("1x2x2")
    assert [plain.above(node) for node in plain.nodes] == ["leaf0", "leaf0", "leaf1", "leaf1"]


@pytest.mark.parametrize(
    "text", ["", "8", "1x2", "1x2x0", "0x1x1", "axbxc", "1x2x-4", "1x2x3x4", "9x9x9", "¹x2x3"]
)
def test_what_is_no_shape_is_refused_with_what_one_looks_like(text: str) -> None:
    with pytest.raises(SandboxError, match=r"no cluster of shape") as refused:
        Shape.parse(text)
    assert "1x2x4" in refused.value.remedy
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"total": 9},
        {"total": 4},
        {"total": 1, "interleave": True},
        {"cpus": 0},
        {"gpus": -1},
    ],
)
def test_numbers_that_do_not_go_together_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SandboxError, match=r"no cluster of shape"):
        Shape(**wrong)  # type: ignore[arg-type]


def test_an_unknown_machine_or_switch_is_refused_with_those_there_are() -> None:
    shape = Shape.of(2)
    for asked in (shape.node, shape.machine, shape.cuttable, shape.above, shape.address):
        with pytest.raises(SandboxError, match=r"the sandbox has no") as refused:
            asked("n7")
        assert "n1" in refused.value.remedy
    with pytest.raises(SandboxError, match=r"is a switch") as a_switch:
        shape.machine("leaf0")
    assert "sandbox cut leaf0" in a_switch.value.remedy
    with pytest.raises(SandboxError, match=r"the sandbox has no"):
        shape.node(CTL)
    assert shape.machine(CTL) == CTL
    assert shape.cuttable("leaf1") == "leaf1"
    with pytest.raises(SandboxError, match=r"the sandbox has no"):
        shape.cuttable("core")  # nothing lies above it
