"""The small summary beside an index: whole or not at all, and unknown rather than wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.replicate.residency import HeldSummary, UnknownHoldingError, held, note
from deeplink.core.types import NodeName

VERSION = "ab" * 16
NOW = 1_000_000.0
SIZES = {NodeName("n1"): 5, NodeName("n2"): 0}


def kept(catalog: Path, sizes: dict[NodeName, int], unix: float = NOW) -> None:
    note(catalog, "images", VERSION, sizes, total=10, unix=unix)


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "latest").write_text(f"{VERSION}\n")
    (folder / f"{VERSION}.arrow").touch()
    return tmp_path


@pytest.mark.parametrize("dataset", ["images", "images@abab", "deeplink://images", f"images@{VERSION}"])
def test_what_is_noted_is_found(catalog: Path, dataset: str) -> None:
    kept(catalog, SIZES)
    assert held(catalog, dataset, unix=NOW + 5) == HeldSummary(SIZES, 10)


def test_each_node_counts_as_it_was_told_last(catalog: Path) -> None:
    kept(catalog, SIZES)
    kept(catalog, {NodeName("n2"): 7, NodeName("n3"): 1}, NOW + 1)
    assert held(catalog, "images", unix=NOW + 5) == HeldSummary(
        {**SIZES, NodeName("n2"): 7, NodeName("n3"): 1}, 10
    )
    assert held(catalog, "images", unix=NOW + 5, old_s=4.5).bytes == {"n2": 7, "n3": 1}
    assert len(list((catalog / "images").iterdir())) == 3


def test_a_damaged_note_gives_way(catalog: Path) -> None:
    (catalog / "images" / f"{VERSION}.held").write_text("{")
    kept(catalog, SIZES)
    assert held(catalog, "images", unix=NOW) == HeldSummary(SIZES, 10)


def test_an_old_note_is_unknown(catalog: Path) -> None:
    kept(catalog, SIZES)
    with pytest.raises(UnknownHoldingError, match="40 days"):
        held(catalog, "images", unix=NOW + 40 * 86_400)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("images", "no command has looked"),
        ("images@ff", "0 versions"),
        ("other", "no such dataset"),
        ("../images", "NAME"),
        ("images@../x", "NAME"),
        ("", "NAME"),
    ],
)
def test_what_is_not_there_is_unknown(catalog: Path, dataset: str, says: str) -> None:
    with pytest.raises(UnknownHoldingError, match=says):
        held(catalog, dataset, unix=NOW)


def test_two_versions_that_begin_alike(catalog: Path) -> None:
    (catalog / "images" / f"{'ab' * 15}cd.arrow").touch()
    with pytest.raises(UnknownHoldingError, match="2 versions"):
        held(catalog, "images@ab", unix=NOW)


@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ).map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {
            "format": st.sampled_from([1, 2, "1"]),
            "nodes": st.dictionaries(
                st.text(), st.fixed_dictionaries({"bytes": st.integers() | st.text(), "unix": st.floats()})
            )
            | st.lists(st.integers()),
            "total": st.integers() | st.none(),
            "unix": st.floats() | st.text(),
        }
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_damage_is_unknown(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("catalog") / "images"
    folder.mkdir()
    (folder / "latest").write_text(VERSION)
    (folder / f"{VERSION}.held").write_bytes(data)
    try:
        found = held(folder.parent, "images", unix=0.0)
    except UnknownHoldingError:
        return
    assert found.total >= 0
    assert all(size >= 0 for size in found.bytes.values())
