"""The journal: what is kept, that a kill at any instant loses nothing answered, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal import incident_rows, progress_rows
from deeplink.scheduler.journal.incident_json import IncidentNews
from deeplink.scheduler.journal.journal import (
    Journal,
    JournalError,
    JournalMissingError,
)
from deeplink.scheduler.journal.operations import OperationLog, OperationRecord
from deeplink.scheduler.liveness.heartbeats import beat_to_wire
from deeplink.scheduler.recovery.records import (
    BEGAN,
    Action,
    ActionRecord,
    Beat,
    Incident,
    IncidentKind,
    IncidentOutcome,
    Moment,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankStack,
    incident_id,
)
from deeplink.scheduler.watch.notify.delivery import message

FIRST, RELAUNCHED, RESTARTED = Attempt(17, 0, 0), Attempt(17, 0, 1), Attempt(17, 1, 0)


def beat(
    attempt: Attempt, *steps: int, phase: Phase = Phase.RUNNING, incidents: tuple[Incident, ...] = ()
) -> Beat:
    return Beat(
        attempt=attempt,
        phase=phase,
        user="ada",
        job_name="resnet",
        nodes=(NodeName("n1"), NodeName("n0")),
        world_size=2,
        node_beats=(
            NodeRecord(
                name=NodeName("n0"),
                topology_address="core.leaf0.n0",
                seen_unix=50.0,
                shards=3,
                shard_bytes=9,
                verified_bytes=6,
                job=17,
            ),
        ),
        progress=tuple(
            ProgressPoint(attempt=attempt, step=step, unix=100.0 + step, metrics={"loss": 1 / (step + 1)})
            for step in steps
        ),
        incidents=incidents,
    )


def dead(attempt: Attempt = FIRST, kind: IncidentKind = IncidentKind.NODE_DEAD, node: str = "n1") -> Incident:
    return Incident(
        id=incident_id(attempt, kind, node),
        kind=kind,
        node=NodeName(node),
        attempt=attempt,
        evidence="silent",
        began_unix=40.0,
        detected_unix=43.0,
    )


@pytest.fixture(params=[False, True], ids=["wal", "shared"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "folder" / "j.sqlite", shared_file_system=request.param) as opened:
        yield opened


def test_a_beat_is_read_back_by_another_connection(journal: Journal) -> None:
    journal.record_beat(beat(FIRST, 1, 2, 3), 60.0)
    with Journal(journal.path, read_only=True) as reader:
        (job,) = reader.jobs()
        assert (job.job, job.name, job.user, job.newest.attempt) == (17, "resnet", "ada", FIRST)
        assert (job.newest.nodes, job.newest.first_step, job.newest.last_step) == (("n1", "n0"), 1, 3)
        assert [point.step for point in reader.points(17)] == [1, 2, 3]
        assert reader.points(17)[0].metrics == {"loss": 0.5}
        (node,) = reader.nodes()
        assert (node.name, node.leaf, node.shards) == ("n0", "leaf0", 3)
        assert reader.job(18) is None
        before = reader.revision()
        journal.record_beat(beat(FIRST, 4), 61.0)
        assert reader.revision() != before


def test_beats_told_twice_change_nothing(journal: Journal) -> None:
    for _ in range(2):
        journal.record_beat(beat(FIRST, 1, 2, incidents=(dead(),)), 60.0)
    assert len(journal.points(17)) == 2
    assert len(journal.incidents()) == 1
    assert journal.incidents()[0].number == 1


def test_the_next_attempts_first_step_ends_the_incident_and_counts_what_is_repeated(journal: Journal) -> None:
    journal.record_beat(beat(FIRST, *range(10)), 60.0)
    journal.record_incident(dead())
    journal.record_beat(beat(RESTARTED), 70.0)
    assert journal.incidents(only_open=True)
    journal.record_beat(beat(RESTARTED, 7), 80.0)
    (incident,) = journal.incidents()
    assert (incident.outcome, incident.recovered_unix, incident.steps_repeated) == (
        IncidentOutcome.RECOVERED,
        107.0,
        3,
    )
    job = journal.job(17)
    assert job is not None
    assert [attempt.ended_unix for attempt in job.attempts] == [70.0, 0.0]


def test_a_launchers_failed_becomes_recovered_when_the_job_trains_again(journal: Journal) -> None:
    journal.record_beat(beat(FIRST, 1), 60.0)
    journal.record_incident(dataclasses.replace(dead(), outcome=IncidentOutcome.FAILED))
    journal.record_beat(beat(RESTARTED, 1), 80.0)
    assert journal.incidents()[0].outcome is IncidentOutcome.RECOVERED


def test_an_applications_own_failure_stays_one(journal: Journal) -> None:
    failed = dataclasses.replace(dead(kind=IncidentKind.RANK_FAILED), outcome=IncidentOutcome.FAILED)
    journal.record_incident(failed)
    journal.record_beat(beat(RESTARTED, 1), 80.0)
    assert journal.incidents()[0].outcome is IncidentOutcome.FAILED


def test_one_lost_node_is_one_incident_whoever_tells_of_it(journal: Journal) -> None:
    ours = journal.record_incident(dead())
    theirs = dataclasses.replace(
        dead(kind=IncidentKind.NODE_SILENT), action=Action.RELAUNCH, evidence="agent missed"
    )
    joined = journal.record_incident(theirs)
    assert (joined.number, joined.id) == (ours.number, ours.id)
    assert (joined.action, joined.evidence) == ("relaunch", "silent; agent missed")
    assert len(journal.incidents()) == 1
    journal.record_incident(dataclasses.replace(dead(node="n2"), began_unix=ours.began_unix + 60.0))
    assert len(journal.incidents()) == 2


def test_what_is_known_of_an_incident_is_never_taken_back(journal: Journal) -> None:
    ended = dataclasses.replace(
        dead(), outcome=IncidentOutcome.RECOVERED, acted_unix=44.0, recovered_unix=50.0, action=Action.DRAIN_DOWN
    )
    journal.record_incident(ended)
    late = journal.record_incident(dataclasses.replace(dead(), began_unix=39.0, detected_unix=45.0))
    assert dataclasses.replace(late, timeline=()) == dataclasses.replace(ended, began_unix=39.0, number=1)
    assert told(late) == [
        (39.0, BEGAN),
        (43.0, "detected: node-dead: silent"),
        (44.0, "done: drain-down"),
        (50.0, "training again"),
    ]


def test_incidents_are_found_by_number_and_by_id(journal: Journal) -> None:
    kept = journal.record_incident(dead())
    assert journal.incident("1") == kept
    assert journal.incident(kept.id) == kept
    assert journal.incident("2") is None
    assert journal.incident("9" * 40) is None


def told(incident: Incident | None) -> list[tuple[float, str]]:
    assert incident is not None
    return [(moment.unix, moment.what) for moment in incident.timeline]


def test_the_journal_tells_the_course_of_an_incident_by_itself(journal: Journal) -> None:
    journal.record_beat(beat(FIRST, *range(10)), 30.0)
    journal.record_incident(dead())
    action = ActionRecord(
        key="k", incident=dead().id, remedy="drain-down", attempt=FIRST, node=NodeName("n1"), began_unix=44.0
    )
    for _ in range(2):  # told twice, it happened once
        journal.begin_action(action)
        journal.record_incident(dead())
    journal.record_moment(dead().id, 44.5, "the stacks of 2 ranks were read")
    for _ in range(2):
        journal.end_action("k", "n1 is down", 45.0)
    journal.record_incident(dataclasses.replace(dead(), action=Action.DRAIN_DOWN, acted_unix=45.0))
    for _ in range(2):
        journal.record_beat(beat(RESTARTED, 7), 110.0)
    assert told(journal.incident(dead().id)) == [
        (40.0, BEGAN),
        (43.0, "detected: node-dead: silent"),
        (44.0, "begun: drain-down of n1"),
        (44.5, "the stacks of 2 ranks were read"),
        (45.0, "ended: drain-down: n1 is down"),
        (107.0, "training again, 3 steps done again"),
    ]


def test_two_witnesses_tell_one_course(journal: Journal) -> None:
    silent = dataclasses.replace(
        dead(kind=IncidentKind.NODE_SILENT), evidence="its agent", began_unix=39.0, detected_unix=44
    )
    for hit in (dead(), silent, dead(), silent):
        journal.record_incident(hit)
    (known,) = journal.incidents()
    assert told(known) == [
        (39.0, BEGAN),
        (43.0, "detected: node-dead: silent"),
        (44.0, "detected: node-silent: its agent"),
    ]


def test_the_end_of_a_job_is_the_end_of_its_incidents(journal: Journal) -> None:
    journal.record_incident(dead())
    journal.close_incidents(17, IncidentOutcome.FAILED, 50.0)
    assert told(journal.incident("1"))[-1] == (50.0, "the job ended: failed")


def test_what_stood_still_is_known_from_the_attempt(journal: Journal) -> None:
    journal.record_beat(beat(FIRST, *range(10)), 30.0)
    kept = journal.record_incident(dead())
    assert (kept.ranks, kept.step_s) == (2, 1.0)
    later = dataclasses.replace(dead(node="n0"), began_unix=kept.began_unix + 60.0)
    said = journal.record_incident(dataclasses.replace(later, ranks=16, step_s=0.25))
    assert (said.ranks, said.step_s) == (16, 0.25)


def test_stacks_are_kept_apart_and_only_of_the_newest(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_rows, "KEPT_STACKS", 2)
    where = (
        RankStack(rank=1, pid=7, state="S", source="py-spy", text="wait()", flight="[]"),
        RankStack(rank=0, text="it does not answer"),
    )
    hung = [
        dataclasses.replace(dead(kind=IncidentKind.RANKS_HUNG, node=node), stacks=where)
        for node in ("n0", "n1", "n2")
    ]
    for hit in hung:
        assert journal.record_incident(hit).stacks == ()
    assert [journal.stacks(hit.id) for hit in hung] == [(), (where[1], where[0]), (where[1], where[0])]
    journal.record_incident(dataclasses.replace(hung[2], stacks=(dataclasses.replace(where[0], text="now here"),)))
    assert [stack.text for stack in journal.stacks(hung[2].id)] == ["it does not answer", "now here"]


def test_incidents_are_chosen_by_kind_node_and_time(journal: Journal) -> None:
    journal.record_incident(dead())
    journal.record_incident(dataclasses.replace(dead(node="n0"), began_unix=90.0))
    journal.record_incident(dead(kind=IncidentKind.RANKS_HUNG))
    assert [hit.number for hit in journal.incidents(kind="node-dead")] == [2, 1]
    assert [hit.number for hit in journal.incidents(node="n1")] == [3, 1]
    assert [hit.number for hit in journal.incidents(since_unix=50.0)] == [2]
    assert [hit.number for hit in journal.incidents(until_unix=50.0)] == [3, 1]
    assert [hit.number for hit in journal.incidents(outcome="open", limit=1)] == [3]
    assert journal.incidents(outcome="recovered") == ()


def test_an_action_is_begun_once_and_ended_once(journal: Journal) -> None:
    action = ActionRecord(
        key="k", incident="i", remedy="drain-down", attempt=FIRST, node=NodeName("n1"), exclude=(NodeName("n1"),)
    )
    assert journal.begin_action(action)
    assert not journal.begin_action(dataclasses.replace(action, reason="again"))
    assert journal.actions(only_open=True) == (action,)
    journal.end_action("k", "down", 90.0)
    journal.end_action("k", "again", 91.0)
    assert journal.actions(only_open=True) == ()
    assert journal.action("k") == dataclasses.replace(action, done_unix=90.0, result="down")
    assert journal.drained() == {"n1": 0.0}


def test_the_loss_curve_is_thinned_and_keeps_its_ends(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_rows, "KEPT_POINTS", 100)
    for start in range(0, 1000, 50):
        journal.record_beat(beat(FIRST, *range(start, start + 50)), 60.0)
    steps = [point.step for point in journal.points(17)]
    assert len(steps) <= 100
    assert (steps[0], steps[-1]) == (0, 999)
    assert steps == sorted(steps)


def test_of_what_is_older_than_a_minute_one_point_in_ten_seconds_is_kept(journal: Journal) -> None:
    for second in range(300):  # twenty steps a second, a heartbeat each second
        steps = range(20 * second, 20 * second + 20)
        points = [ProgressPoint(attempt=FIRST, step=step, unix=1_000.0 + step / 20) for step in steps]
        journal.record_beat(dataclasses.replace(beat(FIRST), progress=tuple(points)), 1_000.0 + second)
    kept = [round(point.unix - 1_000.0, 2) for point in journal.points(17, limit=10_000)]
    assert (kept[0], kept[-1]) == (0.0, 299.95)
    assert [unix for unix in kept if unix < 230.0] == [10.0 * slot for slot in range(23)]
    assert len([unix for unix in kept if unix >= 240.0]) == 1_200, "the newest minute is whole"
    known = journal.job(17)
    assert known is not None
    assert (known.newest.first_step, known.newest.last_step) == (0, 5_999)


YEAR_S = 365 * 86_400.0


def thinned(journal: Journal, *, curves: int, jobs: int) -> int:
    """Thin until nothing is left to do; return in how many calls."""
    calls = 0
    while journal.thin(YEAR_S, curves=curves, jobs=jobs):
        calls += 1
        assert calls < 20
    return calls


def test_of_jobs_of_long_ago_first_the_progress_goes_and_then_they_do(journal: Journal) -> None:
    for job in range(1, 31):
        for relaunch in (0, 1):
            journal.record_beat(beat(Attempt(job, 0, relaunch), 1, 2), 100.0 + (job == 3) * 1000 + job)
    # Job 3 was heard of last; jobs 5 and 7 are in need, of 9 something is left to be done, 11 is kept off a node.
    old = dead(attempt=Attempt(5, 0, 0))
    journal.record_incident(old)
    journal.record_incident(dataclasses.replace(old, id="7.0.0-node-dead-n1", attempt=Attempt(7, 0, 0)))
    journal.begin_action(
        ActionRecord(key="k", incident="i", remedy="restart", attempt=Attempt(9, 0, 0), node=None)
    )
    journal.set_excluded(11, {NodeName("n1"): 1.0})
    before = journal.incidents()
    assert thinned(journal, curves=10, jobs=1_000) == 4, "a few at a time: the loop waits for it"
    with_curve = {job for job in range(1, 31) if journal.points(job)}
    assert with_curve == {3, 5, 7, 9, *range(22, 31)}
    assert len(journal.jobs()) == 30
    thinned(journal, curves=10, jobs=20)
    assert {record.job for record in journal.jobs()} == {3, 5, 7, 9, 11, *range(12, 31)}
    assert all(len(record.attempts) == 2 for record in journal.jobs())
    assert journal.incidents() == before
    assert [action.key for action in journal.actions()] == ["k"]
    journal.record_beat(beat(Attempt(1, 0, 1), 3), 2000.0)
    assert journal.job(1) is not None, "one that speaks after all is there again"


def test_a_journal_of_few_jobs_forgets_nothing(journal: Journal) -> None:
    journal.record_beat(beat(FIRST, 1), 60.0)
    assert journal.thin(YEAR_S) == 0
    assert journal.thin(60.0 + 86_400.0, curves=0, jobs=0) == 0, "nor what is a day old"
    assert len(journal.points(17)) == len(journal.jobs()) == 1
    assert journal.thin(60.0 + 8 * 86_400.0, curves=0, jobs=0) == 1
    assert (len(journal.points(17)), len(journal.jobs())) == (0, 1)


def test_a_loss_that_is_no_number_is_kept(journal: Journal) -> None:
    point = ProgressPoint(attempt=FIRST, step=1, unix=1.0, metrics={"loss": float("nan")})
    journal.record_beat(Beat(attempt=FIRST, phase=Phase.RUNNING, progress=(point,)), 60.0)
    assert str(journal.points(17)[0].metrics["loss"]) == "nan"


WRITER = """
import sys
from pathlib import Path
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import *
from deeplink.core.types import Attempt, NodeName
attempt = Attempt(17, 0, 0)
with Journal(Path(sys.argv[1])) as journal:
    step = len(journal.points(17, limit=10_000))
    while True:
        step += 1
        point = ProgressPoint(attempt=attempt, step=step, unix=1.0)
        incident = Incident(id=f"i{step}", kind="node-dead", attempt=attempt, began_unix=1.0, detected_unix=1.0)
        journal.record_beat(
            Beat(attempt=attempt, phase=Phase.RUNNING, progress=(point,), incidents=(incident,)), float(step)
        )
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_instant_loses_nothing_it_had_answered(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    for round_ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        assert writer.stdout is not None
        with writer:
            first = writer.stdout.readline()
            time.sleep(0.03 * (round_ + 1))  # a different instant each time
            writer.send_signal(signal.SIGKILL)
            answered = int((first + writer.stdout.read()).split()[-1])
        with Journal(path, read_only=True) as journal:
            steps = [point.step for point in journal.points(17, limit=1_000_000)]
            incidents = {incident.id for incident in journal.incidents(limit=1_000_000)}
        assert answered <= len(steps) <= answered + 1
        assert incidents == {f"i{step}" for step in steps}, "a beat is kept whole or not at all"


def test_what_is_no_utf_8_is_kept_and_told_all_the_same(journal: Journal) -> None:
    odd = os.fsdecode(b"caf\xe9")  # so a job's name comes out of the environment, and a command's answer
    wreck = dataclasses.replace(
        dead(RELAUNCHED), evidence=f"{odd} failed", timeline=(Moment(100.0, f"said: {odd}"),)
    )
    told = dataclasses.replace(beat(RELAUNCHED, 1, incidents=(wreck,)), job_name=odd, detail=odd)
    beat_to_wire(told)
    journal.record_beat(told, 100.0)
    found = journal.job(17)
    assert found is not None
    assert found.name == "caf\\xe9"
    (known,) = journal.incidents()
    assert known.evidence.startswith("caf\\xe9 failed")
    assert journal.begin_action(
        ActionRecord(key="k", incident=known.id, remedy="drain", attempt=RELAUNCHED, node=None, reason=odd)
    )
    journal.end_action("k", f"scontrol exited 1: {odd}", 101.0)
    (done,) = journal.actions()
    assert (done.reason, done.result) == ("caf\\xe9", "scontrol exited 1: caf\\xe9")


def test_a_full_disk_refuses_a_beat_whole_and_is_over_when_there_is_room(journal: Journal) -> None:
    pages = journal._pragma("page_count")
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    steps = 0
    with pytest.raises(JournalError, match="full"):
        while steps < 100_000:
            journal.record_beat(beat(FIRST, *range(steps, steps + 100), incidents=(dead(),)), 60.0)
            steps += 100
    assert [point.step for point in journal.points(17)][-1:] == ([steps - 1] if steps else [])
    journal._db.execute(f"PRAGMA max_page_count = {pages + 100_000}")
    journal.record_beat(beat(FIRST, *range(steps, steps + 100)), 61.0)
    assert journal.points(17)[-1].step == steps + 99


def test_no_journal_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalMissingError):
        Journal(tmp_path / "none", read_only=True)


