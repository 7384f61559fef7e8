"""The emulated choice is that of a real slurmctld, in states that were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduler.choices import Record, read_record
from benchmarks.scheduler.emulation import able_in, floor_of
from benchmarks.simulate.floor import Floor
from benchmarks.simulate.slurm_tree import slurm_choice
from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.topology.graph import Fabric

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / "5-tree"
ANSWERS = {"choices": 600, "uneven": 276}


@pytest.fixture(scope="module", params=ANSWERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def record(name: str) -> Record:
    return read_record(RECORDED / f"{name}.json.gz")


def test_all_recorded_choices_are_the_emulated_ones(record: Record, name: str) -> None:
    assert record.slurm == "22.05.8"
    floor = floor_of(record.shape)
    asked = [(used, answer) for used, answer in record.each() if not answer.switches]
    assert len(asked) == ANSWERS[name]
    for used, answer in asked:
        chosen = slurm_choice(floor, able_in(used, answer.gpus), answer.nodes)
        assert chosen == floor.chosen(unfold(answer.chosen)), answer


def test_a_job_that_ran_did_so_where_the_question_had_said(record: Record) -> None:
    for state in record.states:
        asked = {(one.nodes, one.gpus): one.chosen for one in state.answers if not one.switches}
        for one in state.answers:
            assert one.how != "salloc" or unfold(one.chosen) == unfold(asked[one.nodes, one.gpus])


def small_floor(leaf_of: dict[str, str]) -> Floor:
    fabric = Fabric({NodeName(node): ("core", leaf) for node, leaf in leaf_of.items()})
    return Floor(fabric.paths, fabric)


def test_the_tightest_leaf_that_has_room_and_its_first_nodes() -> None:
    floor = small_floor({"n0": "a", "n1": "a", "n2": "a", "n3": "b", "n4": "b"})
    chosen = slurm_choice(floor, floor.everyone, 2)
    assert chosen is not None
    assert floor.names(chosen) == ("n3", "n4")


def test_where_no_leaf_has_room_the_fullest_first_and_the_rest_where_it_fits() -> None:
    floor = small_floor({"n0": "a", "n1": "b", "n2": "b", "n3": "b", "n4": "c", "n5": "c"})
    chosen = slurm_choice(floor, floor.everyone, 4)
    assert chosen is not None
    assert floor.names(chosen) == ("n0", "n1", "n2", "n3")


@given(
    leaves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=20),
    known=st.integers(0, 20),
    able=st.integers(0, (1 << 20) - 1),
    wanted=st.integers(1, 20),
)
def test_it_takes_as_many_nodes_as_are_wanted_of_those_that_can(
    leaves: list[tuple[int, int]], known: int, able: int, wanted: int
) -> None:
    # Trees with several roots, leaves at unlike depths, and nodes that hang nowhere.
    paths = {
        NodeName(f"n{number}"): (f"root{root}", f"leaf{leaf}") if leaf else (f"root{root}",)
        for number, (root, leaf) in enumerate(leaves)
        if number < known
    }
    floor = Floor([NodeName(f"n{number}") for number in range(len(leaves))], Fabric(paths))
    able &= floor.everyone
    chosen = slurm_choice(floor, able, wanted)
    if able.bit_count() < wanted:
        assert chosen is None
    else:
        assert chosen is not None
        assert chosen.bit_count() == wanted
        assert not chosen & ~able
