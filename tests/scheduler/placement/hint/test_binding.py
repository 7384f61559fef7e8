"""The mark of nodes hinted by name in a job's comment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.placement.hint.cluster_survey import is_wish, marked, naming, taking_back, unmarked
from deeplink.scheduler.recovery.recovery_steps import ours_in_comment, with_our_comment
from deeplink.scheduler.slurm.nodeset import unfold
from tests.scheduler.placement.hint.clusters import nodes

SOME = nodes("n0 n1 n4")


@pytest.mark.parametrize(
    ("comment", "required", "ours"),
    [
        ("deeplink-wish=n[0-1]", "n[0-1]", True),
        ("deeplink-wish=n[0-1] | of mine", "n0,n1", True),
        ("deeplink-wish=n[0-1]", "n[0-2]", False),  # its user has named others since
        ("deeplink-wish=n[0-1]", "", False),
        ("of mine | deeplink-wish=n[0-1]", "n[0-1]", False),
        ("deeplink-wish=n[0-", "n0", False),
        ("", "n0", False),
    ],
)
def test_nodes_are_a_wish_where_they_are_those_of_the_mark(comment: str, required: str, ours: bool) -> None:
    assert is_wish(comment, unfold(required)) is ours


@given(st.text(max_size=40))
def test_what_its_user_wrote_stays(comment: str) -> None:
    kept = unmarked(comment)
    assert unmarked(marked(comment, SOME)) == kept
    assert naming(comment, SOME) == {"ReqNodeList": "n[0-1,4]", "Comment": marked(comment, SOME)}
    assert taking_back(marked(comment, SOME)) == {"ReqNodeList": "", "Comment": kept}
    assert is_wish(marked(comment, SOME), SOME)


def test_the_mark_outlives_what_the_watchdog_writes_beside_it() -> None:
    held = with_our_comment(marked("mine", SOME), "deeplink: held")
    assert is_wish(held, SOME)
    assert ours_in_comment(unmarked(held)) == "deeplink: held"
