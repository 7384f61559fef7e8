"""Deeds through a Slurm that answers from a script: rights, exclusions, and what is said and kept.

The real Slurm does the same in tests/cluster/test_watch.py; here are the answers it seldom gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.tokens import TOKEN_HEADER
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable, beat_to_wire
from deeplink.scheduler.liveness.probe import Address
from deeplink.scheduler.recovery.evidence import ProbeResult, Remedy, Verdict, WatchPolicy
from deeplink.scheduler.recovery.records import Beat, IncidentKind, IncidentOutcome, NodeRecord, Phase
from deeplink.scheduler.recovery.recovery_steps import SETTLE_S
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.slurm.states import LAUNCH_FAILED
from deeplink.scheduler.watch.actor import Actor
from deeplink.scheduler.watch.authorizer import Authorizer
from deeplink.scheduler.watch.observer import Observer
from deeplink.scheduler.watch.server import WatchServicer
from deeplink.scheduler.watch.watchdog import Daemon
from tests.scheduler.slurm.answers import answer, job_answer
from tests.scheduler.watch.callers import ME, MINT, TOKEN


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs any more."""


class UnansweredError(Exception):
    """The watchdog did not take a beat."""


class Call:
    """What gRPC hands to a servicer, as far as ours uses it."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise UnansweredError(code, details)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_HEADER, TOKEN),)


@dataclass
class Cluster:
    """One job on n0 and n1 of four nodes, as Slurm's commands tell of it; its orders change what they tell."""

    job_state: str = "RUNNING"
    restarts: int = 0
    reason: str = "None"
    job_nodes: str = "n[0-1]"
    excluded: str = ""
    required: str = ""
    node_states: dict[str, str] = field(default_factory=lambda: dict.fromkeys(("n0", "n1", "n2", "n3"), "IDLE"))
    answers: dict[str, ProbeResult] = field(default_factory=dict)
    rights: bool = True
    sheds: bool = True
    quicker: bool = False
    comment: str = "(null)"
    node_comments: dict[str, str] = field(default_factory=dict)
    slurmds_started: dict[str, str] = field(default_factory=dict)
    gpus_used: dict[str, int] = field(default_factory=dict)  # of nodes that have four
    frozen: bool = False
    unanswered: str = ""
    deadly: str = ""
    asked: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.frozen:
            raise CommandError(argv, 1, "Unable to contact slurm controller (connect failure)")
        line = " ".join(argv)
        if argv[0] == "sinfo":
            return "".join(f"{name}\n" for name in self.node_states)
        if argv[0] == "squeue":
            return self._squeue(argv)
        if argv[:4] == ["scontrol", "--details", "show", "node"]:
            return "\n".join(self._node(name, details=True) for name in self.node_states)
        if argv[:3] == ["scontrol", "show", "node"]:
            return "\n".join(self._node(name) for name in self.node_states if self._wanted(name, argv))
        if argv[:2] == ["scontrol", "show"]:
            return ""
        if self.deadly == "before":
            raise Killed
        self.asked.append(line)
        if self.unanswered and self.unanswered in line:
            self.unanswered = ""
            raise CommandError(argv, 1, "slurm_update error: Socket timed out on send/recv operation")
        self._obey(argv)
        if self.deadly == "after":
            raise Killed
        return ""

    def _squeue(self, argv: Sequence[str]) -> str:
        if "%k" in " ".join(argv):
            return answer(argv, 17, self.comment)
        if "%P" in " ".join(argv):
            return answer(argv, 17, "main", 2, self.excluded, self.required)
        if not self.job_state:  # forgotten: it ended more than MinJobAge ago
            return ""
        nodes = self.job_nodes if self.job_state == "RUNNING" else ""
        return job_answer(
            argv, 17, state=self.job_state, reason=self.reason, restarts=self.restarts, nodes=nodes, user=ME
        )

    @staticmethod
    def _wanted(name: str, argv: Sequence[str]) -> bool:
        return len(argv) == 4 or name in argv[4] or "[" in argv[4]

    def _node(self, name: str, *, details: bool = False) -> str:
        leaf = f"NodeName={name} NodeAddr=10.0.0.{name[1:]} NodeHostName={name} State={self.node_states[name]}"
        started = f"SlurmdStartTime={self.slurmds_started.get(name, '2026-11-20T17:02:00')}"
        if name in self.gpus_used:
            leaf += " Gres=gpu:4" + (f" GresUsed=gpu:{self.gpus_used[name]}" if details else "")
        told = f"{leaf} BootTime=2026-11-20T17:01:31 {started} Reason=deeplink: x [root@2026-11-20T17:01:31]"
        return told + (f" Comment={self.node_comments[name]}" if name in self.node_comments else "")

    def _obey(self, argv: Sequence[str]) -> None:
        if "nodename=" in " ".join(argv):
            self._obey_operator(argv)
        elif argv[1] == "requeuehold":
            self.job_state, self.restarts, self.reason = "PENDING", 1, "job requeued in held state"
        elif argv[1] == "release":
            self.reason = "Resources"
        elif argv[1] == "requeue":
            self.job_state, self.restarts, self.reason = "PENDING", 1, "BeginTime"
            if self.quicker:  # Slurm's own requeue came between our look and our command
                raise CommandError(argv, 1, "Job is pending execution for job 17")
        else:
            self._change(argv, dict(word.split("=", 1) for word in argv[3:]))

    def _obey_operator(self, argv: Sequence[str]) -> None:
        if not self.rights:
            raise CommandError(argv, 1, "slurm_update error: Invalid user id")
        name, (order, _, value) = argv[2].partition("=")[2], argv[3].partition("=")
        if order == "comment":
            self.node_comments[name] = value
            return
        self.node_states[name] = {"drain": "IDLE+DRAIN", "down": "DOWN+DRAIN"}[value]
        if value == "down":
            self.job_nodes = "n0"

    def _change(self, argv: Sequence[str], fields: Mapping[str, str]) -> None:
        if "NodeList" in fields:
            if not self.sheds:
                raise CommandError(argv, 1, "slurm_update error: Job shrink is disabled")
            self.job_nodes = fields["NodeList"]
        self.comment = fields.get("Comment", self.comment)
        if "StartTime" in fields:
            self.reason = self.reason if self.reason == LAUNCH_FAILED else "Resources"
            self.excluded = fields.get("ExcNodeList", self.excluded)

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        return {name: self.answers.get(name, ProbeResult.ANSWERS) for name in targets}


