"""Which nodes the next attempt may use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.recovery.relaunch import Silence, select_nodes

NAMES = [NodeName(name) for name in "abcdef"]


def silence(*doubtful: str) -> dict[NodeName, Silence]:
    return {name: Silence(2.0, 2.0, 2.0) if name in doubtful else Silence(0.1, 0.1, 0.2) for name in NAMES}


def test_good_nodes_are_all_there_to_choose_from() -> None:
    assert select_nodes(NAMES, 2, silence=silence(), doubt_s=1.5) == NAMES


def test_a_suspect_is_left_out_where_there_are_others() -> None:
    assert NAMES[1] not in select_nodes(NAMES, 5, silence=silence(), doubt_s=1.5, suspects=[NAMES[1]])
    assert NAMES[1] in select_nodes(NAMES, 6, silence=silence(), doubt_s=1.5, suspects=[NAMES[1]])


def test_the_worse_a_node_is_the_later_it_is_taken() -> None:
    a, b, c, d, e, f = NAMES
    for count, worst in ((3, []), (4, [b]), (5, [b, c]), (6, [b, c, d])):
        chosen = select_nodes(NAMES, count, silence=silence(d), doubt_s=1.5, suspects=[b], sick=[c])
        assert chosen == [a, e, f, *worst]


def test_a_drained_node_is_taken_last_of_those_that_answer() -> None:
    a, b, c, d, e, f = NAMES
    for count, worst in ((3, []), (4, [b]), (5, [b, c]), (6, [b, c, d])):
        chosen = select_nodes(NAMES, count, silence=silence(), doubt_s=1.5, suspects=[b], sick=[c], out=[d])
        assert chosen == [a, e, f, *worst]
    assert select_nodes(NAMES, 6, silence=silence("a"), doubt_s=1.5, out=[d]) == [b, c, e, f, d, a]
    assert select_nodes(NAMES, 1, silence=silence(), doubt_s=1.5, here=a, out=NAMES) == [a]


def test_the_node_we_run_on_lives() -> None:
    assert NAMES[3] in select_nodes(NAMES, 1, silence=silence("d"), doubt_s=1.5, here=NAMES[3])


nodes = st.sets(st.sampled_from(NAMES))


@given(st.lists(st.sampled_from(NAMES), unique=True), st.integers(1, 6), st.tuples(nodes, nodes, nodes, nodes))
def test_there_are_as_many_as_are_wanted_where_there_are_so_many(
    usable: list[NodeName], count: int, worse: tuple[set[NodeName], ...]
) -> None:
    doubtful, suspects, sick, out = worse
    chosen = select_nodes(
        usable, count, silence=silence(*doubtful), doubt_s=1.5, suspects=suspects, sick=sick, out=out
    )
    assert len(chosen) == len(set(chosen)) >= min(count, len(usable))
    assert set(chosen) <= set(usable)
