"""A survey: one question to Slurm, and what is kept beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.cluster_survey import Ties
from deeplink.scheduler.placement.hint.making import SWITCHES_KEPT_S, Sources, survey
from deeplink.scheduler.placement.request import Speeds
from deeplink.scheduler.slurm.command import CommandTimeoutError
from deeplink.scheduler.topology.graph import Fabric
from tests.scheduler.placement.hint.clusters import line, site

SLURMS, SITES = site().slurm, site(leaves=4).slurm


class Slurm:
    """Says what it is told to, and counts."""

    def __init__(self, folder: Path, topology: Path | None = None) -> None:
        self.clock = ManualClock()
        self.nodes = 8
        self.asked = self.compiled = 0
        self.ties: Callable[[], Ties] = lambda: Ties(SLURMS)
        self.sources = Sources(
            run=self.run,
            clock=self.clock,
            folder=folder,
            cluster="/etc/slurm.conf",
            topology=topology,
            compiled=self.compile,
            switches=self.switches,
        )

    def run(self, argv: Sequence[str], /, *, timeout_s: float = 0.0) -> str:
        assert argv[0] == "sinfo"
        return "".join(line(f"n{number}") for number in range(self.nodes))

    def switches(self) -> Ties:
        self.asked += 1
        return self.ties()

    def compile(self, path: Path) -> Ties:
        self.compiled += 1
        if not path.read_text():
            raise DeepLinkError("nothing is in it")
        return Ties(SITES)


def test_switches_are_asked_for_once_in_a_while(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    for _ in range(3):
        now, found = survey(slurm.sources)
        assert (len(now.nodes), found.ties.fabric, found.slurm) == (8, SLURMS, SLURMS)
    assert slurm.asked == 1
    slurm.clock.now += SWITCHES_KEPT_S
    survey(slurm.sources)
    assert slurm.asked == 2


def test_nodes_that_were_not_there_then_renew_them(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    survey(slurm.sources)
    slurm.nodes = 9
    survey(slurm.sources)
    assert slurm.asked == 2


def test_a_cluster_without_switches_is_asked_once_too(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    slurm.ties = Ties
    for _ in range(2):
        assert survey(slurm.sources)[1].slurm == Fabric({})
    assert slurm.asked == 1


def test_switches_that_cannot_be_had_are_noted_and_the_old_ones_used(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    survey(slurm.sources)

    def hang() -> Ties:
        raise CommandTimeoutError(["scontrol"], 3)

    slurm.ties = hang
    slurm.clock.now += SWITCHES_KEPT_S
    found = survey(slurm.sources)[1]
    assert found.slurm == SLURMS
    assert "did not answer" in found.notes[0]


@pytest.mark.parametrize("text", ["", "{}", '{"unix": 1}', '{"unix": 1700001000.0, "ties": {}}', "[]", "\x00"])
def test_what_is_kept_and_damaged_is_asked_for_again(tmp_path: Path, text: str) -> None:
    slurm = Slurm(tmp_path)
    survey(slurm.sources)
    (kept,) = tmp_path.iterdir()
    kept.write_text(text)
    assert survey(slurm.sources)[1].slurm == SLURMS
    assert slurm.asked == 2


def test_the_sites_topology_is_compiled_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "fabric.yaml"
    file.write_text("a")
    slurm = Slurm(tmp_path / "kept", file)
    for text in ("a", "a", "bc", "bc"):
        if file.read_text() != text:
            file.write_text(text)
        found = survey(slurm.sources)[1]
        assert (found.ties.fabric, found.slurm) == (SITES, SLURMS)
    assert slurm.compiled == 2


@pytest.mark.parametrize("text", ["", None])
def test_a_topology_that_cannot_be_had_is_noted(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "fabric.yaml"
    if text is not None:
        file.write_text(text)
    found = survey(Slurm(tmp_path / "kept", file).sources)[1]
    assert found.ties.fabric == SLURMS
    assert str(file) in found.notes[0]


def test_a_folder_that_takes_no_writes_costs_the_keeping_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    slurm = Slurm(tmp_path / "file")
    for _ in range(2):
        assert survey(slurm.sources)[1].slurm == SLURMS
    assert slurm.asked == 2


names = st.text("nabc019-", min_size=1, max_size=4)
paths = st.lists(names, max_size=3).map(tuple)
shares = st.floats(0.01, 1.0)


@given(
    st.dictionaries(names.map(NodeName), paths, max_size=6),
    st.dictionaries(names.map(NodeName), shares, max_size=3),
    st.dictionaries(paths, shares, max_size=3),
    st.frozensets(names.map(NodeName)),
)
def test_ties_come_back_as_they_were(
    fabric: dict[NodeName, tuple[str, ...]],
    slow: dict[NodeName, float],
    links: dict[tuple[str, ...], float],
    dead: frozenset[NodeName],
) -> None:
    ties = Ties(Fabric(fabric), Speeds(slow, links), dead)
    assert Ties.parse(ties.document()) == ties


@given(
    st.dictionaries(
        st.sampled_from(["format", "leaves", "nodes", "links", "dead"]),
        st.none() | st.integers(0, 2) | st.lists(st.text()) | st.dictionaries(st.text(), st.floats()),
    )
)
def test_any_other_document_is_an_error(document: dict[str, object]) -> None:
    try:
        Ties.parse(document)
    except ValueError:
        return
    assert document["format"] == 1
