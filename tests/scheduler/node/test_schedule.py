from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.node.check_result import FIRST_WITHIN_S, LONGEST_WAIT_S, Timetable


def test_checks_are_due_at_their_own_interval() -> None:
    table = Timetable([("a", 10, 5), ("b", 3, 5)], 0.0)
    assert table.begin(0.0) == ["a", "b"]
    assert table.begin(1.0) == []
    table.ended("a")
    table.ended("b")
    assert table.wait_s(1.0) == 2.0
    assert table.begin(3.0) == ["b"]
    assert table.begin(10.0) == ["a"]


def test_one_that_hangs_is_told_once_per_interval_and_begins_no_second_look() -> None:
    table = Timetable([("hung", 10, 4), ("fine", 10, 4)], 0.0)
    table.begin(0.0)
    table.ended("fine")
    assert table.hanging(3.9) == []
    assert table.hanging(4.0) == [("hung", 4.0)]
    assert table.hanging(4.1) == []
    assert table.begin(10.0) == ["fine"]
    assert table.hanging(14.0) == [("hung", 14.0), ("fine", 4.0)]
    table.ended("hung")
    assert table.begin(14.0) == ["hung"]


def test_first_looks_are_spread_by_the_nodes_name() -> None:
    def first(node: str) -> float:
        return Timetable([("disk", 30, 5)], 0.0, spread=node).wait_s(0.0)

    waits = {first(f"n{number}") for number in range(50)}
    assert len(waits) == 50
    assert all(0 <= wait < FIRST_WITHIN_S for wait in waits)
    assert first("n1") == first("n1")


@given(
    st.lists(st.tuples(st.floats(0.5, 60), st.floats(0.5, 60)), min_size=1, max_size=5),
    st.lists(st.tuples(st.floats(0.01, 20), st.sets(st.integers(0, 4))), max_size=60),
)
def test_whatever_ends_when_no_check_is_looked_at_twice_at_once_or_too_often(
    checks: list[tuple[float, float]], steps: list[tuple[float, set[int]]]
) -> None:
    table = Timetable([(str(n), *times) for n, times in enumerate(checks)], 0.0)
    now, running, began = 0.0, set[str](), dict[str, float]()
    for step, ending in steps:
        for name in table.begin(now):
            assert name not in running
            assert now - began.get(name, -1e9) >= checks[int(name)][0] - 1e-9
            running.add(name)
            began[name] = now
        for name, age in table.hanging(now):
            assert name in running
            assert age >= checks[int(name)][1] - 1e-9
        for name in {str(number) for number in ending} & running:
            table.ended(name)
            running.discard(name)
        assert 0 <= table.wait_s(now) <= LONGEST_WAIT_S
        now += step
