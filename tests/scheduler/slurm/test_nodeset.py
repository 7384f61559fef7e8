"""Node sets, held against what Slurm itself recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.slurm.nodeset import NodeSetError, fold, unfold

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / "1-busy"


def test_unfolding_agrees_with_scontrol() -> None:
    assert list(unfold("n[0-2,5,7]")) == (RECORDED / "scontrol-show-hostnames.txt").read_text().split()


def test_folding_agrees_with_scontrol() -> None:
    assert fold(["n5", "n0", "n2", "n1"]) == (RECORDED / "scontrol-show-hostlistsorted.txt").read_text().strip()


@given(st.sets(st.from_regex(r"[a-z]{1,3}-?[0-9]{1,4}", fullmatch=True), max_size=30))
def test_folding_and_unfolding_lose_nothing(names: set[str]) -> None:
    assert set(unfold(fold(names))) == names


@pytest.mark.parametrize("text", ["@all", "n[0-", "a!b", "n0 n1", "n&m", "*"])
def test_what_is_no_node_set_is_refused(text: str) -> None:
    with pytest.raises(NodeSetError) as caught:
        unfold(text)
    assert caught.value.text == text


def test_a_name_that_is_none_cannot_be_folded() -> None:
    with pytest.raises(NodeSetError):
        fold(["n0", ""])