def test_a_journal_of_the_first_release_is_read_and_taken_on(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        journal.record_beat(beat(FIRST, incidents=(dead(),)), 100.0)
    with sqlite3.connect(path) as db:
        # What later schemas have more.
        db.execute("ALTER TABLE jobs DROP COLUMN label")
        db.execute("ALTER TABLE nodes DROP COLUMN attended_unix")
        db.execute("ALTER TABLE incidents DROP COLUMN job_label")
        for later in ("operations", "rank_times"):
            db.execute(f"DROP TABLE {later}")
        db.execute("PRAGMA user_version = 4")
    db.close()
    with Journal(path, read_only=True) as journal:
        assert [hit.id for hit in journal.incidents()] == [dead().id]
        assert (OperationLog(journal).newest(), journal.rank_times(FIRST.job)) == ((), ())
        assert [job.label for job in journal.jobs()] == [str(FIRST.job)]
    with Journal(path) as journal:
        assert [node.attended_unix for node in journal.nodes()] == [0.0]
        journal.record_beat(dataclasses.replace(beat(FIRST), job_label="17_1"), 101.0)
        OperationLog(journal).begin(OperationRecord(request="a request", verb="drain", target="n1", person="ada"))
        assert [job.label for job in journal.jobs()] == ["17_1"]
        assert [one.target for one in OperationLog(journal).newest()] == ["n1"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_schema_of_before_the_first_release_is_refused(tmp_path: Path, *, read_only: bool) -> None:
    path = tmp_path / "j.sqlite"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(JournalError, match="schema 3 is of before"):
        Journal(path, read_only=read_only)


def test_that_a_standing_agent_was_heard_outlives_what_a_job_says_of_its_node(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        (told,) = beat(FIRST).node_beats
        journal.record_node(dataclasses.replace(told, job=0, seen_unix=40.0))
        journal.record_beat(beat(FIRST), 101.0)
        (kept,) = journal.nodes()
    assert (kept.job, kept.seen_unix, kept.attended_unix) == (FIRST.job, 50.0, 40.0)


def test_a_task_of_an_array_is_told_by_the_name_that_slurms_commands_take(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        journal.record_beat(dataclasses.replace(beat(FIRST, incidents=(dead(),)), job_label="12_3"), 100.0)
        journal.record_beat(beat(FIRST), 101.0)  # an older launcher does not say it
        (job,), (incident,) = journal.jobs(), journal.incidents()
    assert (job.job, job.label) == (FIRST.job, "12_3")
    assert (incident.attempt, incident.job, incident.attempt_name) == (FIRST, "12_3", "12_3.0.0")
    assert message([IncidentNews(incident)], "ctl").subject.startswith("DeepLink: node-dead on n1 job 12_3:")


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(JournalError, match="schema 99 is newer") as refused:
            Journal(path, read_only=read_only)
        assert "--journal" in refused.value.remedy
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be read as one" * 20, b"x" * 10])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(content)
    with pytest.raises(JournalError) as refused:
        Journal(path)
    assert refused.value.corrupt
    assert "mv" in refused.value.remedy
    assert path.read_bytes() == content


def test_somebody_elses_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE precious (thing TEXT)")
    db.close()
    with pytest.raises(JournalError, match="no journal of DeepLink") as refused:
        Journal(path)
    assert refused.value.corrupt


def test_a_damaged_page_is_said_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        journal.record_beat(beat(FIRST, *range(500)), 60.0)
    whole = bytearray(path.read_bytes())
    for start in range(4096, len(whole), 4096):
        whole[start : start + 64] = b"\xff" * 64
    path.write_bytes(whole)
    with pytest.raises(JournalError), Journal(path) as journal:
        journal.points(17)
        journal.jobs()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError) as refused:
        Journal(tmp_path / "file" / "j.sqlite")
    assert refused.value.remedy


def test_our_exclusions_of_a_job_are_remembered(journal: Journal) -> None:
    journal.record_beat(beat(FIRST), 60.0)
    assert journal.excluded(17) == {}
    journal.set_excluded(17, {NodeName("n2"): 5.0, NodeName("n1"): 7.0})
    assert journal.excluded(17) == {"n1": 7.0, "n2": 5.0}
