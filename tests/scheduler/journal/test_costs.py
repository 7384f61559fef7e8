"""What incidents cost: the formula, what is not known, and that nothing is charged twice."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.incident_json import NOTHING, Cost, charged, cost, totals, week_of
from deeplink.scheduler.recovery.records import Action, Incident, IncidentKind, IncidentOutcome

DEAD = Incident(
    id="17.0.0-node-dead-n1",
    kind=IncidentKind.NODE_DEAD,
    node=NodeName("n1"),
    attempt=Attempt(17, 0, 0),
    action=Action.DRAIN_DOWN,
    began_unix=1_700_000_000.0,
    detected_unix=1_700_000_003.0,
    recovered_unix=1_700_000_036.0,
    outcome=IncidentOutcome.RECOVERED,
    ranks=100,
    steps_repeated=18,
    step_s=2.0,
)


def test_the_formula() -> None:
    assert cost(DEAD) == Cost(standing_h=1.0, repeated_h=1.0)
    assert cost(DEAD).total_h == 2.0


@pytest.mark.parametrize(
    ("changes", "standing", "repeated"),
    [
        ({"recovered_unix": 0.0, "outcome": IncidentOutcome.OPEN}, None, None),
        ({"recovered_unix": 0.0, "outcome": IncidentOutcome.FAILED}, None, None),
        ({"ranks": 0}, None, None),
        ({"step_s": 0.0}, 1.0, None),
        ({"step_s": 0.0, "steps_repeated": 0}, 1.0, 0.0),
        ({"attempt": None}, 0.0, 0.0),
        ({"kind": IncidentKind.STRAGGLER, "action": Action.COMMENT, "steps_repeated": 0}, None, 0.0),
        ({"kind": IncidentKind.STRAGGLER, "action": Action.RELAUNCH}, 1.0, 1.0),
        ({"recovered_unix": 1_699_999_999.0, "steps_repeated": 0}, 0.0, 0.0),  # a clock that went back
    ],
)
def test_what_is_not_known_is_not_nothing(
    changes: dict[str, object], standing: float | None, repeated: float | None
) -> None:
    assert cost(dataclasses.replace(DEAD, **changes)) == Cost(standing, repeated)  # type: ignore[arg-type] # its own


def test_one_standstill_is_charged_once() -> None:
    seen_too = dataclasses.replace(
        DEAD, id="other", kind=IncidentKind.RANK_FAILED, node=None, began_unix=1_700_000_018.0
    )
    elsewhere = dataclasses.replace(DEAD, id="third", attempt=Attempt(17, 1, 0), node=NodeName("n2"))
    costs = charged([seen_too, DEAD, elsewhere])
    assert costs == {DEAD.id: Cost(1.0, 1.0), "other": NOTHING, "third": Cost(1.0, 1.0)}
    by_node = totals([seen_too, DEAD, elsewhere], lambda incident: incident.node or "-")
    assert [(total.name, total.lost_h) for total in by_node] == [("n1", 2.0), ("n2", 2.0), ("-", 0.0)]


def test_totals_tell_what_they_do_not_know() -> None:
    open_one = dataclasses.replace(
        DEAD, id="open", attempt=Attempt(18, 0, 0), outcome=IncidentOutcome.OPEN, recovered_unix=0.0
    )
    lost = dataclasses.replace(open_one, id="lost", attempt=Attempt(19, 0, 0), outcome=IncidentOutcome.FAILED)
    (total,) = totals([DEAD, open_one, lost], lambda incident: incident.kind)
    assert (total.incidents, total.open, total.failed, total.lost_h, total.unknown) == (3, 1, 1, 2.0, 2)
    assert totals([], lambda incident: incident.kind) == ()


incidents = st.lists(
    st.builds(
        lambda at, job, ranks, node: dataclasses.replace(
            DEAD,
            id=f"{at}-{job}-{ranks}-{node}",
            attempt=Attempt(job, 0, 0) if job else None,
            began_unix=1_700_000_000.0 + at * 86_400,
            recovered_unix=1_700_000_000.0 + at * 86_400 + 30,
            ranks=ranks,
            node=NodeName(node),
        ),
        st.integers(0, 60),
        st.integers(0, 3),
        st.integers(0, 64),
        st.sampled_from(["n0", "n1", "n2"]),
    ),
    max_size=30,
    unique_by=lambda incident: incident.id,
)


@given(incidents)
def test_by_whatever_they_are_told_the_sum_is_the_same(listed: list[Incident]) -> None:
    sums = [
        sum(total.lost_h for total in totals(listed, name))
        for name in (lambda _: "all", lambda hit: hit.kind, lambda hit: hit.node or "-", week_of)
    ]
    assert sums == pytest.approx([sums[0]] * 4)