@dataclass
class Bench:
    """A daemon over a scripted cluster, whose clock a test moves."""

    cluster: Cluster
    journal: Journal
    clock: ManualClock = field(default_factory=ManualClock)
    said: list[str] = field(default_factory=list)
    act: bool = True
    daemon: Daemon = field(init=False)
    heartbeats: HeartbeatTable = field(init=False)
    servicer: WatchServicer = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin as after a kill: nothing is remembered but the journal."""
        slurm, self.heartbeats = Slurm(self.cluster), HeartbeatTable()
        metrics = WatchMetrics(CollectorRegistry())
        observer = Observer(
            slurm=slurm,
            prober=self.cluster,
            heartbeats=self.heartbeats,
            journal=self.journal,
            clock=self.clock,
            policy=WatchPolicy(),
        )
        actor = Actor(
            slurm=slurm,
            journal=self.journal,
            observer=observer,
            clock=self.clock,
            metrics=metrics,
            say=self.said.append,
        )
        self.daemon = Daemon(
            observer=observer,
            actor=actor if self.act else None,
            journal=self.journal,
            policy=WatchPolicy(),
            clock=self.clock,
            metrics=metrics,
            say=self.said.append,
        )
        self.servicer = WatchServicer(
            self.journal,
            self.heartbeats,
            self.clock,
            metrics,
            Authorizer(MINT, observer, self.journal, self.clock),
        )

    def beat(self, phase: Phase = Phase.STRANDED, silent: str = "", silent_s: float = 4.0) -> None:
        nodes = (NodeName("n0"), NodeName("n1"))
        beat = Beat(
            attempt=Attempt(17, 0, 0),
            phase=phase,
            user=ME,
            job_name="resnet",
            nodes=nodes,
            node_beats=tuple(
                NodeRecord(name=name, silent_s=silent_s if name == silent else 0.0, job=17) for name in nodes
            ),
        )
        self.tell(beat)

    def tell(self, beat: Beat) -> None:
        """Say it to the watchdog's own ear.

        Raises:
            UnansweredError: it is to be said again.
        """
        self.servicer.Beat(beat_to_wire(beat), Call())  # type: ignore[arg-type]

    def turn(self, rounds: int, *, silent: str = "") -> None:
        for _ in range(rounds):
            if self.cluster.job_state == "RUNNING" and not self.cluster.restarts:
                self.beat(silent=silent)
            self.daemon.tick()
            self.clock.sleep(0.6)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Journal(tmp_path / "j.sqlite") as journal:
        yield Bench(Cluster(excluded="n9"), journal)


def lose(bench: Bench, name: str) -> None:
    bench.cluster.answers[name] = ProbeResult.SILENT


def test_a_dead_node_costs_its_job_one_restart_and_the_users_exclusions_stay(bench: Bench) -> None:
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    assert bench.cluster.asked == [
        "scontrol update nodename=n1 state=drain reason=deeplink: 17.0.0-end: node-dead",
        "scontrol update nodename=n1 state=down reason=deeplink: x",
        "scontrol requeue 17",
        "scontrol update jobid=17 ExcNodeList=n[1,9] StartTime=now",
    ]
    bench.cluster.job_state = "RUNNING"
    bench.turn(2)
    assert bench.journal.actions(only_open=True) == ()
    (incident,) = bench.journal.incidents()
    assert (incident.action, incident.outcome) == ("drain-down", IncidentOutcome.OPEN), (
        "open until it trains again"
    )
    assert incident.acted_unix > 0
    assert bench.journal.excluded(17).keys() == {"n1"}


def test_nodes_that_were_wished_for_it_do_not_bind_a_job_to_a_dead_one(bench: Bench) -> None:
    bench.cluster.required = "n[0-1]"
    lose(bench, "n1")
    bench.turn(12, silent="n1")
    assert "scontrol update jobid=17 ExcNodeList=n[1,9] ReqNodeList= StartTime=now" in bench.cluster.asked


def test_no_room_without_the_excluded_nodes_ends_in_the_users_own_exclusions(bench: Bench) -> None:
    lose(bench, "n1")
    bench.turn(40, silent="n1")
    assert bench.cluster.excluded == "n9"
    assert bench.journal.excluded(17) == {}
    assert any("waits in the queue" in line for line in bench.said)


def test_without_rights_the_dead_node_is_taken_out_of_the_job_which_then_starts_elsewhere(bench: Bench) -> None:
    bench.cluster.rights = False
    lose(bench, "n1")
    bench.turn(12, silent="n1")
    assert [line for line in bench.cluster.asked if "jobid" in line or "requeue" in line] == [
        "scontrol update jobid=17 NodeList=n0",
        "scontrol requeue 17",
        "scontrol update jobid=17 ExcNodeList=n[1,9] StartTime=now",
    ]
    assert any("rights" in line for line in bench.said)


def test_a_drain_that_it_has_no_right_to_is_tried_and_told_once(bench: Bench) -> None:
    bench.cluster.rights = bench.cluster.sheds = False
    lose(bench, "n1")
    bench.turn(150, silent="n1")
    assert [line for line in bench.cluster.asked if "state=drain" in line] == [
        "scontrol update nodename=n1 state=drain reason=deeplink: 17.0.0-end: node-dead"
    ]
    assert len([line for line in bench.said if "drain refused" in line]) == 1


def test_without_rights_it_waits_for_slurms_own_word_and_then_clears_the_hold(bench: Bench) -> None:
    bench.cluster.rights = bench.cluster.sheds = False
    lose(bench, "n1")
    bench.turn(12, silent="n1")
    assert not any("requeue" in line for line in bench.cluster.asked), "never while the node is unreachable"
    assert any("rights" in line for line in bench.said)
    refusals = len(bench.cluster.asked)
    assert refusals <= 4, "a refused command is not repeated for ever"
    bench.cluster.node_states["n1"] = "DOWN+NOT_RESPONDING"
    bench.turn(4, silent="n1")
    assert bench.cluster.asked[refusals:] == [
        "scontrol requeue 17",
        "scontrol update jobid=17 ExcNodeList=n[1,9] StartTime=now",
    ]


def asked_for(bench: Bench, remedy: Remedy, *reasons: str, node: str = "") -> None:
    verdict = Verdict(
        kind=IncidentKind.NODE_SICK if node else IncidentKind.APPLICATION_FAILED,
        remedy=remedy,
        reasons=reasons,
        attempt=Attempt(17, 0, 0),
        node=NodeName(node) if node else None,
    )
    actor = bench.daemon.actor
    assert actor is not None
    bench.beat(Phase.RUNNING)
    bench.daemon.observer.ask()
    actor.begin(verdict, None)
    for _ in range(12):
        actor.work()
        bench.clock.sleep(0.3)


def test_a_sick_node_gets_a_comment_and_no_more(bench: Bench) -> None:
    asked_for(bench, Remedy.COMMENT, "disk: 31 ms\nto write", node="n1")
    assert bench.cluster.asked == ["scontrol update nodename=n1 comment=deeplink: n1: disk: 31 ms to write"]
    (action,) = bench.journal.actions()
    assert (action.result, bench.cluster.node_states["n1"]) == ("the node's comment says it", "IDLE")


def test_an_administrators_comment_is_never_written_over(bench: Bench) -> None:
    bench.cluster.node_comments["n1"] = "loaner, back in May"
    asked_for(bench, Remedy.COMMENT, "disk slow", node="n1")
    assert bench.cluster.asked == []
    assert "administrator" in bench.journal.actions()[0].result


def test_an_order_that_nobody_answered_is_not_refused_but_given_again(bench: Bench) -> None:
    bench.cluster.rights = False
    bench.cluster.unanswered = " NodeList="
    lose(bench, "n1")
    bench.turn(int(SETTLE_S) + 12, silent="n1")
    shed = [line for line in bench.cluster.asked if " NodeList=" in line]
    assert len(shed) == 2, "without an answer once"
    assert shed[0] == shed[1]
    assert bench.cluster.restarts == 1


def test_a_job_that_a_node_did_not_start_is_released(bench: Bench) -> None:
    bench.turn(4)
    assert bench.cluster.asked == ["scontrol requeue 17", "scontrol update jobid=17 StartTime=now"]
    bench.cluster.reason = LAUNCH_FAILED
    bench.turn(int(SETTLE_S / 0.6) + 2)
    assert bench.cluster.asked[2:] == ["scontrol update jobid=17 StartTime=now", "scontrol release 17"]


def test_a_requeue_that_slurm_did_first_is_refused_and_that_is_success(bench: Bench) -> None:
    bench.cluster.quicker = True
    lose(bench, "n1")
    bench.turn(12, silent="n1")
    assert "scontrol requeue 17" in bench.cluster.asked
    assert not any("refused" in line for line in bench.said)
    assert bench.cluster.asked[-1] == "scontrol update jobid=17 ExcNodeList=n[1,9] StartTime=now"
    assert bench.cluster.restarts == 1


def killed(bench: Bench, silent: str) -> None:
    """Lose a node and die before the first command; what is begun is on record. Start again."""
    lose(bench, silent)
    bench.cluster.deadly = "before"
    with pytest.raises(Killed):
        bench.turn(12, silent=silent)
    assert bench.journal.actions(only_open=True)
    bench.cluster.deadly = ""
    bench.start()


def test_on_return_a_node_that_answers_by_now_is_neither_drained_nor_downed_for_one_lost_probe(
    bench: Bench,
) -> None:
    killed(bench, "n1")
    bench.turn(1)  # the first probe is lost, the next ones are not
    bench.cluster.answers.clear()
    bench.turn(8)
    assert not any("nodename" in line for line in bench.cluster.asked)
    assert any("answers again" in line for line in bench.said)


def test_on_return_with_an_own_network_that_is_dead_nothing_is_touched(bench: Bench) -> None:
    killed(bench, "n1")
    for name in bench.cluster.node_states:
        lose(bench, name)
    bench.turn(12, silent="n1")
    assert bench.cluster.asked == []
    assert any("touching nothing" in line for line in bench.said)
    bench.cluster.answers = {"n1": ProbeResult.SILENT}
    bench.turn(12, silent="n1")
    assert "scontrol requeue 17" in bench.cluster.asked


def test_on_return_after_long_one_silent_node_alone_is_no_reason_to_doubt_ourselves(bench: Bench) -> None:
    killed(bench, "n1")
    bench.cluster.job_state = "COMPLETED"  # nobody else gives reason to probe anything
    bench.clock.sleep(300.0)
    bench.turn(12)
    assert [line for line in bench.cluster.asked if "state=" in line] == [
        "scontrol update nodename=n1 state=drain reason=deeplink: 17.0.0-end: node-dead",
        "scontrol update nodename=n1 state=down reason=deeplink: x",
    ]
    assert not any("touching nothing" in line for line in bench.said)


def test_a_journal_that_takes_no_end_of_an_action_is_told_and_not_asked_again_without_a_pause(
    bench: Bench,
) -> None:
    lose(bench, "n1")
    bench.turn(5, silent="n1")
    bench.cluster.job_state = "RUNNING"  # again: there is but the end to write
    assert bench.journal.actions(only_open=True)
    bench.journal._db.execute("PRAGMA query_only = ON")
    waits = [bench.daemon.tick() for _ in range(3)]
    assert any("touching nothing" in line for line in bench.said)
    assert waits == [1.0, 1.0, 1.0]
    bench.journal._db.execute("PRAGMA query_only = OFF")
    bench.turn(2)
    assert bench.journal.actions(only_open=True) == ()


def test_while_slurm_does_not_answer_no_command_of_an_action_is_tried(bench: Bench) -> None:
    killed(bench, "n1")
    bench.cluster.frozen = True
    seen = len(bench.said)
    bench.turn(20, silent="n1")
    assert bench.cluster.asked == []
    assert not any("refused" in line for line in bench.said[seen:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_command_it_finishes_on_return(bench: Bench, when: str) -> None:
    lose(bench, "n1")
    deaths = 0
    for _ in range(30):
        bench.cluster.deadly = when
        try:
            bench.turn(1, silent="n1")
        except Killed:
            deaths += 1
            bench.start()
            bench.cluster.deadly = ""
            bench.turn(9 if when == "before" else 0, silent="n1")
    assert deaths >= (4 if when == "after" else 1)
    told = [line for line in bench.cluster.asked if "state=drain" in line or "state=down" in line]
    assert len(told) == 2
    assert [line for line in bench.cluster.asked if "requeue" in line] == ["scontrol requeue 17"]
    assert bench.cluster.excluded in {"n[1,9]", "n9"}
    assert bench.cluster.restarts == 1
    assert len(bench.journal.incidents()) == 1


def test_a_node_that_answers_again_before_it_is_downed_is_left_alone(bench: Bench) -> None:
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    bench.cluster.asked.clear()
    bench.cluster.node_states["n1"] = "IDLE+DRAIN"
    bench.cluster.answers.clear()
    bench.turn(3)
    assert not any("state=down" in line for line in bench.cluster.asked)


def test_an_observer_gives_no_order_and_says_what_it_would_do(bench: Bench) -> None:
    bench.act = False
    bench.start()
    lose(bench, "n1")
    bench.turn(10, silent="n1")
    assert bench.cluster.asked == []
    assert any("would drain-down" in line for line in bench.said)
    assert bench.journal.actions() == ()
    (incident,) = bench.journal.incidents()
    assert incident.action == "none"
    assert "observed only, would drain-down" in incident.evidence


def test_a_controller_that_does_not_answer_is_an_incident_and_nothing_is_touched(bench: Bench) -> None:
    bench.turn(2)
    bench.cluster.asked.clear()
    bench.cluster.frozen = True
    lose(bench, "n1")
    bench.turn(12, silent="n1")
    (incident,) = [one for one in bench.journal.incidents() if one.kind == "self-in-doubt"]
    assert incident.outcome is IncidentOutcome.OPEN
    bench.cluster.frozen = False
    bench.cluster.answers.clear()
    assert bench.cluster.asked == []
    bench.turn(4)
    ended = bench.journal.incident(incident.id)
    assert ended is not None
    assert ended.outcome is IncidentOutcome.RECOVERED


def test_a_doubt_that_a_killed_watchdog_left_open_ends_on_return(bench: Bench) -> None:
    bench.beat(Phase.RUNNING)
    bench.cluster.frozen = True
    bench.turn(12)
    assert [one.kind for one in bench.journal.incidents(only_open=True)] == ["self-in-doubt"]
    bench.cluster.frozen = False
    bench.start()
    bench.daemon.run(lambda _: True)
    (doubt,) = [one for one in bench.journal.incidents() if one.kind == "self-in-doubt"]
    assert doubt.outcome is IncidentOutcome.RECOVERED


def test_a_job_that_ended_while_nobody_watched_leaves_no_incident_open(bench: Bench) -> None:
    bench.act = False
    bench.start()
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    assert len(bench.journal.incidents(only_open=True)) == 1
    bench.cluster.job_state = ""
    bench.start()
    bench.daemon.run(lambda _: True)
    assert len(bench.heartbeats.all()) == 1
    assert len(bench.journal.incidents(only_open=True)) == 1, "Slurm may be about to know it again"
    for _ in range(50):
        bench.clock.sleep(4.0)
        bench.daemon.tick()
    assert bench.heartbeats.all() == ()
    (incident,) = bench.journal.incidents()
    assert incident.outcome is IncidentOutcome.FAILED


def test_a_job_of_another_user_than_the_one_who_beats_is_not_touched(bench: Bench) -> None:
    bench.cluster.answers["n1"] = ProbeResult.SILENT
    for _ in range(10):
        beat = Beat(
            attempt=Attempt(17, 0, 0),
            phase=Phase.STRANDED,
            user="mallory",
            nodes=(NodeName("n0"), NodeName("n1")),
            node_beats=(NodeRecord(name=NodeName("n1"), silent_s=9.0, job=17),),
        )
        bench.heartbeats.hear(beat, bench.clock.monotonic())
        bench.daemon.tick()
        bench.clock.sleep(0.6)
    assert bench.cluster.asked == []
    assert bench.journal.incidents() == ()


def test_stopped_for_a_while_it_believes_no_silence_it_did_not_hear(bench: Bench) -> None:
    bench.beat(Phase.RUNNING)
    bench.daemon.tick()
    bench.clock.sleep(500.0)
    bench.daemon.tick()
    assert bench.cluster.asked == []
    assert any("silence is measured from now on" in line for line in bench.said)


def test_stopped_while_it_acts_it_first_hears_whether_the_job_has_helped_itself(bench: Bench) -> None:
    bench.cluster.rights = False
    lose(bench, "n0")  # the batch host: nothing can be done but wait for Slurm
    bench.turn(8, silent="n0")
    (action,) = [one for one in bench.journal.actions(only_open=True) if one.remedy == "restart"]
    bench.cluster.answers.clear()
    bench.clock.sleep(60.0)
    bench.daemon.tick()
    bench.clock.sleep(0.6)
    went_on = Beat(attempt=Attempt(17, 0, 1), phase=Phase.RUNNING, user=ME)
    bench.heartbeats.hear(went_on, bench.clock.monotonic())
    bench.daemon.tick()
    assert "scontrol requeue 17" not in bench.cluster.asked
    ended = bench.journal.action(action.key)
    assert ended is not None
    assert ended.result == "gave up: the job goes on by itself"


def test_when_a_job_ends_its_open_incidents_end_too(bench: Bench) -> None:
    bench.act = False
    bench.start()
    lose(bench, "n1")
    bench.turn(8, silent="n1")
    bench.cluster.job_state = "CANCELLED"
    bench.turn(8)
    (incident,) = bench.journal.incidents()
    assert incident.outcome is IncidentOutcome.FAILED
    assert bench.heartbeats.all() == ()
