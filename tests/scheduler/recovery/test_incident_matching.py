"""One fault is one incident: who sees it first makes its id, others make the same, and several jobs share one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.incident_merging import LONGEST_S, is_same
from deeplink.scheduler.recovery.records import (
    Action,
    ActionRecord,
    Beat,
    Incident,
    IncidentKind,
    IncidentOutcome,
    Phase,
    ProgressPoint,
    RankStack,
    end_id,
    incident_id,
)

FIRST, AGAIN, ANEW = Attempt(2, 0, 0), Attempt(2, 0, 1), Attempt(2, 1, 0)
OTHER = Attempt(3, 0, 0)


def hit(
    kind: IncidentKind,
    node: str | None = "n5",
    attempt: Attempt | None = FIRST,
    began: float = 100.0,
    **more: object,
) -> Incident:
    plain = Incident(
        id=end_id(attempt) if attempt else incident_id(None, kind, node or ""),
        kind=kind,
        node=NodeName(node) if node else None,
        attempt=attempt,
        evidence=f"{kind} of {node}",
        began_unix=began,
        detected_unix=began + 3.0,
    )
    return dataclasses.replace(plain, **more)  # type: ignore[arg-type] # each test names fields of Incident


def over(incident: Incident, unix: float) -> Incident:
    return dataclasses.replace(incident, outcome=IncidentOutcome.RECOVERED, recovered_unix=unix)


SILENT = hit(IncidentKind.NODE_SILENT)
SAME = {
    "the watchdog reaches its verdict when the next attempt runs": (
        SILENT,
        hit(IncidentKind.NODE_DEAD, attempt=AGAIN),
    ),
    "that one trains already": (over(SILENT, 108.0), hit(IncidentKind.NODE_DEAD, attempt=AGAIN, began=101.0)),
    "the next attempt loses it again before it trains": (
        SILENT,
        hit(IncidentKind.JOB_STRANDED, attempt=AGAIN, began=160),
    ),
    "another job had the node": (SILENT, hit(IncidentKind.NODE_DEAD, attempt=OTHER, began=102.0)),
    "it had rebooted, and the job is stranded by it": (
        hit(IncidentKind.NODE_REBOOTED),
        hit(IncidentKind.JOB_STRANDED, attempt=AGAIN, began=130.0),
    ),
    "its rank failed first": (
        hit(IncidentKind.RANK_FAILED),
        hit(IncidentKind.NODE_SILENT, attempt=AGAIN, began=105.0),
    ),
    "two nodes of one job are lost at once": (SILENT, hit(IncidentKind.NODE_DEAD, "n6", AGAIN, 102.0)),
    "storage stands still for two jobs": (
        hit(IncidentKind.STORAGE_FROZEN, None),
        hit(IncidentKind.STORAGE_FROZEN, None, OTHER, 104.0),
    ),
}
APART = {
    "another node, later": (SILENT, hit(IncidentKind.NODE_DEAD, "n6", AGAIN, 110.0)),
    "another node, of another job": (SILENT, hit(IncidentKind.NODE_DEAD, "n6", OTHER)),
    "another node, when the job trains again": (
        over(SILENT, 101.0),
        hit(IncidentKind.NODE_DEAD, "n6", AGAIN, 107.0),
    ),
    "long after it was over": (over(SILENT, 108.0), hit(IncidentKind.NODE_SILENT, attempt=AGAIN, began=140.0)),
    "the same, to another job": (over(SILENT, 108.0), hit(IncidentKind.NODE_SILENT, attempt=OTHER, began=140.0)),
    "it came back, and another job loses it": (
        hit(IncidentKind.NODE_CUT_OFF),
        hit(IncidentKind.NODE_SILENT, attempt=OTHER, began=140.0),
    ),
    "without an end, and hours ago": (SILENT, hit(IncidentKind.NODE_DEAD, attempt=AGAIN, began=110.0 + LONGEST_S)),
    "it is sick, and lost": (hit(IncidentKind.NODE_SICK, attempt=None), SILENT),
    "another job is stranded": (SILENT, hit(IncidentKind.JOB_STRANDED, None, OTHER)),
    "its ranks failed for themselves, and the node was lost later": (
        hit(IncidentKind.RANK_FAILED),
        hit(IncidentKind.NODE_SILENT, attempt=AGAIN, began=160.0),
    ),
    "ranks of two attempts fail": (hit(IncidentKind.RANK_FAILED), hit(IncidentKind.RANK_FAILED, "n6", AGAIN)),
    "the application failed in another attempt": (
        hit(IncidentKind.RANK_FAILED),
        hit(IncidentKind.APPLICATION_FAILED, None, AGAIN),
    ),
}


def same(old: Incident, new: Incident) -> bool:
    return is_same(old, new, shares_node=old.node == new.node)


@pytest.mark.parametrize("case", SAME)
def test_what_is_one_fault_of_two_attempts_or_jobs(case: str) -> None:
    assert same(*SAME[case])


@pytest.mark.parametrize("case", APART)
def test_what_is_another_fault(case: str) -> None:
    assert not same(*APART[case])


def test_a_clock_that_was_set_back_by_a_minute_makes_no_second_incident() -> None:
    assert same(SILENT, hit(IncidentKind.NODE_DEAD, attempt=AGAIN, began=40.0))


@pytest.fixture(params=[False, True], ids=["wal", "shared"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite", shared_file_system=request.param) as opened:
        yield opened


def trains(journal: Journal, attempt: Attempt, unix: float, *incidents: Incident) -> None:
    point = ProgressPoint(attempt=attempt, step=1, unix=unix)
    journal.record_beat(
        Beat(attempt=attempt, phase=Phase.RUNNING, progress=(point,), incidents=incidents), now_unix=unix
    )


EYES = (
    hit(IncidentKind.RANK_FAILED, "n5", began=100.5),  # the launcher, of the first sign
    hit(IncidentKind.NODE_SILENT, "n5"),  # the launcher, a moment later
    hit(IncidentKind.LAUNCHER_LOST, None, began=101.0),  # an agent, should the batch host be gone
    hit(IncidentKind.NODE_DEAD, "n6", began=102.0),  # the watchdog, of another node that went with it
    hit(IncidentKind.REQUEUE_HELD, None, began=160.0),  # what Slurm made of it
)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_an_attempt_ends_once_whoever_sees_it_first(journal: Journal, order: tuple[int, ...]) -> None:
    for number in (*order, 3, 4):
        journal.record_incident(EYES[number])
    (known,) = journal.incidents()
    assert (known.id, known.attempt, known.began_unix) == ("2.0.0-end", FIRST, 100.0)
    assert all(eye.evidence in known.evidence for eye in EYES)
    assert [one.id for name in ("n5", "n6") for one in journal.incidents(node=name)] == [known.id] * 2
    trains(journal, AGAIN, 170.0)
    assert [(one.outcome, one.recovered_unix) for one in journal.incidents()] == [
        (IncidentOutcome.RECOVERED, 170.0)
    ]


def test_three_nodes_that_die_at_once_and_a_spare_beside_them_are_one_incident(journal: Journal) -> None:
    for name, began in (("n4", 100.0), ("n5", 100.4), ("n6", 101.1)):
        journal.record_incident(hit(IncidentKind.NODE_DEAD, name, began=began))
    spare = hit(IncidentKind.NODE_SILENT, "n7", AGAIN, 102.0, id=incident_id(AGAIN, "node-silent", "n7"))
    assert spare.id == "2.0.1-node-lost-n7"
    assert journal.record_incident(over(spare, 104.0)).outcome is IncidentOutcome.OPEN, "the job waits still"
    assert len(journal.incidents()) == 1
    assert all(journal.incidents(node=name) for name in ("n4", "n5", "n6", "n7"))


def test_a_launcher_that_is_started_again_and_a_node_that_dies_meanwhile_are_two(journal: Journal) -> None:
    """What is true: each would have been an incident without the other, and the first one is over already."""
    restarted = hit(IncidentKind.LAUNCHER_RESTARTED, None, id=incident_id(FIRST, "launcher-restarted"))
    journal.record_incident(over(restarted, 101.0))
    journal.record_incident(SILENT)
    assert [(one.kind, one.outcome.value) for one in journal.incidents()] == [
        ("node-silent", "open"),
        ("launcher-restarted", "recovered"),
    ]


def test_what_comes_again_under_an_id_is_another_incident_and_what_is_told_late_is_not(journal: Journal) -> None:
    sick = hit(IncidentKind.NODE_SICK, attempt=None)
    first = journal.record_incident(sick)
    journal.record_incident(over(sick, 110.0))
    assert journal.record_incident(sick).outcome is IncidentOutcome.RECOVERED, "told once more"
    again = journal.record_incident(dataclasses.replace(sick, began_unix=130.0, detected_unix=131.0))
    assert (again.id, again.outcome) == (f"{first.id}@2", IncidentOutcome.OPEN)
    assert journal.record_incident(dataclasses.replace(sick, began_unix=140.0)).id == again.id
    journal.record_incident(over(again, 150.0))
    third = journal.record_incident(dataclasses.replace(sick, began_unix=160.0, detected_unix=160.0))
    assert third.id == f"{first.id}@3"
    assert journal.newest_incident(first.id) == third
    assert [one.id for one in journal.incidents()] == [third.id, again.id, first.id]


def test_what_an_older_version_left_open_under_its_own_id_is_gone_on_with(journal: Journal) -> None:
    old = hit(IncidentKind.NODE_SILENT, id="2.0.0-node-silent-n5")
    sick = hit(IncidentKind.NODE_SICK, attempt=None, id="cluster-node-sick-n4@1764201600", node=NodeName("n4"))
    for one in (old, sick):
        journal.record_incident(one)
    assert journal.record_incident(hit(IncidentKind.NODE_DEAD)).id == old.id
    assert journal.record_incident(hit(IncidentKind.NODE_SICK, "n4", None)).id == sick.id
    assert {one.id for one in journal.incidents()} == {old.id, sick.id}


def test_another_job_of_the_same_number_has_incidents_of_its_own(journal: Journal) -> None:
    failed = dataclasses.replace(SILENT, outcome=IncidentOutcome.FAILED)
    journal.record_incident(failed)
    held = hit(IncidentKind.REQUEUE_HELD, None, began=500.0)
    assert journal.record_incident(held).id == SILENT.id, "its launcher failed, and Slurm holds it"
    year = 3.2e7
    later = hit(IncidentKind.RANKS_HUNG, None, began=100.0 + year)
    assert journal.record_incident(later).id == f"{SILENT.id}@2"
    journal.record_incident(dataclasses.replace(later, outcome=IncidentOutcome.FAILED))
    assert [(one.began_unix, one.outcome.value) for one in journal.incidents()] == [
        (100.0 + year, "failed"),
        (100.0, "failed"),
    ]


def test_a_job_that_slurm_puts_back_for_a_controller_that_was_cut_off_opens_that_incident_again(
    journal: Journal,
) -> None:
    doubt = hit(IncidentKind.WATCHDOG_PARTITIONED, None, None)
    journal.record_incident(over(doubt, 120.0))
    held = hit(IncidentKind.REQUEUE_HELD, None, id=doubt.id, began=150.0)
    journal.record_incident(dataclasses.replace(held, began_unix=100.0))
    (known,) = journal.incidents()
    assert (known.kind, known.outcome, known.attempt) == ("self-in-doubt", IncidentOutcome.OPEN, FIRST)
    other = hit(IncidentKind.REQUEUE_HELD, None, OTHER, id=doubt.id)
    journal.record_incident(other)
    trains(journal, ANEW, 170.0)
    assert [one.outcome for one in journal.incidents()] == [IncidentOutcome.OPEN], "another job waits"
    assert [one.attempt for one in journal.incidents(job=3)] == [OTHER]
    trains(journal, Attempt(3, 1, 0), 180.0)
    assert [one.outcome for one in journal.incidents(job=2)] == [IncidentOutcome.RECOVERED]
    assert journal.incidents()[0].recovered_unix == 180.0


def test_a_node_lost_across_attempts_is_one_incident_whichever_id_is_told_later(journal: Journal) -> None:
    kept = journal.record_incident(SILENT)
    dead = hit(IncidentKind.NODE_DEAD, attempt=AGAIN)
    assert journal.record_incident(dead).id == kept.id
    found = journal.incident(dead.id)
    assert found is not None
    assert (found.number, found.kind, found.attempt) == (kept.number, "node-silent", FIRST)
    trains(journal, AGAIN, 110.0)
    journal.record_incident(dataclasses.replace(dead, action=Action.DRAIN))  # hours later, under its own id
    (known,) = journal.incidents()
    assert (known.outcome, known.recovered_unix, known.action) == (IncidentOutcome.RECOVERED, 110.0, "drain")
    assert [one.attempt for one in journal.incidents(job=2)] == [AGAIN]


def test_nodes_that_a_job_loses_at_once_are_one_incident_that_is_found_by_each_of_them(journal: Journal) -> None:
    theirs = [hit(IncidentKind.NODE_DEAD, name, began=began) for name, began in (("n5", 100.0), ("n6", 102.0))]
    for one in theirs:
        journal.record_incident(one)
    journal.record_incident(SILENT)
    (known,) = journal.incidents()
    assert "node-dead of n5" in known.evidence
    assert "node-dead of n6" in known.evidence
    for name in ("n5", "n6"):
        assert [one.id for one in journal.incidents(node=name)] == [known.id]
    trains(journal, AGAIN, 110.0)
    assert [one.outcome for one in journal.incidents(job=2)] == [IncidentOutcome.RECOVERED]


def test_a_launchers_failed_opens_again_while_its_job_waits_for_the_same_node(journal: Journal) -> None:
    journal.record_incident(SILENT)
    journal.record_incident(dataclasses.replace(SILENT, outcome=IncidentOutcome.FAILED))
    journal.record_incident(hit(IncidentKind.JOB_STRANDED, attempt=AGAIN, began=130.0))
    (known,) = journal.incidents()
    assert known.outcome is IncidentOutcome.OPEN
    trains(journal, ANEW, 170.0)
    assert [one.outcome for one in journal.incidents()] == [IncidentOutcome.RECOVERED]


def test_a_node_that_two_jobs_lose_is_one_incident_and_each_job_is_told_its_own_part(journal: Journal) -> None:
    journal.record_incident(SILENT)
    journal.record_incident(hit(IncidentKind.NODE_DEAD, attempt=OTHER, began=101.0))
    (known,) = journal.incidents()
    assert "job 3: node-dead of n5" in known.evidence
    assert any("job 3" in moment.what for moment in known.timeline)
    for job, attempt in ((2, FIRST), (3, OTHER)):
        (theirs,) = journal.incidents(job=job)
        assert (theirs.id, theirs.attempt, theirs.outcome) == (known.id, attempt, IncidentOutcome.OPEN)
    for _ in range(2):
        trains(journal, AGAIN, 110.0)
    assert [one.outcome for one in journal.incidents(job=2)] == [IncidentOutcome.RECOVERED]
    assert [one.outcome for one in journal.incidents(job=3)] == [IncidentOutcome.OPEN], "it waits still"
    assert len(journal.incidents(only_open=True)) == 1
    trains(journal, Attempt(3, 0, 1), 130.0)
    (known,) = journal.incidents()
    assert (known.outcome, known.recovered_unix) == (IncidentOutcome.RECOVERED, 130.0)
    assert [moment.what for moment in known.timeline].count("job 2 trains again") == 1


def test_a_launchers_word_that_it_goes_on_is_not_the_other_jobs(journal: Journal) -> None:
    journal.record_incident(SILENT)
    journal.record_incident(hit(IncidentKind.NODE_SILENT, attempt=OTHER))
    journal.record_incident(over(SILENT, 108.0))
    assert [one.outcome for one in journal.incidents()] == [IncidentOutcome.OPEN]
    journal.close_incidents(3, IncidentOutcome.FAILED, 150.0)
    (known,) = journal.incidents()
    assert known.outcome is IncidentOutcome.FAILED
    assert known.timeline[-1].what == "the job ended: failed"


LEAF = hit(IncidentKind.SWITCH_SUSPECT, None, FIRST, id="cluster-switch-suspect-leaf1@100", evidence="the switch")
BELOW = (NodeName("n4"), NodeName("n5"))


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_cut_leaf_is_one_incident_named_after_the_leaf(journal: Journal, early: bool) -> None:
    theirs = (SILENT, hit(IncidentKind.NODE_SILENT, "n4", OTHER, 101.0))
    elsewhere = hit(IncidentKind.NODE_SILENT, "n0", Attempt(9, 0, 0), 80.0)
    journal.record_incident(elsewhere)
    numbers: list[int] = []
    if early:
        numbers = [journal.record_incident(one).number for one in theirs]
        journal.record_incident(
            dataclasses.replace(SILENT, stacks=(RankStack(rank=1, text="here"),)),
        )
        action = ActionRecord(key="k", incident=SILENT.id, remedy="drain", attempt=FIRST, node=NodeName("n5"))
        journal.begin_action(action)
    journal.record_incident(LEAF, BELOW)
    for one in theirs:
        assert journal.record_incident(one).id == LEAF.id
    assert {one.id for one in journal.incidents()} == {LEAF.id, elsewhere.id}
    known = journal.incident(LEAF.id)
    assert known is not None
    assert (known.kind, known.node, known.outcome) == ("switch-suspect", None, IncidentOutcome.OPEN)
    assert "node-silent of n5" in known.evidence
    assert [one.id for one in journal.incidents(node="n5")] == [LEAF.id]
    assert [journal.incident(str(number)) for number in numbers] == [known] * len(numbers)
    if early:
        assert [one.incident for one in journal.actions()] == [LEAF.id]
        assert [stack.text for stack in journal.stacks(LEAF.id)] == ["here"]
    trains(journal, AGAIN, 110.0)
    assert [one.outcome for one in journal.incidents(job=3)] == [IncidentOutcome.OPEN]
    trains(journal, Attempt(3, 0, 1), 115.0)
    assert [one.outcome for one in journal.incidents(kind="switch-suspect")] == [IncidentOutcome.RECOVERED]


def test_who_counts_the_starts_gives_the_launchers_incident_its_kind(journal: Journal) -> None:
    journal.record_incident(dataclasses.replace(hit(IncidentKind.RANK_FAILED), outcome=IncidentOutcome.FAILED))
    journal.record_incident(hit(IncidentKind.APPLICATION_FAILED, None))
    (known,) = journal.incidents()
    assert (known.kind, known.action) == ("application-failed", "none")
    journal.record_incident(hit(IncidentKind.RANK_FAILED))
    assert [one.kind for one in journal.incidents()] == ["application-failed"]
