"""What sinfo says of nodes and partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.ask import FIELDS, SEPARATOR
from deeplink.scheduler.placement.hint.cluster_survey import ClusterState, parse
from deeplink.scheduler.slurm.states import SlurmTextError
from tests.scheduler.placement.hint.clusters import line

# As `sinfo` of 22.05.8 printed it: a node that runs a job of one CPU, one that is planned for another job.
RECORDED = (
    "n0|main*|up|infinite|NO|mixed|(null)|gpu:2|gpu:1|1/3/0/4|4000|1000|\n"
    "n1|main*|up|infinite|NO|idle+planned|(null)|gpu:2|gpu:0|0/4/0/4|4000|0|\n"
    "n1|short|up|1:00:00|EXCLUSIVE|idle+planned|(null)|gpu:2|gpu:0|0/4/0/4|4000|0|\n"
)


def test_nodes_and_partitions() -> None:
    found = parse(RECORDED)
    assert (found.default, list(found.partitions)) == ("main", ["main", "short"])
    assert found.partitions["main"].nodes == ("n0", "n1")
    assert (found.partitions["short"].limit_s, found.partitions["short"].whole) == (3600, True)
    first, second = found.nodes[NodeName("n0")], found.nodes[NodeName("n1")]
    assert (first.ready, first.idle, first.free_cpus, first.free_mib, first.free_gpus()) == (
        True,
        False,
        3,
        3000,
        1,
    )
    assert (second.ready, second.idle, second.dead) == (False, True, False)


@pytest.mark.parametrize(
    ("state", "dead", "ready"),
    [
        ("idle", False, True),
        ("mixed", False, True),
        ("allocated", False, False),
        ("idle+cloud", False, True),
        ("idle*", True, False),
        ("down+not_responding", True, False),
        ("idle+drain", True, False),
        ("mixed+completing", False, False),
        ("idle+reserved", False, False),
        ("idle+powered_down", False, False),
        ("idle+maintenance", True, False),
        ("inval", True, False),
        ("unknown", True, False),
    ],
)
def test_what_a_state_means(state: str, dead: bool, ready: bool) -> None:
    node = parse(line("n0", state)).nodes[NodeName("n0")]
    assert (node.dead, node.ready) == (dead, ready)


@pytest.mark.parametrize("state", ["idle+dreaming", "dreaming"])
def test_a_node_in_a_state_of_a_newer_slurm_takes_no_job(state: str) -> None:
    assert not parse(line("n0", state)).nodes[NodeName("n0")].ready


def test_gpus_by_kind() -> None:
    node = parse(line("n0", gres="gpu:a100:4(S:0-1),gpu:a30:2", gresused="gpu:a100:1(IDX:0),gpu:a30:0(IDX:N/A)"))
    found = node.nodes[NodeName("n0")]
    assert (found.gpus(), found.gpus("a30"), found.free_gpus("a100"), found.free_gpus()) == (6, 2, 3, 5)


@pytest.mark.parametrize(
    "text", ["n0\n", "n0|main*|up\n", line("n0", cpus="?"), line("n0", time="whenever"), "\x00"]
)
def test_what_is_no_answer_is_said(text: str) -> None:
    with pytest.raises(SlurmTextError, match=r"what `sinfo` wrote"):
        parse(text)


def test_no_nodes() -> None:
    assert parse("") == ClusterState()


@given(
    st.text(max_size=60) | st.lists(st.text("n0|idle*/up+\n", max_size=8), min_size=12, max_size=13).map("|".join)
)
def test_any_text_is_a_cluster_or_an_error(text: str) -> None:
    try:
        found = parse(text)
    except SlurmTextError:
        return
    assert all(node in found.nodes for one in found.partitions.values() for node in one.nodes)


@given(st.integers(0, 40), st.integers(1, 3))
def test_as_many_nodes_as_there_are_lines(count: int, partitions: int) -> None:
    text = "".join(line(f"n{node}", partition=f"p{part}") for part in range(partitions) for node in range(count))
    found = parse(text)
    assert len(found.nodes) == count
    assert all(len(one.nodes) == count for one in found.partitions.values())


def test_the_question_asks_for_what_is_read() -> None:
    assert line("n0").count(SEPARATOR) == len(FIELDS)


@pytest.mark.parametrize(
    ("gres", "used", "there", "free"),
    [
        ("gpu:4(S:0-7)", "gpu:(null):4(IDX:0-3)", 4, 0),  # as 22.05 writes it where gres.conf tells Cores=
        ("gpu:4(S:0-7)", "gpu:(null):3(IDX:0,2-3)", 4, 1),
        ("gpu:4(S:0-7)", "gpu:(null):0(IDX:N/A)", 4, 4),
        ("gpu:4", "gpu:(null):4(IDX:", 4, None),
        ("gpu:(null", "gpu:0", None, None),
    ],
)
def test_what_is_not_understood_of_gpus_is_unknown_and_never_free(
    gres: str, used: str, there: int | None, free: int | None
) -> None:
    node = parse(line("n0", gres=gres, gresused=used)).nodes[NodeName("n0")]
    assert (node.gpus(), node.free_gpus()) == (there, free)
