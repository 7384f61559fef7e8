"""Changes between snapshots lead from the one to the other, whatever they hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deeplink.console.feed import TABLES, change
from tests.deeplink.console.conftest import apply

_rows = st.dictionaries(
    st.sampled_from(["n0", "n1", "n2"]),
    st.fixed_dictionaries({"state": st.sampled_from(["idle", "down"]), "gpus": st.integers(0, 2)}),
)


def _documents(seq: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "seq": st.just(seq),
            "unix": st.floats(0, 10),
            "cluster": st.text(max_size=2),
            "headline": st.just({"mood": "good", "text": ""}),
            "interval_s": st.just(2.0),
            **dict.fromkeys(TABLES, _rows),
        }
    )


@given(_documents(1), _documents(2))
def test_a_change_leads_from_the_old_to_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert apply(old, change(old, new)) == new


def test_nothing_new_is_nearly_nothing() -> None:
    old = {"seq": 1, "unix": 1.0, "nodes": {"n0": {"state": "idle"}}}
    assert change(old, {**old, "seq": 2, "unix": 2.0}) == {
        "after": 1,
        "meta": {"seq": 2, "unix": 2.0},
        "set": {},
        "gone": {},
    }
