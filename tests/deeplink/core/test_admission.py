"""Places for connections: a few for strangers, a few of those for one address, the rest for who is proven."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.core.clock import ManualClock

BOUNDS = ConnectionBounds(connections=8, proof_s=5.0)


def test_the_oldest_stranger_of_an_address_makes_room_for_the_next_of_it() -> None:
    door = Admission[int](BOUNDS, ManualClock())
    assert [door.admit(number, "10.0.0.1") for number in range(4)] == [None, None, 0, 1]
    assert door.admit(9, "10.0.0.2") is None, "another address has places of its own"


def test_of_many_addresses_the_one_with_most_strangers_makes_room() -> None:
    door = Admission[int](BOUNDS, ManualClock())
    assert [door.admit(n, a) for n, a in enumerate(["a", "b", "b", "c"])] == [None] * 4
    assert door.admit(4, "d") == 1


def test_strangers_never_take_the_reserve_and_the_proven_are_never_closed_for_them() -> None:
    door = Admission[int](BOUNDS, ManualClock())
    for number in range(7):
        assert door.admit(number, f"10.0.0.{number}") is None
        door.prove(number)
    assert door.admit(100, "10.1.0.1") is None
    assert door.admit(101, "10.1.0.2") == 100
    door.prove(101)
    assert door.admit(102, "10.1.0.3") == 102, "all places are held by who is proven"
    door.leave(3)
    assert door.admit(103, "10.1.0.3") is None


def test_who_does_not_prove_himself_in_time_is_overdue() -> None:
    clock = ManualClock()
    door = Admission[int](BOUNDS, clock)
    door.admit(1, "a")
    clock.sleep(3.0)
    door.admit(2, "b")
    door.prove(2)
    door.admit(3, "b")
    assert door.overdue() == []
    clock.sleep(2.0)
    assert door.overdue() == [1]
    clock.sleep(100.0)
    assert door.overdue() == [1, 3]
    door.leave(1)
    assert door.overdue() == [3]


@given(st.lists(st.tuples(st.sampled_from(["admit", "prove", "leave"]), st.integers(0, 40), st.integers(0, 3))))
def test_the_bounds_hold_whatever_comes(steps: list[tuple[str, int, int]]) -> None:
    door = Admission[int](BOUNDS, ManualClock())
    strangers, proven = dict[int, int](), set[int]()
    for step, guest, origin in steps:
        if step == "admit" and guest not in strangers and guest not in proven:
            leaves = door.admit(guest, f"10.0.0.{origin}")
            assert leaves not in proven
            if leaves is not None:
                strangers.pop(leaves, None)
            if leaves != guest:
                strangers[guest] = origin
        elif step == "prove" and guest in strangers:
            door.prove(guest)
            del strangers[guest]
            proven.add(guest)
        elif step == "leave":
            door.leave(guest)
            strangers.pop(guest, None)
            proven.discard(guest)
        assert len(strangers) <= BOUNDS.strangers
        assert len(strangers) + len(proven) <= BOUNDS.connections
        assert all(list(strangers.values()).count(one) <= BOUNDS.of_one_address for one in range(4))
