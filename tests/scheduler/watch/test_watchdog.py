"""The loop over a scripted cluster: what passes and comes again, nodes that come back, the dead man's switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal, JournalError
from deeplink.scheduler.recovery.evidence import ProbeResult, WatchPolicy
from deeplink.scheduler.recovery.records import Beat, Incident, IncidentOutcome, NodeRecord, Phase
from deeplink.scheduler.watch.memory import Carried
from deeplink.scheduler.watch.watchdog import CRASH_LOOP_S, leading
from tests.scheduler.slurm.answers import job_answer
from tests.scheduler.watch.callers import ME
from tests.scheduler.watch.test_actor import Bench, Cluster, UnansweredError, lose

N1, N3 = NodeName("n1"), NodeName("n3")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Journal(tmp_path / "j.sqlite") as journal:
        yield Bench(Cluster(), journal)


def attend(bench: Bench, rounds: int, *findings: Finding, name: NodeName = N3, boot_id: str = "a") -> None:
    """Let a standing agent speak while the loop goes round; a job runs on, and is well."""
    for _ in range(rounds):
        bench.heartbeats.attend(
            NodeRecord(name=name, boot_id=boot_id, health=findings), bench.clock.monotonic(), kept=True
        )
        calm(bench, 1)


def go(bench: Bench, rounds: int, *launchers: Callable[[Bench], None], pause_s: float = 0.6) -> None:
    """Go round while these launchers speak, and nobody else."""
    for _ in range(rounds):
        for beat in launchers:
            beat(bench)
        bench.daemon.tick()
        bench.clock.sleep(pause_s)


def beat_of_17(bench: Bench) -> None:
    bench.beat(Phase.RUNNING)


def calm(bench: Bench, rounds: int) -> None:
    """Go round while the job is well and says so."""
    go(bench, rounds, beat_of_17)


def found(severity: Severity = Severity.ERROR) -> Finding:
    return Finding(check="disk", severity=severity, text="read-only")


def sick(bench: Bench) -> list[Incident]:
    return sorted(bench.journal.incidents(kind="node-sick"), key=lambda one: one.number)


def test_a_sick_node_is_drained_and_each_time_is_an_incident_of_its_own(bench: Bench) -> None:
    attend(bench, 3, found())
    (first,) = sick(bench)
    assert bench.cluster.asked == [f"scontrol update nodename=n3 state=drain reason=deeplink: {first.id}"]
    assert (first.node, first.outcome, first.evidence) == ("n3", IncidentOutcome.OPEN, "disk (drain): read-only")
    attend(bench, 12)
    assert [one.outcome for one in sick(bench)] == [IncidentOutcome.RECOVERED]
    bench.cluster.node_states["n3"] = "IDLE"
    attend(bench, 3, found())
    assert [one.outcome for one in sick(bench)] == [IncidentOutcome.RECOVERED, IncidentOutcome.OPEN]
    assert len([line for line in bench.cluster.asked if "state=drain" in line]) == 2
    assert bench.cluster.restarts == 0


def test_what_is_only_noteworthy_is_no_incident(bench: Bench) -> None:
    attend(bench, 3, found(Severity.NOTE))
    attend(bench, 3, Finding(check="gpu", severity=Severity.UNKNOWN, text="nvidia-smi hangs"), name=N1)
    assert (bench.cluster.asked, sick(bench)) == ([], [])
    attend(bench, 3, found(), found(Severity.NOTE))
    attend(bench, 12, found(Severity.NOTE))
    assert [one.outcome for one in sick(bench)] == [IncidentOutcome.RECOVERED], (
        "what is left of it is not sickness"
    )


def test_an_agent_that_falls_silent_does_not_make_its_node_well(bench: Bench) -> None:
    attend(bench, 3, found())
    calm(bench, 100)
    assert [one.outcome for one in sick(bench)] == [IncidentOutcome.OPEN]


def test_an_observer_says_what_it_would_do_about_a_sick_node(bench: Bench) -> None:
    bench.act = False
    bench.start()
    attend(bench, 3, found())
    assert bench.cluster.asked == []
    assert any("node-sick n3: would drain: disk (drain): read-only" in line for line in bench.said)
    (incident,) = sick(bench)
    assert incident.evidence.endswith("observed only, would drain")


def test_a_watchdog_that_returns_takes_over_what_is_open(bench: Bench) -> None:
    attend(bench, 3, found())
    bench.start()
    bench.daemon.run(lambda _: True)
    attend(bench, 3, found())
    assert len(sick(bench)) == 1
    attend(bench, 12)
    assert [one.outcome for one in sick(bench)] == [IncidentOutcome.RECOVERED]


def test_what_an_older_watchdog_left_open_and_no_one_judges_any_more_ends(bench: Bench) -> None:
    left = Incident(id="cluster-gres-leaked@17", kind="gres-leaked", began_unix=1.0, detected_unix=2.0)
    bench.journal.record_incident(left)
    bench.start()
    bench.daemon.run(lambda _: True)
    attend(bench, 12)
    assert [one.outcome for one in bench.journal.incidents(kind="gres-leaked")] == [IncidentOutcome.RECOVERED]


@pytest.mark.parametrize(("kernel", "kind"), [("a", "node-cut-off"), ("b", "node-rebooted")])
def test_of_a_node_that_comes_back_it_is_told_whether_it_had_rebooted(
    bench: Bench, kernel: str, kind: str
) -> None:
    bench.act = False
    bench.start()
    attend(bench, 1, name=N1)
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    (incident,) = bench.journal.incidents()
    assert incident.kind == "node-dead"
    bench.cluster.answers["n1"] = ProbeResult.ANSWERS
    attend(bench, 12, name=N1, boot_id=kernel)
    told = bench.journal.incident(incident.id)
    assert told is not None
    assert told.kind == kind
    assert "n1 came back after" in told.evidence
    assert len(bench.journal.incidents()) == 1


def shown(unix: float) -> str:
    """Return a moment as Slurm prints it."""
    return datetime.fromtimestamp(unix, UTC).astimezone().replace(tzinfo=None).isoformat(timespec="seconds")


@pytest.mark.parametrize("after_s", [-1.0, 2.0], ids=["before", "after"])
def test_a_batch_host_that_boots_while_no_watchdog_is_there_is_told_by_the_next_one(
    bench: Bench, after_s: float
) -> None:
    calm(bench, 3)
    last = bench.clock.unix() - 0.6
    bench.clock.sleep(10.0)
    bench.cluster.job_state, bench.cluster.restarts, bench.cluster.reason = "PENDING", 1, "BeginTime"
    bench.cluster.slurmds_started["n0"] = shown(last + after_s)
    bench.start()
    bench.daemon.run(lambda _: True)
    go(bench, 6)
    told = [(one.kind, str(one.node), round(one.began_unix - last)) for one in bench.journal.incidents()]
    assert told == ([("node-rebooted", "n0", 0)] if after_s > 0 else [])
    assert any("release 17" in line or "StartTime" in line for line in bench.cluster.asked) is (after_s > 0)


@pytest.mark.parametrize("host", ["n0", "n1"])
def test_a_watchdog_that_comes_late_sees_by_slurms_own_record_what_died_and_acts(bench: Bench, host: str) -> None:
    calm(bench, 3)
    last = bench.clock.unix() - 0.6
    bench.clock.sleep(300.0)  # no watchdog; a node dies, Slurm calls it down, and its job stands still
    lose(bench, host)
    bench.cluster.node_states[host] = "DOWN+NOT_RESPONDING"
    bench.start()
    bench.daemon.run(lambda _: True)
    stranded = [] if host == "n0" else [lambda one: one.beat(Phase.STRANDED, silent="n1", silent_s=290.0)]
    go(bench, 8, *stranded)
    assert "scontrol requeue 17" in bench.cluster.asked
    assert any(
        f"ExcNodeList=n[{host[1]},9]" in line or f"ExcNodeList={host}" in line for line in bench.cluster.asked
    )
    (incident,) = bench.journal.incidents()
    assert (incident.id, incident.kind, incident.node) == ("17.0.0-end", "node-dead", host)
    if host == "n0":
        assert incident.began_unix == pytest.approx(last, abs=1.0), "as far as the launcher was heard"


def test_a_job_that_slurm_puts_back_for_its_cut_off_controller_is_in_that_incident(bench: Bench) -> None:
    calm(bench, 3)
    for name in bench.cluster.node_states:
        lose(bench, name)
    go(bench, 20)
    bench.cluster.answers.clear()
    bench.cluster.job_state, bench.cluster.restarts = "PENDING", 1
    bench.cluster.reason = "launch failed requeued held"
    go(bench, 20)
    (incident,) = bench.journal.incidents()
    assert (incident.kind, incident.attempt) == ("self-in-doubt", Attempt(17, 0, 0))
    assert "Slurm put it back into the queue and holds it" in incident.evidence
    assert any("StartTime=now" in line or "release" in line for line in bench.cluster.asked)


def test_a_node_that_was_cut_off_and_took_no_training_with_it_is_over_when_it_is_back(bench: Bench) -> None:
    bench.act = False
    bench.start()
    attend(bench, 1, name=N1)
    lose(bench, "n1")
    for _ in range(8):
        bench.beat(Phase.RUNNING, silent="n1")
        bench.daemon.tick()
        bench.clock.sleep(0.6)
    bench.cluster.answers["n1"] = ProbeResult.ANSWERS
    attend(bench, 12, name=N1)
    assert [(one.id, one.kind, one.outcome.value) for one in bench.journal.incidents()] == [
        ("17.0.0-end", "node-cut-off", "recovered")
    ]
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    assert [(one.id, one.kind, one.outcome.value) for one in bench.journal.incidents()] == [
        ("17.0.0-end@2", "node-dead", "open"),
        ("17.0.0-end", "node-cut-off", "recovered"),
    ]


def test_a_launcher_that_is_heard_again_while_its_ranks_went_on_ended_no_attempt(bench: Bench) -> None:
    bench.act = False
    bench.start()
    calm(bench, 3)
    go(bench, 40)
    assert [(one.id, one.kind) for one in bench.journal.incidents(only_open=True)] == [
        ("17.0.0-end", "launcher-lost")
    ]
    bench.start()
    bench.daemon.run(lambda _: True)
    bench.turn(4, silent="n1")
    assert bench.journal.incidents(only_open=True), "it misses a node"
    calm(bench, 12)
    assert bench.journal.incidents(only_open=True) == ()
    began = bench.clock.unix()
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    (incident,) = bench.journal.incidents(only_open=True)
    assert incident.id == "17.0.0-end@2"
    assert incident.began_unix > began - 10.0, "the standstill is not counted from the launcher's silence on"


def test_a_slurmd_that_its_agent_has_started_anew_is_told_once_and_is_over(bench: Bench) -> None:
    anew = Finding(check="slurmd", severity=Severity.NOTE, text="slurmd was gone, and was started again")
    attend(bench, 6, anew)
    attend(bench, 12)
    (incident,) = bench.journal.incidents()
    assert (incident.kind, incident.node, incident.outcome) == ("slurmd-lost", "n3", IncidentOutcome.RECOVERED)
    assert "started again" in incident.evidence
    assert bench.cluster.asked == []


def test_a_verdict_that_joined_what_its_launcher_told_is_written_once_a_minute(bench: Bench) -> None:
    bench.act = False
    bench.start()
    lose(bench, "n1")
    theirs = Incident(
        id="17.0.0-node-silent-n1",
        kind="node-silent",
        node=N1,
        attempt=Attempt(17, 0, 0),
        began_unix=bench.clock.unix(),
        detected_unix=bench.clock.unix(),
    )
    bench.journal.record_incident(theirs)
    bench.turn(40, silent="n1")
    (incident,) = bench.journal.incidents()
    assert incident.id == theirs.id
    assert incident.evidence.count("slurmd is silent for") == 1


def test_all_standing_agents_silent_at_once_are_one_incident_and_nothing_is_touched(bench: Bench) -> None:
    for name in ("n0", "n1", "n2", "n3"):
        attend(bench, 1, name=NodeName(name))
    calm(bench, 60)
    (incident,) = bench.journal.incidents()
    assert (incident.kind, incident.node, incident.outcome) == ("agents-silent", None, IncidentOutcome.OPEN)
    assert bench.cluster.asked == []
    for _ in range(12):
        for name in ("n0", "n1", "n2"):
            bench.heartbeats.attend(NodeRecord(name=NodeName(name)), bench.clock.monotonic(), kept=True)
        attend(bench, 1)
    assert [one.outcome for one in bench.journal.incidents()] == [IncidentOutcome.RECOVERED]


def test_the_dead_mans_switch_stands_still_with_the_loop(bench: Bench) -> None:
    def shown() -> float | None:
        return bench.daemon.metrics.registry.get_sample_value("deeplink_watch_loop_time_seconds")

    bench.turn(1)
    before = shown()
    attending = NodeRecord(name=N3, health=(found(),))
    for _ in range(5):  # beats and agents come in, and nobody looks
        bench.clock.sleep(10.0)
        bench.beat()
        bench.heartbeats.attend(attending, bench.clock.monotonic(), kept=True)
    assert shown() == before
    bench.cluster.frozen = True
    bench.daemon.tick()
    assert shown() == bench.clock.unix(), "a controller that is away is no reason to be silent"


def test_the_defaults_bound_what_is_done_at_once() -> None:
    policy = WatchPolicy()
    assert (policy.most_at_once, policy.brake_s, policy.resume) == (2, 60.0, False)


def test_a_journal_that_takes_nothing_ends_no_watchdog_nor_makes_it_act_or_spin(bench: Bench) -> None:
    attend(bench, 2)
    bench.journal._db.execute("PRAGMA query_only = ON")  # as on a disk that went read-only
    lose(bench, "n1")
    before, told = bench.clock.unix(), []
    for number in range(30):
        beat = Beat(
            attempt=Attempt(17, 0, 0),
            phase=Phase.STRANDED,
            user=ME,
            nodes=(NodeName("n0"), N1),
            node_beats=(NodeRecord(name=N1, silent_s=4.0 + number, job=17),),
        )
        bench.heartbeats.hear(beat, bench.clock.monotonic())
        told.append(bench.daemon.tick())
        bench.clock.sleep(0.6)
    assert bench.cluster.asked == []
    assert len([line for line in bench.said if "touching nothing" in line and "readonly" in line]) == 1
    assert set(told[-5:]) == {1.0}
    shown = bench.daemon.metrics.registry.get_sample_value("deeplink_watch_loop_time_seconds")
    assert shown is not None
    assert shown < before + 10.0, "the dead man's switch tells"
    bench.journal._db.execute("PRAGMA query_only = OFF")
    bench.turn(8, silent="n1")
    assert bench.cluster.asked[0].startswith("scontrol update nodename=n1 state=drain")


def test_an_episode_that_begins_after_the_clock_was_set_back_is_another_incident(bench: Bench) -> None:
    attend(bench, 3, found())
    (first,) = sick(bench)
    attend(bench, 12)
    began = int(first.began_unix)
    bench.clock.epoch = began - bench.clock.now
    attend(bench, 3, found())
    assert [one.outcome for one in sick(bench)] == [IncidentOutcome.RECOVERED, IncidentOutcome.OPEN]


def test_an_open_incident_of_an_odd_name_stops_no_watchdog(bench: Bench) -> None:
    odd = Incident(id="17.0.0-of-a-newer-kind@1", kind="of-a-newer-kind", began_unix=1.0, detected_unix=1.0)
    bench.journal.record_incident(odd)
    bench.daemon.run(lambda _: True)
    calm(bench, 12)
    assert [one.outcome for one in bench.journal.incidents()] == [IncidentOutcome.OPEN]


def lead(bench: Bench, journal: Path, rounds: int = 1, *, killed: bool = False) -> None:
    """Come up as after a kill, and lead for so many rounds."""
    left = iter(range(1, rounds))

    def pause(_: float) -> bool:
        bench.clock.sleep(1.0)
        if next(left, None) is not None:
            return False
        if killed:
            raise KeyboardInterrupt
        return True

    bench.start()
    with suppress(KeyboardInterrupt), leading(journal) as bench.daemon.lock:
        bench.daemon.run(pause)


def absences(bench: Bench) -> list[Incident]:
    return sorted(bench.journal.incidents(kind="watchdog-away"), key=lambda one: one.number)


def test_a_watchdog_that_was_ended_is_an_incident_of_the_next_one_and_of_none_after(
    bench: Bench, tmp_path: Path
) -> None:
    lead(bench, tmp_path / "j.sqlite", 3, killed=True)
    last = bench.clock.unix() - 1.0
    bench.clock.sleep(8.5)
    lead(bench, tmp_path / "j.sqlite", 2)
    lead(bench, tmp_path / "j.sqlite")
    (incident,) = absences(bench)
    assert incident.outcome is IncidentOutcome.RECOVERED
    assert incident.began_unix == pytest.approx(last, abs=0.01)
    assert incident.recovered_unix == incident.detected_unix == pytest.approx(last + 9.5, abs=0.01)
    assert "nobody watched for 9.5 s" in incident.evidence
    assert sum("watchdog-away: " in line for line in bench.said) == 1
    assert bench.cluster.asked == []


def test_those_that_are_killed_one_after_another_are_one_incident_that_tells_of_each(
    bench: Bench, tmp_path: Path
) -> None:
    for _ in range(4):
        lead(bench, tmp_path / "j.sqlite", killed=True)
        bench.clock.sleep(1.0)
    (incident,) = absences(bench)
    assert sum("again: " in moment.what for moment in incident.timeline) == 2
    bench.clock.sleep(CRASH_LOOP_S)
    lead(bench, tmp_path / "j.sqlite")
    bench.clock.sleep(CRASH_LOOP_S)
    lead(bench, tmp_path / "j.sqlite", killed=True)
    bench.clock.sleep(CRASH_LOOP_S)
    lead(bench, tmp_path / "j.sqlite")
    assert len(absences(bench)) == 2, "long after that it is another one"


def test_a_watchdog_that_is_killed_again_and_again_still_helps_a_lost_launcher(
    bench: Bench, tmp_path: Path
) -> None:
    bench.start()
    with suppress(KeyboardInterrupt), leading(tmp_path / "j.sqlite") as bench.daemon.lock:
        bench.daemon.run(lambda _: True)
        calm(bench, 2)
        raise KeyboardInterrupt
    for _ in range(14):  # killed after two rounds, and back half a second later
        lead(bench, tmp_path / "j.sqlite", 3, killed=True)
        bench.clock.sleep(0.5)
    assert "scontrol requeue 17" in bench.cluster.asked
    assert bench.cluster.restarts == 1
    assert len(absences(bench)) == 1


def test_one_that_is_killed_again_and_again_still_gives_up_a_dead_node(bench: Bench, tmp_path: Path) -> None:
    calm(bench, 2)
    lose(bench, "n1")

    def pause(_: float) -> bool:
        bench.clock.sleep(1.0)
        raise KeyboardInterrupt

    for _ in range(12):
        bench.start()
        with suppress(KeyboardInterrupt), leading(tmp_path / "j.sqlite") as bench.daemon.lock:
            if not bench.cluster.restarts:
                bench.beat(silent="n1")
            bench.daemon.run(pause)
        bench.clock.sleep(0.5)
    assert bench.cluster.restarts == 1
    assert any("nodename=n1 state=drain" in line for line in bench.cluster.asked)


def test_one_that_is_killed_in_its_very_first_round_is_told(bench: Bench, tmp_path: Path) -> None:
    lead(bench, tmp_path / "j.sqlite", 2)
    for _ in range(2):
        bench.start()
        bench.daemon.observer.ask = killed  # type: ignore[method-assign]
        with suppress(KeyboardInterrupt), leading(tmp_path / "j.sqlite") as bench.daemon.lock:
            bench.daemon.run(lambda _: True)
        bench.clock.sleep(3.0)
    lead(bench, tmp_path / "j.sqlite")
    (incident,) = absences(bench)
    assert [round(one.unix - incident.began_unix) for one in incident.timeline if "again" in one.what] == [6]


def killed() -> None:
    raise KeyboardInterrupt


def test_the_clock_may_have_been_set_back_meanwhile(bench: Bench, tmp_path: Path) -> None:
    with leading(tmp_path / "j.sqlite") as before:
        later = bench.clock.unix() + 3600
        before.watch(Carried(later, later, {}))
    lead(bench, tmp_path / "j.sqlite")
    (incident,) = absences(bench)
    assert incident.began_unix == incident.detected_unix


def test_an_absence_that_cannot_be_written_down_ends_no_watchdog_and_is_told_when_it_can(
    bench: Bench, tmp_path: Path
) -> None:
    lead(bench, tmp_path / "j.sqlite", killed=True)
    last = bench.clock.unix() - 1.0
    bench.clock.sleep(4.0)
    bench.journal._db.execute("PRAGMA query_only = ON")
    lead(bench, tmp_path / "j.sqlite", 5)
    lead(bench, tmp_path / "j.sqlite", 5, killed=True)
    assert any("touching nothing" in line for line in bench.said)
    bench.journal._db.execute("PRAGMA query_only = OFF")
    lead(bench, tmp_path / "j.sqlite")
    (incident,) = absences(bench)
    assert incident.began_unix == pytest.approx(last, abs=0.01)


def test_a_disk_that_takes_nothing_keeps_nothing_from_being_done(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite", emergency=tmp_path / "elsewhere" / "e.sqlite") as journal:
        bench = Bench(Cluster(), journal)
        calm(bench, 2)
        own = journal._db
        own.execute("PRAGMA query_only = ON")
        lose(bench, "n1")
        for _ in range(9):  # one more than where all can be written
            with suppress(UnansweredError):
                if not bench.cluster.restarts:
                    bench.beat(silent="n1")
            bench.daemon.tick()
            bench.clock.sleep(0.6)
        assert bench.cluster.restarts == 1
        assert sum("state=drain" in line for line in bench.cluster.asked) == 1
        assert sum("going on in" in line for line in bench.said) == 1
        own.execute("PRAGMA query_only = OFF")
        bench.clock.now += 1e10  # by its own clock, which says when it was tried last
        bench.daemon.tick()
        assert any("written again" in line for line in bench.said)
        assert [one.node for one in journal.incidents(kind="node-dead")] == ["n1"]


def test_rounds_in_which_nothing_may_be_touched_are_watched(bench: Bench, tmp_path: Path) -> None:
    lead(bench, tmp_path / "j.sqlite")
    bench.journal._db.execute("PRAGMA query_only = ON")
    with leading(tmp_path / "j.sqlite") as bench.daemon.lock:
        for _ in range(50):
            calm_round = bench.daemon.tick()
            bench.clock.sleep(calm_round)
    bench.journal._db.execute("PRAGMA query_only = OFF")
    lead(bench, tmp_path / "j.sqlite")
    (incident,) = absences(bench)
    assert incident.recovered_unix - incident.began_unix < 3.0


def test_a_launcher_that_was_stranded_while_we_doubted_ourselves_is_heard_once_more_first(bench: Bench) -> None:
    calm(bench, 2)
    bench.cluster.frozen = True
    calm(bench, 4)
    bench.turn(2, silent="n1")
    bench.cluster.frozen = False
    go(bench, 3, pause_s=0.2)  # the node is back, and its launcher has not said so yet
    assert any("self-in-doubt: over" in line for line in bench.said)
    calm(bench, 3)
    assert (bench.cluster.asked, bench.cluster.restarts) == ([], 0)


def test_nor_is_what_it_had_said_before_the_watchdog_was_killed_or_stopped(bench: Bench) -> None:
    calm(bench, 1)
    for away in ("killed", "stopped"):
        bench.cluster.frozen = True
        calm(bench, 4)
        bench.turn(2, silent="n1")
        bench.cluster.frozen = False
        if away == "killed":
            bench.start()
            bench.daemon.run(lambda _: True)
        else:
            bench.daemon.tick()
            bench.clock.sleep(6.0)
        go(bench, 4, pause_s=0.2)
        calm(bench, 3)
        assert (bench.cluster.asked, bench.cluster.restarts) == ([], 0), away


def refused(bench: Bench, rounds: int, phase: Phase) -> None:
    """Go round while the launcher beats and the journal takes nothing."""
    bench.journal._db.execute("PRAGMA query_only = ON")
    for _ in range(rounds):
        with pytest.raises(UnansweredError):
            bench.beat(phase)
        bench.daemon.tick()
        bench.clock.sleep(0.6)
    bench.journal._db.execute("PRAGMA query_only = OFF")


@pytest.mark.parametrize("before", [Phase.STRANDED, Phase.RUNNING])
def test_who_speaks_while_the_journal_takes_nothing_is_not_silent(bench: Bench, before: Phase) -> None:
    calm(bench, 2)
    bench.beat(before)
    refused(bench, 60, Phase.RUNNING)
    go(bench, 3, pause_s=0.3)
    calm(bench, 3)
    assert (bench.cluster.asked, bench.cluster.restarts) == ([], 0)


@pytest.mark.parametrize("frozen", [0, 60, 63], ids=["our network", "the controller with it", "and for longer"])
@pytest.mark.parametrize("before", [Phase.STRANDED, Phase.RUNNING])
def test_who_could_not_be_heard_is_not_silent_either(bench: Bench, before: Phase, frozen: int) -> None:
    calm(bench, 2)
    bench.beat(before)
    names = list(bench.cluster.node_states)
    for name in names:
        lose(bench, name)
    for number in range(66):
        bench.cluster.frozen = number < frozen
        if number == 60:  # the batch host lags behind
            assert any("self-in-doubt: touching nothing" in line for line in bench.said)
            for name in names[1:]:
                bench.cluster.answers[name] = ProbeResult.ANSWERS
        bench.daemon.tick()
        bench.clock.sleep(0.6 if number < 60 else 0.3)
    bench.cluster.answers[names[0]] = ProbeResult.ANSWERS
    go(bench, 3, pause_s=0.3)
    assert any("self-in-doubt: over" in line for line in bench.said)
    calm(bench, 3)
    assert (bench.cluster.asked, bench.cluster.restarts) == ([], 0)


def test_a_launcher_that_is_lost_is_helped_though_the_journal_took_nothing_for_a_moment(bench: Bench) -> None:
    calm(bench, 2)
    for number in range(60):
        if number == 20:
            bench.journal._db.execute("PRAGMA query_only = ON")
        bench.daemon.tick()
        bench.journal._db.execute("PRAGMA query_only = OFF")
        bench.clock.sleep(0.6)
    assert "scontrol requeue 17" in bench.cluster.asked


class Pair(Cluster):
    """A second job, 18, runs on n2 and n3 of eight nodes."""

    @override
    def _squeue(self, argv: Sequence[str]) -> str:
        told = super()._squeue(argv)
        asked = " ".join(argv)
        if "%k" in asked or "%P" in asked:  # of job 17 alone
            return told
        return f"{told}\n{job_answer(argv, 18, nodes='n[2-3]', host='n2', user=ME)}"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Bench]:
    with Journal(tmp_path / "j.sqlite") as journal:
        yield Bench(Pair(node_states=dict.fromkeys([f"n{index}" for index in range(8)], "IDLE")), journal)


def beat_of_18(bench: Bench) -> None:
    nodes = (NodeName("n2"), N3)
    agents = tuple(NodeRecord(name=name, silent_s=0.0, job=18) for name in nodes)
    bench.tell(Beat(attempt=Attempt(18, 0, 0), phase=Phase.RUNNING, user=ME, nodes=nodes, node_beats=agents))


@pytest.mark.parametrize("frozen", [False, True], ids=["the network", "the controller with it"])
@pytest.mark.parametrize("rounds", [45, 80, 400, 1300])
def test_one_launcher_on_our_side_of_a_cut_network_says_nothing_of_the_others(
    pair: Bench, rounds: int, frozen: bool
) -> None:
    go(pair, 3, beat_of_17, beat_of_18, pause_s=0.5)
    for name in set(pair.cluster.node_states) - {"n2", "n3"}:
        lose(pair, name)
    pair.cluster.frozen = frozen
    for number in range(rounds):
        if number % 2:
            beat_of_18(pair)
        pair.daemon.tick()
        pair.clock.sleep(0.5)
    pair.cluster.answers.clear()
    pair.cluster.frozen = False
    go(pair, 3, beat_of_18, pause_s=0.5)
    go(pair, 3, beat_of_18, beat_of_17, pause_s=0.5)
    assert sum("self-in-doubt: touching nothing" in line for line in pair.said) == 1
    assert sum("self-in-doubt: over" in line for line in pair.said) == 1
    assert (pair.cluster.asked, pair.cluster.restarts) == ([], 0)


@pytest.mark.parametrize("rounds", [60, 900])
def test_two_lost_launchers_may_be_we_who_are_deaf_until_a_third_is_heard(pair: Bench, rounds: int) -> None:
    pair.beat(Phase.RUNNING)
    beat_of_18(pair)
    go(pair, rounds)
    assert pair.cluster.asked == []
    assert any("brake: 2 of 2 launchers" in line for line in pair.said)
    assert not any("self-in-doubt" in line for line in pair.said), "it blocks nothing else"
    probes = pair.daemon.metrics.registry.get_sample_value("deeplink_watch_probes_total", {"answer": "answers"})
    assert probes is not None
    assert probes < 4000, "slurmd writes a line for each of them"
    go(pair, 60, beat_of_18)
    assert "scontrol requeue 17" in pair.cluster.asked


@pytest.mark.parametrize("rounds", [45, 300, 700])
def test_a_network_that_is_away_for_long_is_in_doubt_for_as_long_and_harms_nobody(
    pair: Bench, rounds: int
) -> None:
    pair.beat(Phase.RUNNING)
    beat_of_18(pair)
    for name in pair.cluster.node_states:
        lose(pair, name)
    go(pair, rounds)
    assert not any("over" in line for line in pair.said)
    pair.cluster.answers.clear()
    go(pair, 4, beat_of_18)
    go(pair, 8, beat_of_18, beat_of_17)
    assert any("over" in line for line in pair.said)
    assert pair.cluster.asked == []


def test_ears_that_are_deaf_for_long_harm_nobody(pair: Bench) -> None:
    pair.beat(Phase.RUNNING)
    beat_of_18(pair)
    go(pair, 900)
    go(pair, 20, beat_of_18)
    go(pair, 10, beat_of_18, beat_of_17)
    assert pair.cluster.asked == []


def test_what_was_deafness_once_takes_nothing_from_a_silence_of_later(pair: Bench) -> None:
    go(pair, 1, beat_of_17, beat_of_18)
    go(pair, 400)
    go(pair, 10, beat_of_17, beat_of_18)
    go(pair, 30, beat_of_18)  # 17 is lost
    go(pair, 6)  # for a moment 18 is not heard either
    go(pair, 9, beat_of_18)
    assert "scontrol requeue 17" in pair.cluster.asked


def test_two_batch_hosts_that_die_together_are_no_deafness(pair: Bench) -> None:
    pair.beat(Phase.RUNNING)
    beat_of_18(pair)
    lose(pair, "n0")
    lose(pair, "n2")
    go(pair, 12)
    assert {line.split()[2] for line in pair.cluster.asked if "state=down" in line} >= {"nodename=n0"}
    assert any(line.startswith("scontrol requeue 17") for line in pair.cluster.asked)


@pytest.mark.parametrize("rounds", [300, 700])
def test_one_that_is_lost_while_our_network_is_away_is_helped_when_that_is_back(bench: Bench, rounds: int) -> None:
    calm(bench, 2)
    for name in bench.cluster.node_states:
        lose(bench, name)
    go(bench, rounds)
    assert not any("self-in-doubt: over" in line for line in bench.said)
    bench.cluster.answers.clear()
    go(bench, 60)
    assert "scontrol requeue 17" in bench.cluster.asked


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_a_controller_that_comes_and_goes_does_not_hide_a_dead_node(bench: Bench, rounds: int) -> None:
    attend(bench, 1, name=N1)
    lose(bench, "n1")
    for number in range(60):
        bench.cluster.frozen = number // rounds % 2 == 1
        bench.beat(Phase.RUNNING, silent="n1", silent_s=3.0 + 0.5 * number)
        bench.daemon.tick()
        bench.clock.sleep(0.5)
    assert bench.cluster.asked[0].startswith("scontrol update nodename=n1 state=drain")


def test_what_a_launcher_wishes_counts_only_once_it_is_on_record(bench: Bench) -> None:
    calm(bench, 3)
    blames = Incident(
        id="17.0.0-node-silent-n1",
        kind="node-silent",
        node=N1,
        attempt=Attempt(17, 0, 0),
        began_unix=bench.clock.unix(),
        detected_unix=bench.clock.unix(),
    )
    agents = tuple(NodeRecord(name=name, silent_s=0.0, job=17) for name in (NodeName("n0"), N1))
    stranded = Beat(
        attempt=Attempt(17, 0, 0),
        phase=Phase.STRANDED,
        user=ME,
        nodes=(NodeName("n0"), N1),
        node_beats=agents,
        incidents=(blames,),
    )
    bench.journal._db.execute("PRAGMA query_only = ON")
    with pytest.raises(UnansweredError):
        bench.tell(stranded)
    bench.journal._db.execute("PRAGMA query_only = OFF")
    go(bench, 2, pause_s=0.4)
    assert bench.cluster.asked == []
    bench.tell(stranded)  # as it was not answered
    go(bench, 12, pause_s=0.3)
    assert any("ExcNodeList=n1" in line for line in bench.cluster.asked)
    assert [one.id for one in bench.journal.incidents()] == [blames.id]


@pytest.mark.parametrize("away", [6, 16])
def test_a_launcher_that_is_lost_is_helped_though_the_controller_is_away_again_and_again(
    bench: Bench, away: int
) -> None:
    calm(bench, 2)
    for number in range(240 if away > 10 else 200):
        bench.cluster.frozen = number % 20 < away
        bench.daemon.tick()
        bench.clock.sleep(0.6)
    assert "scontrol requeue 17" in bench.cluster.asked


def test_one_that_is_lost_when_the_controller_goes_for_minutes_is_helped_when_that_is_back(bench: Bench) -> None:
    calm(bench, 2)
    bench.cluster.frozen = True
    go(bench, 300)
    bench.cluster.frozen = False
    go(bench, 60)
    assert "scontrol requeue 17" in bench.cluster.asked


def test_one_that_is_not_patient_says_that_the_journal_takes_nothing(bench: Bench) -> None:
    bench.journal.close()
    bench.daemon.patient = False
    with pytest.raises(JournalError):
        bench.daemon.run(lambda _: True)


def test_a_stranded_launcher_that_is_not_heard_any_more_is_helped_in_the_end(bench: Bench) -> None:
    calm(bench, 2)
    bench.beat(Phase.STRANDED)
    bench.start()
    bench.daemon.run(lambda _: True)
    go(bench, 50)
    assert "scontrol requeue 17" in bench.cluster.asked


def test_one_that_says_it_again_is_believed(bench: Bench) -> None:
    calm(bench, 2)
    bench.cluster.frozen = True
    calm(bench, 4)
    bench.turn(2)
    bench.cluster.frozen = False
    bench.turn(4)
    assert "scontrol requeue 17" in bench.cluster.asked


def test_once_a_minute_what_is_old_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    thinned: list[float] = []
    monkeypatch.setattr(bench.journal, "thin", thinned.append)
    calm(bench, 320)
    assert 3 <= len(thinned) <= 5
    assert thinned[-1] == pytest.approx(bench.clock.unix(), abs=70.0)
