"""What the model knows, by hand and as files; what a placement does to its ports and uplinks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model import (
    Algorithm,
    Constants,
    Job,
    NodeShare,
    Placement,
    Profile,
    ReadSpeeds,
    Scaling,
    constants_from,
    constants_text,
    profile_from,
    profile_text,
)
from tests.scheduler.placement.models import constants, jobs, placement, placements

A, B, C = ("core", "s0", "a"), ("core", "s0", "b"), ("core", "s1", "c")


def nodes(*paths: tuple[str, ...]) -> tuple[NodeShare, ...]:
    return tuple(NodeShare(4, 4, path) for path in paths)


def test_ranks_nodes_and_neighbours_are_counted() -> None:
    assert (placement("1342").ranks, placement("1342").busiest, placement("1342").neighbours) == (10, 4, 2)
    assert [placement(shape).neighbours for shape in ("4", "22", "211")] == [0, 1, 2]


def test_one_leaf_uses_no_uplink() -> None:
    assert Placement(nodes(A, A, A)).uplink_loads() == (0, 0)
    assert placement("444").uplink_loads() == (0, 0)


def test_a_ring_in_order_crosses_each_leaf_once_and_interleaved_at_every_node() -> None:
    assert Placement(nodes(A, A, A, B, B, B)).uplink_loads() == (1, 0)
    assert Placement(nodes(A, B, A, B, A, B)).uplink_loads() == (3, 0)


def test_above_the_leaves_only_what_leaves_a_spine_counts() -> None:
    assert Placement(nodes(A, B, C)).uplink_loads() == (1, 1)
    assert Placement(nodes(A, C, B, C)).uplink_loads() == (2, 2)


def test_degraded_links_weigh_more() -> None:
    weak = Placement(nodes(A, A, B), uplink_health={B: 0.25})
    assert weak.uplink_loads() == (4, 0)
    assert Placement((NodeShare(1, 4), NodeShare(1, 4, health=0.5))).port_load() == 2
    assert Placement((NodeShare(1, 4, health=0.5),)).port_load() == 0


def test_a_node_without_a_path_is_outside_every_leaf() -> None:
    assert Placement(nodes(A, A, ())).uplink_loads() == (1, 1)


@given(placements)
def test_no_leaf_has_more_flows_than_the_ring_has_crossings(drawn: Placement) -> None:
    paths = [node.path for node in drawn.nodes]
    crossings = sum(a != b for a, b in pairwise([*paths, paths[0]]))
    assert drawn.uplink_loads()[0] <= crossings
    assert (drawn.uplink_loads() == (0, 0)) == (crossings == 0)


@pytest.mark.parametrize("gpus", [0, 5])
def test_more_gpus_than_there_are_or_none_are_refused(gpus: int) -> None:
    with pytest.raises(DeepLinkError, match="from 1 to its 4"):
        NodeShare(gpus, 4)


def test_no_nodes_and_no_health_are_refused() -> None:
    with pytest.raises(DeepLinkError, match="nodes"):
        Placement(())
    with pytest.raises(DeepLinkError, match="health"):
        NodeShare(1, 4, health=0)
    with pytest.raises(DeepLinkError, match=r"uplinks of core\.s0\.a"):
        Placement(nodes(A), uplink_health={A: 2.0})


BY_HAND: dict[str, Any] = {"format": 1, "batch": 32, "sample_s": 0.0044, "gradient_bytes": 102e6}


@given(st.builds(Profile, jobs, st.none() | st.integers(1, 64)))
def test_a_profile_there_and_back(profile: Profile) -> None:
    assert profile_from(profile_text(profile), "file") == profile
    assert "\n" not in profile_text(profile)


def test_by_hand_three_values_do() -> None:
    found = profile_from(json.dumps(BY_HAND), "file")
    assert found == Profile(Job(batch=32, sample_s=0.0044, gradient_bytes=102e6))
    more = profile_from(json.dumps(BY_HAND | {"scaling": "strong", "algorithm": "ring"}), "file")
    assert (more.job.scaling, more.job.algorithm) == (Scaling.STRONG, Algorithm.RING)


def test_a_measured_step_of_one_rank_does_too() -> None:
    measured = {"format": 1, "batch": 32, "step_s": 0.15, "fixed_s": 0.022, "gradient_bytes": 102e6}
    assert profile_from(json.dumps(measured), "file").job.sample_s == pytest.approx(0.004)
    with pytest.raises(DeepLinkError, match="step_s"):
        profile_from(json.dumps(measured | {"sample_s": 0.004}), "file")
    with pytest.raises(DeepLinkError, match="'1', no number"):
        profile_from(json.dumps(measured | {"step_s": "1"}), "file")
    with pytest.raises(DeepLinkError, match="measured step"):
        profile_from(json.dumps(measured | {"step_s": 0.01}), "file")


def test_ranks_are_those_told_or_one_on_each_gpu() -> None:
    plain = profile_from(json.dumps(BY_HAND), "file")
    assert [plain.ranks(8), plain.ranks(0)] == [8, 1]
    assert profile_from(json.dumps(BY_HAND | {"ranks_per_node": 2}), "file").ranks(8) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format 1"),
        (json.dumps(BY_HAND | {"format": 2}), "format 1"),
        (json.dumps(BY_HAND | {"colour": "red"}), "colour"),
        ('{"format": 1, "batch": 3}', "gradient_bytes, sample_s"),
        (json.dumps(BY_HAND | {"sample_s": "fast"}), "'fast', no number"),
        (json.dumps(BY_HAND | {"sample_s": None}), "None, no number"),
        (json.dumps(BY_HAND | {"batch": 1.5}), "1.5, no whole number"),
        (json.dumps(BY_HAND | {"ranks_per_node": True}), "True, no number"),
        (json.dumps(BY_HAND | {"scaling": "odd"}), "weak or strong"),
        (json.dumps(BY_HAND | {"scaling": ["weak"]}), "weak or strong"),
    ],
)
def test_what_is_no_profile_is_named(text: str, problem: str) -> None:
    with pytest.raises(DeepLinkError, match=problem) as refused:
        profile_from(text, "bert.json")
    assert "bert.json" in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("values", [{"batch": 0}, {"overlap": 2}, {"ranks_per_node": 0}, {"sample_s": -1}])
def test_values_of_a_job_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DeepLinkError, match=r"must be|is no number"):
        profile_from(json.dumps(BY_HAND | values), "bert.json")


@given(constants)
def test_constants_there_and_back(known: Constants) -> None:
    assert constants_from(constants_text(known), "file") == known


def test_no_limit_is_null() -> None:
    stored = json.loads(constants_text(Constants()))
    assert stored["path_bandwidth"] is None
    assert stored["nic"] == {"bandwidth": 12e9, "latency_s": 14e-6}
    assert stored["reads"] == {"source_of_all": None}
    assert constants_from(json.dumps(stored), "file") == Constants()


@given(constants)
def test_what_was_written_before_reading_was_timed_is_read(known: Constants) -> None:
    older = json.loads(constants_text(replace(known, reads=ReadSpeeds()))) | {"format": 1}
    del older["reads"]
    assert constants_from(json.dumps(older), "file") == replace(known, reads=ReadSpeeds())


def changed(**values: Any) -> str:
    return json.dumps(json.loads(constants_text(Constants())) | values)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[]", "format 1 or 2"),
        ("{}", "format 1 or 2"),
        (changed(format=3), "format 1 or 2"),
        (changed(reads=None), "reads is no object"),
        (changed(reads={"local": 1, "moon": 1}), "reads is no object"),
        (changed(reads={"local": "fast"}), "'fast' is no number"),
        (changed(colour="red"), "colour"),
        ('{"format": 1, "nics": 1}', "gpu"),
        (changed(nic=3), "nic is no object"),
        (changed(nic={"bandwidth": 1}), "latency_s"),
        (changed(nic={"bandwidth": "fast", "latency_s": 0}), "'fast' is no number"),
        (changed(straggling=True), "True is no number"),
        (changed(nics=1.5), "1.5 is no number of ports"),
    ],
)
def test_what_are_no_constants_is_named(text: str, problem: str) -> None:
    with pytest.raises(DeepLinkError, match=problem) as refused:
        constants_from(text, "site.json")
    assert "site.json" in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"straggling": -1},
        {"nic": {"bandwidth": 0, "latency_s": 0}},
        {"straggling": None},
        {"reads": {"local": 0}},
    ],
)
def test_values_of_machines_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DeepLinkError, match=r"must be|is no number"):
        constants_from(changed(**values), "site.json")
