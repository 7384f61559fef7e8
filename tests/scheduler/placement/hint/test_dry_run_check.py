"""A hint held against what Slurm itself would do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.decide import (
    Surroundings,
    Trial,
    Weighed,
    decide,
    settle,
    trial_of,
    without_wish,
)
from deeplink.scheduler.placement.hint.decision import Ask, HintKind, Why
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm.nodeset import unfold
from tests.scheduler.placement.hint.clusters import nodes, now, site

SAID = "sbatch: Job 13 to start at {} using 16 processors on nodes {} in partition main\n"


def trial(start: str, where: str) -> Trial:
    return trial_of(SAID.format(start, where), unfold)


def weighed(*, data: bool = False) -> Weighed:
    held = DataResidency({NodeName("n1"): 10}, 10) if data else DataResidency()
    return decide(Ask(nodes=4, exclusive=True), Surroundings(now(), site(), held))


NOW, LATER = "2026-11-21T22:24:24", "2026-11-21T22:29:23"


def test_what_slurm_says_is_read() -> None:
    found = trial(NOW, "n[1,3,5,7]")
    assert (found.start, found.nodes) == (NOW, nodes("n1 n3 n5 n7"))
    assert trial(LATER, "n1").start_s - found.start_s == 299.0


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_words_that_are_not_needed_are_passed_over(version: str) -> None:
    """26.05 says a letter more behind the time than 22.05 and 24.11."""
    said = Path(__file__).parents[3] / "data" / "slurm" / version / "1-busy"
    found = trial_of((said / "sbatch-test-only.txt.err").read_text(), unfold)
    assert (found.start[:10], found.nodes, found.refused) == ("2026-11-23", nodes("n2 n3"), "")
    refused = trial_of((said / "sbatch-test-only-refused.txt.err").read_text(), unfold)
    assert refused.refused == "allocation failure: Requested node configuration is not available"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "allocation failure: Requested node configuration is not available",
        SAID.format("Unknown", "n1"),
        "x\ny\n",
    ],
)
def test_what_is_no_start_is_a_refusal(text: str) -> None:
    found = trial_of(text, unfold)
    assert not found.start
    assert found.refused


@given(st.text(max_size=80))
def test_any_text_is_a_trial(text: str) -> None:
    assert trial_of(text, unfold).refused


@given(st.datetimes(), st.datetimes())
def test_the_later_of_two_is_told(one: object, other: object) -> None:
    first, second = (str(when).replace(" ", "T")[:19] for when in (one, other))
    found, beside = trial(first, "n1"), trial(second, "n1")
    assert (first < second) == (found.start_s < beside.start_s)


def test_slurms_own_choice_is_as_good() -> None:
    found = without_wish(weighed(), trial(NOW, "n[1,3,5,7]"))
    assert found is not None
    assert (found.kind, found.why, found.nodes) == (HintKind.NOTHING, Why.AS_GOOD, ())
    assert found.expected == nodes("n1 n3 n5 n7")


def test_slurms_own_choice_is_worse() -> None:
    assert without_wish(weighed(), trial(NOW, "n[0-3]")) is None


@pytest.mark.parametrize("where", ["n[0,2,4]", "m[1-4]"])
def test_where_slurms_own_choice_cannot_be_weighed_nothing_is_wished(where: str) -> None:
    found = without_wish(weighed(), trial(NOW, where))
    assert found is not None
    assert (found.kind, found.why, found.nodes) == (HintKind.NOTHING, Why.UNKNOWN, ())
    assert found.expected == unfold(where)


def test_slurms_own_choice_on_nodes_that_another_job_gets_cannot_be_weighed() -> None:
    around = Surroundings(now(), site(), taken=frozenset(nodes("n1")))
    found = without_wish(decide(Ask(nodes=4, exclusive=True), around), trial(NOW, "n[1,3,5,7]"))
    assert found is not None
    assert found.kind is HintKind.NOTHING


def test_slurm_would_not_take_the_job_at_all() -> None:
    found = without_wish(weighed(), Trial(refused="Invalid account"))
    assert found is not None
    assert (found.kind, found.why) == (HintKind.NOTHING, Why.IMPOSSIBLE)
    assert "Invalid account" in found.words


def test_a_wish_that_costs_no_time_stays() -> None:
    found = settle(weighed(data=True), trial(NOW, "n[0,2,4,6]"), trial("2026-11-21T22:24:25", "n[1,3,5,7]"))
    assert (found.kind, found.nodes) == (HintKind.NODES, nodes("n1 n3 n5 n7"))
    assert "Slurm's own choice, n0, n2, n4, n6: cost 4.25" in found.words


@pytest.mark.parametrize("wished", [trial(LATER, "n[1,3,5,7]"), Trial(refused="busy")])
def test_a_wish_with_which_it_would_start_later_goes(wished: Trial) -> None:
    found = settle(weighed(data=True), trial(NOW, "n[0,2,4,6]"), wished)
    assert (found.kind, found.why, found.nodes) == (HintKind.NOTHING, Why.LATER_WITH_IT, ())
    assert found.expected == nodes("n0 n2 n4 n6")
