"""What is hinted a job, by what it asks and how the cluster is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.cluster_survey import ClusterState, KnownFabric, Ties, parse, rooms_of
from deeplink.scheduler.placement.hint.decide import Surroundings, decide, fewest_leaves
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Why
from deeplink.scheduler.placement.request import DataResidency, NoPlacementError, Speeds
from tests.scheduler.placement.hint.clusters import line, nodes, now, site

FOUR = Ask(nodes=4, exclusive=True)
PATIENT = replace(FOUR, patience_s=60)


def decided(ask: Ask, state: ClusterState | None = None, **around: object) -> Decision:
    fabric = around.pop("site", site())
    assert isinstance(fabric, KnownFabric)
    return decide(ask, Surroundings(state or now(), fabric, **around)).decision  # type: ignore[arg-type]


def test_the_best_nodes_are_free() -> None:
    found = decided(FOUR)
    assert (found.kind, found.why, found.nodes) == (HintKind.NODES, Why.FREE_NOW, nodes("n0 n2 n4 n6"))
    assert found.expected == found.nodes
    assert [option.leaves for option in found.candidates] == [1, 1, 2, 2, 2]


def test_data_and_slow_links_count() -> None:
    held = DataResidency({NodeName("n1"): 5, NodeName("n5"): 5}, 10)
    assert decided(FOUR, residency=held).nodes == nodes("n1 n3 n5 n7")
    slow = KnownFabric(Ties(site().ties.fabric, Speeds({NodeName("n0"): 0.5})), site().slurm)
    assert decided(FOUR, site=slow).nodes == nodes("n1 n3 n5 n7")
    dead = KnownFabric(Ties(site().ties.fabric, Speeds(), frozenset(nodes("n0"))), site().slurm)
    assert decided(FOUR, site=dead).nodes == nodes("n1 n3 n5 n7")


def test_nodes_that_another_submission_gets_are_not_free() -> None:
    assert decided(FOUR, taken=frozenset(nodes("n0"))).nodes == nodes("n1 n3 n5 n7")
    both = decided(PATIENT, taken=frozenset(nodes("n0 n1")))
    assert (both.kind, both.why) == (HintKind.SWITCHES, Why.SCATTERED)


def test_where_too_few_are_free_few_leaves_are_waited_for() -> None:
    busy = now(busy="n0 n1 n2 n3 n4")
    found = decided(PATIENT, busy)
    assert (found.kind, found.why, found.switches, found.patience_s) == (HintKind.SWITCHES, Why.BUSY, 1, 60)
    assert (decided(FOUR, busy).kind, decided(FOUR, busy).why) == (HintKind.NOTHING, Why.BUSY)


def test_where_those_that_are_free_are_scattered_few_leaves_are_waited_for_or_the_best_taken() -> None:
    scattered = now(busy="n0 n1")
    found = decided(PATIENT, scattered)
    assert (found.kind, found.why, found.switches) == (HintKind.SWITCHES, Why.SCATTERED, 1)
    assert found.candidates[0].leaves == 2
    hasty = decided(FOUR, scattered)
    assert (hasty.kind, len(hasty.nodes)) == (HintKind.NODES, 4)


@pytest.mark.parametrize("ask", [replace(PATIENT, later="it is held"), replace(PATIENT, array=True)])
def test_who_does_not_start_now_is_bound_to_no_nodes(ask: Ask) -> None:
    found = decided(ask)
    assert (found.kind, found.why, found.nodes) == (HintKind.SWITCHES, Why.STARTS_LATER, ())


def test_nothing_is_wished_where_it_gains_nothing() -> None:
    all_of_them = decided(replace(PATIENT, nodes=8), now(busy="n0"))
    assert (all_of_them.kind, all_of_them.why) == (HintKind.NOTHING, Why.NOTHING_TO_GAIN)
    one = decided(replace(PATIENT, nodes=1, array=True))
    assert (one.kind, one.why) == (HintKind.NOTHING, Why.NOTHING_TO_GAIN)
    nowhere = decided(PATIENT, now(busy="n0 n1 n2 n3 n4"), site=KnownFabric())
    assert (nowhere.kind, nowhere.why) == (HintKind.NOTHING, Why.NOTHING_TO_GAIN)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (Ask(nodes=9), "partition main has 8"),
        (Ask(nodes=8, excluded=nodes("n0")), "without the excluded ones there are 7"),
        (Ask(nodes=1, features=("fast",)), "with fast there are 0"),
        (Ask(nodes=1, gpus=8), "with 8 GPUs each there are 0"),
        (Ask(nodes=1, gpus=1, gpu_type="h100"), "with 1 h100 GPU each there are 0"),
        (Ask(nodes=2, cpus=17), "with 17 CPUs each there are 0"),
        (Ask(nodes=2, memory_mib=70_000), "70,000 MiB each there are 0"),
        (Ask(nodes=1, partition="other"), "no partition other"),
    ],
)
def test_the_limit_that_is_in_the_way_is_named(ask: Ask, says: str) -> None:
    found = decided(ask)
    assert (found.kind, found.why) == (HintKind.NOTHING, Why.IMPOSSIBLE)
    assert says in found.words


def test_a_time_limit_over_the_partitions() -> None:
    found = decided(Ask(nodes=1, limit_s=3601), now(time="1:00:00"))
    assert found.why is Why.IMPOSSIBLE
    assert decided(Ask(nodes=1, limit_s=3600), now(time="1:00:00")).kind is HintKind.NODES


def test_nodes_that_are_down_are_waited_for_without_a_wish() -> None:
    state = parse("".join(line(f"n{number}", "down" if number < 5 else "idle") for number in range(8)))
    found = decided(FOUR, state)
    assert (found.kind, found.why) == (HintKind.NOTHING, Why.BUSY)


def test_a_partition_that_is_down_or_whose_jobs_share_cpus() -> None:
    assert decided(PATIENT, now(available="down")).kind is HintKind.SWITCHES
    assert decided(Ask(nodes=2), now(oversubscribe="FORCE:4")).why is Why.NOT_UNDERSTOOD


def test_shared_nodes_by_gpus_cpus_and_memory() -> None:
    half: dict[str, str] = {"state": "mixed", "gresused": "gpu:2", "cpus": "10/6/0/16", "allocmem": "60000"}
    state = parse("".join(line(f"n{number}", **(half if number % 2 else {})) for number in range(8)))
    assert rooms_of(Ask(nodes=2, gpus=2), state).free == 8
    assert rooms_of(Ask(nodes=2, gpus=3), state).free == 4
    assert rooms_of(Ask(nodes=2, cpus=7), state).free == 4
    assert rooms_of(Ask(nodes=2, memory_mib=5000), state).free == 4
    assert rooms_of(Ask(nodes=2, exclusive=True), state).free == 4
    assert decided(Ask(nodes=4, gpus=2), state).nodes == nodes("n1 n3 n5 n7")  # no idle node is opened
    whole = parse(
        "".join(
            line(f"n{number}", **(half if number % 2 else {}), oversubscribe="EXCLUSIVE") for number in range(8)
        )
    )
    assert rooms_of(Ask(nodes=2, gpus=2), whole).free == 4


def test_nodes_of_no_known_place_are_noted() -> None:
    found = decided(FOUR, now(10))
    assert found.notes == ("2 nodes of 10 hang on no switch that is known",)


@given(
    st.lists(
        st.sampled_from(["idle", "allocated", "mixed", "down", "idle+drain", "idle+planned"]),
        min_size=1,
        max_size=12,
    ),
    st.builds(Ask, nodes=st.integers(1, 13), exclusive=st.booleans(), patience_s=st.sampled_from([None, 0, 30])),
    st.integers(1, 4),
    st.sets(st.integers(0, 11)),
)
def test_a_wish_can_be_met(states: list[str], ask: Ask, leaves: int, taken: set[int]) -> None:
    wanted = ask.nodes
    state = parse("".join(line(f"n{number}", one) for number, one in enumerate(states)))
    busy = frozenset(NodeName(f"n{number}") for number in taken)
    found = decided(ask, state, site=site(12, leaves), taken=busy)
    if found.kind is HintKind.NODES:
        assert len(set(found.nodes)) == wanted
        assert not busy & set(found.nodes)
        assert all(state.nodes[node].ready for node in found.nodes)
    if found.kind is HintKind.SWITCHES:
        alive = [node for node, one in state.nodes.items() if not one.dead]
        assert found.switches == fewest_leaves(site(12, leaves).slurm, alive, wanted) < min(wanted, leaves)
        assert found.patience_s == ask.patience_s
    assert found.words
    assert wanted <= len(states) or found.why is Why.IMPOSSIBLE


def test_no_default_partition() -> None:
    with pytest.raises(NoPlacementError, match="default"):
        rooms_of(Ask(nodes=1), parse(line("n0", partition="main")))


def test_a_reason_to_wish_nothing_is_passed_on() -> None:
    found = decided(Ask(no_wish="because"))
    assert (found.kind, found.words) == (HintKind.NOTHING, "because")


def test_nodes_whose_gpus_cannot_be_read_count_as_busy_and_that_is_said() -> None:
    ask = Ask(nodes=4, gpus=4)
    odd = "".join(line(f"n{n}", gresused="gpu:(null):0(IDX:" if n % 2 else "gpu:0") for n in range(8))
    found = decided(ask, parse(odd))
    assert set(found.nodes) == set(nodes("n0 n2 n4 n6"))
    assert any("n1, n3, n5, n7" in note and "not understood" in note for note in found.notes)
    rooms = rooms_of(ask, parse("".join(line(f"n{n}", gres="gpu:(4") for n in range(4))))
    assert (rooms.able, rooms.free) == (4, 0), "it cannot be said that they lack GPUs, nor that they are free"
    assert not decided(replace(ask, gpus=0, exclusive=True), parse(odd)).notes, "GPUs do not matter to this one"
