"""Which nodes fail together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import Member, NodeName, format_members
from deeplink.scheduler.topology.graph import LEAST_APART, MOST_NAMED, Fabric, failure_domains


def nodes(count: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(count)]


def alike(count: int) -> dict[NodeName, int]:
    return dict.fromkeys(nodes(count), 1)


def test_nodes_of_one_leaf_fail_together() -> None:
    fabric = Fabric({node: ("core", f"leaf{place % 2}") for place, node in enumerate(nodes(4))})
    assert failure_domains(fabric, alike(4)) == {"n0": "leaf0", "n1": "leaf1", "n2": "leaf0", "n3": "leaf1"}


def test_nodes_that_hang_nowhere_known_are_one_domain() -> None:
    fabric = Fabric({NodeName("n0"): ("core", "leaf0"), NodeName("n1"): ("core", "leaf1")})
    assert failure_domains(fabric, alike(4)) == {"n0": "leaf0", "n1": "leaf1", "n2": "", "n3": ""}


def test_where_all_fail_together_nothing_is_said() -> None:
    assert failure_domains(Fabric({}), alike(4)) == {}
    assert failure_domains(Fabric(dict.fromkeys(nodes(4), ("leaf0",))), alike(4)) == {}
    assert failure_domains(Fabric({}), {}) == {}


def test_leaves_of_one_name_are_told_apart_by_what_is_above_them() -> None:
    fabric = Fabric({NodeName("n0"): ("east", "leaf"), NodeName("n1"): ("west", "leaf")})
    assert failure_domains(fabric, alike(2)) == {"n0": "east.leaf", "n1": "west.leaf"}


def test_a_few_nodes_beside_nearly_all_are_not_made_to_hold_everything() -> None:
    fabric = Fabric({node: ("leaf1" if node == "n0" else "leaf0",) for node in nodes(16)})
    assert failure_domains(fabric, alike(LEAST_APART)) != {}
    assert failure_domains(fabric, alike(LEAST_APART + 1)) == {}
    assert failure_domains(fabric, {**alike(9), NodeName("n0"): 2}) != {}  # its SSD is large enough


def test_the_list_of_a_large_job_stays_as_short_as_it_can() -> None:
    many = nodes(4000)
    fabric = Fabric({node: ("spine", f"leaf-of-the-{place // 16}th-rack") for place, node in enumerate(many)})
    found = failure_domains(fabric, alike(len(many)))
    assert sum(map(len, found.values())) <= MOST_NAMED
    assert len(set(found.values())) == 250
    members = tuple(Member(node, f"10.77.{i >> 8}.{i & 255}:40000", 1, found[node]) for i, node in enumerate(many))
    assert len(format_members(members)) < 128 << 10


@given(st.dictionaries(st.sampled_from(nodes(9)), st.integers(0, 3)), st.integers(1, 9))
def test_two_nodes_have_one_domain_if_and_only_if_they_have_one_leaf(
    leaves: dict[NodeName, int], count: int
) -> None:
    fabric = Fabric({node: (f"spine{leaf % 2}", "a" if leaf < 2 else f"b{leaf}") for node, leaf in leaves.items()})
    found = failure_domains(fabric, alike(count))
    for one in found:
        for other in found:
            assert (found[one] == found[other]) == (fabric.leaf(one) == fabric.leaf(other))
