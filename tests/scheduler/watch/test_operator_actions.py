"""What operators ask for: done once, as agreed, by the loop; refused where anything has changed; written down."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.evidence import Remedy
from deeplink.scheduler.recovery.records import ActionRecord, Incident, IncidentKind, NodeRecord
from deeplink.scheduler.watch.operator_actions import (
    MOST_A_MINUTE,
    SETTLE_S,
    TooManyOperationsError,
)
from deeplink.scheduler.watch.operator_requests import (
    UNDO,
    OperationError,
    OperatorRequest,
    OperatorVerb,
    commands_of,
    reason_of,
)
from tests.scheduler.watch.operator_desk import Desk, ReasonedMachine
from tests.scheduler.watch.slurm_machine import HELD, Job, Killed
from tests.scheduler.watch.test_actor import Bench, Cluster, lose

N3 = NodeName("n3")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "watch.sqlite") as opened:
        yield opened


@dataclass
class Taken:
    """Stands where nodes hinted by name are looked after; counts."""

    looked: int = 0
    said: int = 0

    def look(self) -> None:
        self.looked += 1

    def unable(self) -> None:
        self.said += 1


@pytest.fixture
def desk(journal: Journal) -> Desk:
    return Desk(journal)


def test_a_node_is_drained_with_the_very_command_that_was_shown_and_resumed_by_its_undo(desk: Desk) -> None:
    plan = desk.plan("drain", "n3", why="fan is loud")
    assert not desk.machine.orders
    assert plan.undo == "resume"
    done = desk.record(desk.submit(plan))
    assert (done.outcome, desk.machine.orders) == ("", [])
    desk.actor.work()
    done = desk.record(done.request)
    assert done.outcome == "done", done
    assert desk.machine.orders == [" ".join(argv) for argv in plan.commands]
    assert list(done.commands) == [shlex.join(argv) for argv in plan.commands]
    assert desk.machine.reasons["n3"] == "operator ada: fan is loud"
    assert (done.person, done.why, done.asked_unix) == ("ada", "fan is loud", desk.clock.unix())
    assert desk.act(plan.undo, "n3", person="bo").outcome == "done"
    assert desk.machine.states["n3"] == "IDLE"
    assert [(each.verb, each.person) for each in desk.log.newest(["n3"])] == [("resume", "bo"), ("drain", "ada")]


def test_the_same_request_twice_does_one_thing(desk: Desk) -> None:
    plan = desk.plan("drain", "n3")
    name = desk.submit(plan)
    desk.submit(plan, name=name)
    desk.actor.work()
    desk.submit(plan, name=name)
    desk.actor.work()
    assert len(desk.machine.orders) == 1
    with pytest.raises(OperationError, match="something else"):
        desk.submit(desk.plan("drain", "n4"), name=name)


def test_what_has_changed_since_it_was_asked_refuses_it_and_is_named(desk: Desk) -> None:
    plan = desk.plan("drain", "n3")
    desk.machine.states["n3"], desk.machine.reasons["n3"] = "DOWN", "Not responding"
    name = desk.submit(plan)
    desk.actor.work()
    assert desk.record(name).outcome == "refused"
    assert "state was in service and is down" in desk.record(name).result
    later = desk.submit(desk.plan("drain", "n4"))
    desk.machine.states["n4"] = "IDLE+DRAIN"  # between the request and its turn
    desk.actor.work()
    assert "state was in service and is drained" in desk.record(later).result
    assert not desk.machine.orders


@pytest.mark.parametrize("saw", ["", "{}", "null", "[1]", '{"state": 3}', "not JSON"])
def test_an_agreement_to_nothing_that_was_shown_does_nothing(desk: Desk, saw: str) -> None:
    plan = desk.plan("drain", "n3")
    name = desk.submit(plan, saw=saw or "{")
    desk.actor.work()
    assert desk.record(name).outcome == "refused"
    assert not desk.machine.orders


def test_a_node_that_somebody_else_drained_is_resumed_by_force_alone_and_he_is_named(desk: Desk) -> None:
    desk.machine.by, desk.machine.states["n3"] = "carla", "IDLE+DRAIN"
    desk.machine.reasons["n3"] = "deeplink: looks like ours"  # a tag that anybody can write
    refused = desk.act("resume", "n3")
    assert refused.outcome == "refused"
    assert "carla: deeplink: looks like ours" in refused.result
    assert not desk.machine.orders
    plan = desk.plan("resume", "n3", force=True)
    assert "carla" in plan.remarks[0]
    assert desk.act("resume", "n3", force=True).outcome == "done"


def test_what_the_watchdog_drained_by_itself_is_ours(desk: Desk, journal: Journal) -> None:
    drained = ActionRecord(key="k", incident="i", remedy=Remedy.DRAIN, attempt=None, node=N3, began_unix=1.0)
    journal.begin_action(drained)
    desk.machine.states["n3"], desk.machine.reasons["n3"] = "IDLE+DRAIN", "deeplink: node-sick-n3@1"
    assert desk.act("resume", "n3").outcome == "done"


def test_a_node_whose_checks_find_fault_is_not_resumed_without_force(desk: Desk, journal: Journal) -> None:
    assert desk.act("drain", "n3").outcome == "done"
    found = Finding(check="disk", severity=Severity.ERROR, text="full", since_unix=1.0)
    journal.record_node(NodeRecord(name=N3, seen_unix=desk.clock.unix(), health=(found,)))
    refused = desk.act("resume", "n3")
    assert (refused.outcome, "disk: full" in refused.result) == ("refused", True)
    assert desk.act("resume", "n3", force=True).outcome == "done"


@pytest.mark.parametrize("verb", ["drain", "resume", "release", "cancel"])
@pytest.mark.parametrize("death", ["before", "after", "unheard"])
def test_killed_at_its_command_it_is_finished_by_the_next_watchdog_and_done_once(
    journal: Journal, verb: str, death: str
) -> None:
    held = Job(17, state="PENDING", reason=HELD)
    desk = Desk(journal, ReasonedMachine(jobs={17: held}))
    target = "17" if verb in {"release", "cancel"} else "n3"
    if verb == "resume":
        desk.act("drain", "n3")
    before = len(desk.machine.orders)
    desk.machine.deaths = {desk.machine.count + 1: death}
    name = desk.submit(desk.plan(verb, target))
    try:
        desk.actor.work()
    except Killed:
        desk.start()
    desk.actor.work()
    desk.actor.work()
    assert desk.record(name).outcome == "done", desk.said
    assert len(desk.machine.orders) == before + 1


def test_slurm_says_no_and_that_is_what_is_told(desk: Desk) -> None:
    desk.machine.rights = False
    failed = desk.act("drain", "n3")
    assert (failed.outcome, failed.result) == ("failed", "Slurm refused: slurm_update error: Invalid user id")


def test_a_command_without_effect_is_not_called_done(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.machine, "_obey", lambda _argv: "")
    name = desk.submit(desk.plan("drain", "n3"))
    assert desk.actor.work()
    desk.clock.now += SETTLE_S + 1.0
    desk.actor.work()
    assert desk.record(name).outcome == "failed"
    assert "still shows" in desk.record(name).result


def test_jobs_are_released_and_cancelled_and_what_is_over_is_not(journal: Journal) -> None:
    jobs = {17: Job(17, state="PENDING", reason=HELD), 18: Job(18, nodes=("n0",)), 19: Job(19, state="COMPLETED")}
    desk = Desk(journal, ReasonedMachine(jobs=jobs))
    assert desk.act("release", "17").outcome == "done"
    assert "is not held" in desk.act("release", "18").result
    assert desk.act("cancel", "18").outcome == "done"
    assert "has ended: COMPLETED" in desk.act("cancel", "19").result
    assert "knows no job 20" in desk.act("cancel", "20").result
    assert desk.machine.orders == ["scontrol release 17", "scancel --quiet 18"]


def test_a_restart_is_an_action_of_the_watchdogs_own(journal: Journal) -> None:
    desk = Desk(journal, ReasonedMachine(jobs={17: Job(17, nodes=("n0", "n1"))}))
    name = desk.submit(desk.plan("requeue", "17"))
    desk.actor.work()
    (action,) = journal.actions(only_open=True)
    assert (action.remedy, action.attempt, action.reason) == (Remedy.RESTART, Attempt(17, 0, 0), "fan")
    assert desk.actor.work()
    journal.end_action(action.key, "running again", desk.clock.unix())
    desk.actor.work()
    assert (desk.record(name).outcome, desk.record(name).result) == ("done", "running again")


def test_no_requeue_is_begun_while_a_node_of_the_job_does_not_answer(journal: Journal) -> None:
    desk = Desk(journal, ReasonedMachine(jobs={17: Job(17, nodes=("n0", "n1"))}, dead={"n1"}))
    plan = desk.plan("requeue", "17")
    assert "n1 does not answer" in plan.refused
    assert desk.act("requeue", "17").outcome == "refused"
    assert not journal.actions()


def test_an_incident_is_acknowledged_and_opened_again_in_its_own_course(desk: Desk, journal: Journal) -> None:
    kept = journal.record_incident(
        Incident(
            id="node-sick-n3@1",
            kind=IncidentKind.NODE_SICK,
            node=N3,
            evidence="x",
            began_unix=1.0,
            detected_unix=2.0,
        )
    )
    assert desk.act("acknowledge", str(kept.number)).outcome == "done"
    assert "acknowledged already, by ada: fan" in desk.act("acknowledge", kept.id, person="bo").result
    assert desk.act("reopen", kept.id, person="bo").outcome == "done"
    known = journal.incident(kept.id)
    assert known is not None
    told = [moment.what for moment in known.timeline]
    assert told[-2:] == ["acknowledged by ada: fan", "opened again by bo: fan"]
    with pytest.raises(OperationError, match="no incident"):
        desk.plan("acknowledge", "node-sick-n9@1")


def test_a_pause_outlives_the_watchdog_and_is_taken_back(desk: Desk) -> None:
    assert desk.act("pause-watchdog", "").outcome == "done"
    assert desk.actor.paused == "ada: fan"
    desk.start()
    desk.actor.work()
    assert desk.actor.paused == "ada: fan"
    assert "paused already" in desk.act("pause-watchdog", "").result
    assert desk.act("resume-watchdog", "", person="bo").outcome == "done"
    assert not desk.actor.paused
    assert not desk.machine.orders


def test_a_watchdog_that_only_observes_changes_nothing_but_its_record(journal: Journal) -> None:
    desk = Desk(journal, acts=False)
    kept = journal.record_incident(
        Incident(
            id="node-sick-n3@1",
            kind=IncidentKind.NODE_SICK,
            node=N3,
            evidence="x",
            began_unix=1.0,
            detected_unix=2.0,
        )
    )
    plan = desk.plan("drain", "n3")
    assert "only observes" in plan.refused
    assert plan.commands, "to be run by hand"
    assert desk.act("drain", "n3").outcome == "refused"
    assert desk.act("acknowledge", kept.id).outcome == "done"


def test_so_many_a_minute_for_each_person(desk: Desk) -> None:
    for number in range(MOST_A_MINUTE):
        desk.act("drain" if number % 2 == 0 else "resume", "n3")
    with pytest.raises(TooManyOperationsError):
        desk.act("drain", "n3")
    assert desk.act("drain", "n3", person="bo").outcome == "done"
    desk.clock.now += 60.0
    assert desk.act("resume", "n3").outcome == "done"
    assert set(desk.actor._asked) == {"ada"}, "who asked long ago is forgotten"


def test_other_names_make_no_more_of_what_one_user_may_ask_for(desk: Desk) -> None:
    def ask(number: int) -> None:
        plan = desk.plan("drain", "n3")
        desk.actor.submit(f"request-{number}", plan.request, plan.saw, f"p{number}", via="console", wait_s=0.0)
        desk.actor.work()

    for number in range(MOST_A_MINUTE):
        ask(number)
    with pytest.raises(TooManyOperationsError, match="console"):
        ask(MOST_A_MINUTE)


def test_a_reason_is_asked_for(desk: Desk) -> None:
    with pytest.raises(OperationError, match="why"):
        desk.act("drain", "n3", why="")


def test_while_slurm_is_silent_it_waits_and_then_gives_up(desk: Desk) -> None:
    plan = desk.plan("drain", "n3")
    name = desk.submit(plan)
    desk.machine.silent = True
    assert desk.actor.work()
    assert desk.record(name).is_open
    desk.clock.now += 200.0
    desk.actor.work()
    assert desk.record(name).outcome == "failed"


@given(st.sampled_from([*OperatorVerb, "resume;rm"]), st.text(), st.text(max_size=20), st.text(), st.booleans())
def test_no_words_from_outside_become_an_option_or_another_word(
    verb: str, target: str, nodes: str, why: str, force: bool
) -> None:
    try:
        request = OperatorRequest.of(verb, target, nodes=nodes, why=why, force=force)
    except DeepLinkError:
        return
    assert reason_of("ada", request.why).isprintable()
    for argv in commands_of(request, "ada"):
        words = [word for word in argv if word.startswith("-")]
        assert set(words) <= {"--quiet", "--nodes", "--force"}
        assert all("\n" not in word for word in argv)


def test_what_can_be_taken_back_leads_there_and_back() -> None:
    assert all(UNDO[undo] is verb for verb, undo in UNDO.items())


def test_paused_the_watchdog_begins_nothing_and_resumed_it_does(tmp_path: Path, journal: Journal) -> None:
    bench = Bench(Cluster(), journal)
    desk = Desk(journal, clock=bench.clock)
    bench.daemon.operators = desk.actor
    desk.act("pause-watchdog", "", why="the fabric is being rewired")
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    assert not bench.cluster.asked
    assert any("would drain-down" in line for line in bench.said), bench.said
    desk.act("resume-watchdog", "")
    bench.turn(8, silent="n1")
    assert bench.cluster.asked[0].startswith("scontrol update nodename=n1 state=drain")


def test_paused_and_started_again_the_watchdog_begins_nothing_in_its_first_round(
    tmp_path: Path, journal: Journal
) -> None:
    bench = Bench(Cluster(), journal)
    desk, taken = Desk(journal, clock=bench.clock), Taken()
    bench.daemon.operators = desk.actor
    desk.act("pause-watchdog", "", why="the fabric is being rewired")
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    desk.start()  # what the one before had seen is taken over, in a crash loop: the first look is enough to act on
    bench.daemon.operators, bench.daemon.bindings = desk.actor, taken  # type: ignore[assignment]
    bench.turn(1, silent="n1")
    assert not bench.cluster.asked
    assert (taken.looked, taken.said) == (0, 1)
    desk.act("resume-watchdog", "")
    bench.turn(1, silent="n1")
    assert bench.cluster.asked
    assert taken.looked
