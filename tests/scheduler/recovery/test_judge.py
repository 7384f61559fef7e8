"""Evidence to verdict: tables of cases, and what must hold whatever is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deeplink.core.finding import HEALTH, Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.recovery.evidence import (
    JobSnapshot,
    NodeSnapshot,
    ProbeResult,
    Remedy,
    Snapshot,
    Verdict,
    WatchPolicy,
    targets,
    tense,
)
from deeplink.scheduler.recovery.judge import judge as judge_freely
from deeplink.scheduler.recovery.records import IncidentKind, Phase
from deeplink.scheduler.slurm.states import LAUNCH_FAILED, JobState
from tests.effort import examples

POLICY = WatchPolicy()
NAMES = tuple(NodeName(f"n{number}") for number in range(8))
ACTS = {Remedy.DRAIN, Remedy.DRAIN_DOWN, Remedy.RESTART}


_NODE_LOSS = (Remedy.NOTHING, Remedy.DRAIN, Remedy.DRAIN_DOWN)
_JOB_LOSS = (Remedy.NOTHING, Remedy.RESTART)

TABLE: tuple[tuple[str, IncidentKind, tuple[Remedy, ...]], ...] = (
    # Evidence, verdict, remedies; NOTHING beside another one: a brake, the policy or --no-requeue holds it back.
    ("slurmctld or most nodes silent", IncidentKind.WATCHDOG_PARTITIONED, (Remedy.NOTHING,)),
    ("all nodes of a leaf silent, a second witness", IncidentKind.SWITCH_SUSPECT, _NODE_LOSS),
    ("most agents silent, their nodes answer", IncidentKind.AGENTS_SILENT, (Remedy.NOTHING,)),
    ("probes of slurmd fail, a second witness", IncidentKind.NODE_DEAD, _NODE_LOSS),
    ("slurmd gone or started again, an agent heard", IncidentKind.SLURMD_LOST, (Remedy.NOTHING,)),
    ("a node's own checks", IncidentKind.NODE_SICK, (Remedy.COMMENT, Remedy.DRAIN)),
    ("the launcher has no way on, or waits for the lost", IncidentKind.JOB_STRANDED, _JOB_LOSS),
    ("the launcher not heard, every node answers", IncidentKind.LAUNCHER_LOST, _JOB_LOSS),
    ("another kernel since the agent fell silent", IncidentKind.NODE_REBOOTED, _JOB_LOSS),
    ("requeued by Slurm for an incident, and held", IncidentKind.REQUEUE_HELD, _JOB_LOSS),
    ("Slurm ended it: preempted", IncidentKind.PREEMPTED, (Remedy.NOTHING,)),
    ("Slurm ended it: its time was up", IncidentKind.TIME_LIMIT, (Remedy.NOTHING,)),
    ("Slurm ended it: memory", IncidentKind.OUT_OF_MEMORY, (Remedy.NOTHING,)),
    ("a node that we drained answers and is well", IncidentKind.NODE_BACK, (Remedy.RESUME,)),
)
IN_TABLE = {(kind, remedy) for _, kind, remedies in TABLE for remedy in remedies}


def judge(snapshot: Snapshot, policy: WatchPolicy) -> tuple[Verdict, ...]:
    """Judge, and compare what comes of it with the table."""
    verdicts = judge_freely(snapshot, policy)
    assert {(verdict.kind, verdict.remedy) for verdict in verdicts} <= IN_TABLE
    return verdicts


def up(name: str) -> NodeSnapshot:
    return NodeSnapshot(
        name=NodeName(name),
        leaf=f"leaf{int(name[1:]) // 4}",
        slurmd=ProbeResult.ANSWERS,
        answering_s=5.0,
    )


def gone(name: str, away_s: float = 4.0, answer: ProbeResult = ProbeResult.SILENT) -> NodeSnapshot:
    return replace(up(name), slurmd=answer, away_s=away_s, away_probes=int(away_s / 0.5), answering_s=0.0)


def cluster(*others: NodeSnapshot) -> dict[NodeName, NodeSnapshot]:
    return {name: up(name) for name in NAMES} | {node.name: node for node in others}


def job(**changes: object) -> JobSnapshot:
    """A job on n0, n1 and n4, all well, its batch host n0."""
    well = JobSnapshot(
        attempt=Attempt(17, 0, 0),
        phase=Phase.RUNNING,
        state=JobState.RUNNING,
        nodes=(NAMES[0], NAMES[1], NAMES[4]),
        rank_nodes=(NAMES[0], NAMES[1], NAMES[4]),
        batch_host=NAMES[0],
        beat_age_s=0.5,
        agents_silent={NAMES[0]: 0.1, NAMES[1]: 0.1, NAMES[4]: 0.1},
    )
    return replace(well, **changes)  # type: ignore[arg-type] # each test names fields of JobSight


def missing(name: NodeName, silent_s: float = 4.0) -> Mapping[NodeName, float]:
    return {**job().agents_silent, name: silent_s}


WELL_ELSEWHERE = job(attempt=Attempt(16, 0, 0), nodes=NAMES[5:7], rank_nodes=NAMES[5:7], batch_host=NAMES[5])
STRANDED = job(phase=Phase.STRANDED, agents_silent=missing(NAMES[1]))
REQUEUED_UNSEEN = job(
    state=JobState.PENDING,
    restarts=1,
    nodes=(),
    reason="BeginTime",
    beat_age_s=1.0,
    heard=False,
    missed_s=9.0,
)


LEAF0 = tuple(gone(name) for name in ("n0", "n1", "n2", "n3"))
TOLD = tuple(replace(up(name), attended_s=2.0, heard_s=2.0) for name in NAMES)
REBOOTED = replace(up("n1"), boot_id="b", attended_s=1.0, heard_s=1.0)


def found(check: str, severity: Severity) -> Finding:
    return Finding(check=check, severity=severity, text="something is wrong")


def sick(name: str, severity: Severity, check: str = "disk") -> NodeSnapshot:
    return replace(up(name), findings=(found(check, severity),), heard_s=0.5)


def test_why_we_doubt_ourselves_is_told_whole() -> None:
    nodes = cluster(*(gone(name) for name in NAMES[:5]))
    (verdict,) = judge(Snapshot(nodes=nodes, controller=False, controller_problem="timed out"), POLICY)
    assert verdict.reasons == (
        "slurmctld does not answer: timed out",
        "5 of 8 nodes do not answer us: more likely our own network is at fault",
    )


def test_it_is_said_how_many_agents_are_missed() -> None:
    mute = job(agents_silent={**dict.fromkeys(job().nodes, 14.0), job().nodes[0]: 0.1})
    (verdict,) = judge(Snapshot(jobs=(mute,), nodes=cluster()), POLICY)
    assert verdict.reasons == ("the launcher of job 17 misses 2 of its 3 agents at once",)


def brief(verdicts: tuple[Verdict, ...]) -> list[tuple[str, str, str]]:
    return [(verdict.kind, verdict.node or verdict.leaf, verdict.remedy) for verdict in verdicts]


CASES: dict[str, tuple[Snapshot, list[tuple[str, str, str]]]] = {
    "all is well": (Snapshot(jobs=(job(),), nodes=cluster()), []),
    "nothing was looked at": (Snapshot(jobs=(STRANDED,), nodes={}), []),
    "a dead node strands its job": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(gone("n1"))),
        [("node-dead", "n1", "drain-down"), ("job-stranded", "n1", "restart")],
    ),
    "a host that refuses and whose agent is missed is dead too": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(gone("n1", answer=ProbeResult.REFUSES))),
        [("node-dead", "n1", "drain-down"), ("job-stranded", "n1", "restart")],
    ),
    "the launcher still recovers by itself: the node is kept from others, no more": (
        Snapshot(jobs=(job(phase=Phase.RECOVERING, agents_silent=missing(NAMES[1])),), nodes=cluster(gone("n1"))),
        [("node-dead", "n1", "drain")],
    ),
    "the probe alone is no proof": (Snapshot(jobs=(job(),), nodes=cluster(gone("n1"))), []),
    "the launcher alone is no proof, and a requeue would hang": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(replace(up("n1"), slurmd=ProbeResult.UNKNOWN))),
        [],
    ),
    "silent for too short a time": (Snapshot(jobs=(STRANDED,), nodes=cluster(gone("n1", away_s=1.0))), []),
    "missed for too short a time": (
        Snapshot(jobs=(replace(STRANDED, agents_silent=missing(NAMES[1], 2.0)),), nodes=cluster(gone("n1"))),
        [],
    ),
    "slurmd is dead, its job lives": (
        Snapshot(jobs=(job(),), nodes=cluster(replace(gone("n1", answer=ProbeResult.REFUSES), responding=False))),
        [],
    ),
    "the batch host dies, and the launcher with it": (
        Snapshot(jobs=(job(beat_age_s=4.0),), nodes=cluster(gone("n0"))),
        [("node-dead", "n0", "drain-down"), ("launcher-lost", "n0", "restart")],
    ),
    "the launcher is silent, every node answers: not at once": (
        Snapshot(jobs=(job(beat_age_s=10.0),), nodes=cluster()),
        [],
    ),
    "the same of one that runs on a login node, under salloc": (
        Snapshot(jobs=(job(beat_age_s=10.0, batch_host=NodeName("login")),), nodes=cluster()),
        [],
    ),
    "the same where Slurm does not say where it runs": (
        Snapshot(jobs=(job(beat_age_s=10.0, batch_host=None),), nodes=cluster()),
        [],
    ),
    "its host was taken from the allocation": (
        Snapshot(jobs=(job(beat_age_s=10.0, batch_host=NAMES[7]),), nodes=cluster()),
        [("launcher-lost", "", "restart")],
    ),
    "the launcher is silent for long, every node answers": (
        Snapshot(jobs=(job(beat_age_s=25.0),), nodes=cluster()),
        [("launcher-lost", "", "restart")],
    ),
    "a launcher not heard since we came back may have ended meanwhile": (
        Snapshot(jobs=(job(beat_age_s=25.0, heard=False),), nodes=cluster()),
        [],
    ),
    "but one whose host is dead did not": (
        Snapshot(jobs=(job(beat_age_s=4.0, heard=False),), nodes=cluster(gone("n0"))),
        [("node-dead", "n0", "drain-down"), ("launcher-lost", "n0", "restart")],
    ),
    "stranded though every node answers": (
        Snapshot(jobs=(STRANDED,), nodes=cluster()),
        [("job-stranded", "", "restart")],
    ),
    "the same, said before we came to trust ourselves again": (
        Snapshot(jobs=(replace(STRANDED, beat_age_s=0.9, doubted=True),), nodes=cluster()),
        [],
    ),
    "the same, said since": (
        Snapshot(jobs=(replace(STRANDED, beat_age_s=0.2),), nodes=cluster()),
        [("job-stranded", "", "restart")],
    ),
    "the same, and silent for long while we could hear": (
        Snapshot(jobs=(replace(STRANDED, beat_age_s=21.0, doubted=True),), nodes=cluster()),
        [("job-stranded", "", "restart")],
    ),
    "whose node is dead need not say it again": (
        Snapshot(jobs=(replace(STRANDED, beat_age_s=0.9, doubted=True),), nodes=cluster(gone("n1"))),
        [("node-dead", "n1", "drain-down"), ("job-stranded", "n1", "restart")],
    ),
    "a whole leaf is silent: the job's nodes are given up in its name, and the job runs elsewhere": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(*LEAF0)),
        [
            ("switch-suspect", "leaf0", "nothing"),
            ("switch-suspect", "n0", "drain-down"),
            ("switch-suspect", "n1", "drain-down"),
            ("job-stranded", "n0", "restart"),
        ],
    ),
    "the launcher waits for a silent leaf, not knowing whether it is itself": (
        Snapshot(jobs=(job(agents_silent=missing(NAMES[1], 5.5)),), nodes=cluster(*LEAF0[1:], gone("n0"))),
        [
            ("switch-suspect", "leaf0", "nothing"),
            ("switch-suspect", "n0", "drain-down"),
            ("switch-suspect", "n1", "drain-down"),
            ("job-stranded", "n0", "restart"),
        ],
    ),
    "the launcher helps itself when a leaf is cut: its nodes are kept from others": (
        Snapshot(
            jobs=(job(phase=Phase.RECOVERING, batch_host=NAMES[4], agents_silent=missing(NAMES[1], 9.0)),),
            nodes=cluster(*LEAF0),
        ),
        [
            ("switch-suspect", "leaf0", "nothing"),
            ("switch-suspect", "n0", "drain"),
            ("switch-suspect", "n1", "drain"),
        ],
    ),
    "all nodes of the leaf are given up by now, and Slurm has not ended the job yet": (
        Snapshot(
            jobs=(STRANDED,),
            nodes=cluster(
                *(
                    replace(node, down=True, drained=True, ours=True, why="cluster-switch-suspect-leaf0@1")
                    for node in LEAF0
                )
            ),
            leaves_lately=frozenset({"leaf0"}),
        ),
        [("job-stranded", "n0", "restart")],
    ),
    "a second leaf within a minute: the brake": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(*LEAF0), leaves_lately=frozenset({"leaf1"})),
        [("switch-suspect", "leaf0", "nothing")],
    ),
    "an agent on a silent leaf is heard: no switch, and not dead": (
        Snapshot(jobs=(job(),), nodes=cluster(*LEAF0[1:], replace(gone("n0"), heard_s=0.5))),
        [("slurmd-lost", "n0", "nothing")],
    ),
    "slurmd is killed, its node's agent is heard after that": (
        Snapshot(jobs=(job(),), nodes=cluster(replace(gone("n1", answer=ProbeResult.REFUSES), heard_s=0.4))),
        [("slurmd-lost", "n1", "nothing")],
    ),
    "an agent heard after the newest probe: its node may just have come back": (
        Snapshot(
            jobs=(job(),),
            nodes=cluster(replace(gone("n1", answer=ProbeResult.REFUSES), probed_s=0.6, heard_s=0.4)),
        ),
        [],
    ),
    "the same, on a node without a job": (
        Snapshot(nodes=cluster(replace(gone("n5", answer=ProbeResult.REFUSES), heard_s=0.4))),
        [("slurmd-lost", "n5", "nothing")],
    ),
    "an agent says that slurmd is gone: told at the first probe": (
        Snapshot(
            nodes=cluster(
                replace(gone("n5", 0.0, ProbeResult.REFUSES), findings=(found("slurmd", Severity.WARNING),))
            )
        ),
        [("slurmd-lost", "n5", "nothing")],
    ),
    "its agent has started slurmd again: told": (
        Snapshot(nodes=cluster(sick("n5", Severity.NOTE, "slurmd"))),
        [("slurmd-lost", "n5", "nothing")],
    ),
    "an agent that cannot tell how slurmd is, and a probe that fails once": (
        Snapshot(
            nodes=cluster(replace(gone("n5", 0.0), findings=(found("slurmd", Severity.UNKNOWN),), heard_s=0.5))
        ),
        [],
    ),
    "an agent misses a slurmd that answers": (
        Snapshot(nodes=cluster(sick("n5", Severity.WARNING, "slurmd"))),
        [],
    ),
    "a standing agent hears its node that a launcher misses: not dead": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(replace(gone("n1"), heard_s=1.0, attended_s=1.0))),
        [("slurmd-lost", "n1", "nothing")],
    ),
    "slurmd was gone first, then the node itself: what its agent said long ago keeps nobody from seeing that": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(replace(gone("n1", 60.0), heard_s=30.0, attended_s=30.0))),
        [("node-dead", "n1", "drain-down"), ("job-stranded", "n1", "restart")],
    ),
    "sick by its own checks: drained, its jobs go on": (
        Snapshot(jobs=(job(),), nodes=cluster(sick("n1", Severity.ERROR))),
        [("node-sick", "n1", "drain")],
    ),
    "sick and drained by an administrator": (
        Snapshot(nodes=cluster(replace(sick("n1", Severity.ERROR), drained=True))),
        [("node-sick", "n1", "comment")],
    ),
    "worth a comment": (
        Snapshot(nodes=cluster(sick("n1", Severity.WARNING))),
        [("node-sick", "n1", "comment")],
    ),
    "worth a look: in its record, and no incident": (
        Snapshot(nodes=cluster(sick("n1", Severity.NOTE))),
        [],
    ),
    "a check that could not tell": (Snapshot(nodes=cluster(sick("n1", Severity.UNKNOWN))), []),
    "a check gone wrong on a whole site: the brake": (
        Snapshot(nodes=cluster(*(sick(name, Severity.ERROR) for name in NAMES[:3]))),
        [("node-sick", name, "comment") for name in NAMES[:3]],
    ),
    "a check gone wrong, slowly: those it had drained before count": (
        Snapshot(
            nodes=cluster(
                sick("n4", Severity.ERROR),
                *(
                    replace(up(name), ours=True, drained=True, why=f"cluster-node-sick-{name}@17")
                    for name in ("n1", "n2")
                ),
            )
        ),
        [("node-sick", "n4", "comment")],
    ),
    "one stuck mount is its node's": (
        Snapshot(nodes=cluster(sick("n1", Severity.ERROR, "mount"))),
        [("node-sick", "n1", "drain")],
    ),
    "stuck mounts on several nodes are the storage's": (
        Snapshot(
            jobs=(job(beat_age_s=25.0),),
            nodes=cluster(*(sick(name, Severity.ERROR, "mount") for name in NAMES[:3])),
        ),
        [],
    ),
    "two nodes with a stuck mount are no storage": (
        Snapshot(nodes=cluster(*(sick(name, Severity.WARNING, "mount") for name in NAMES[:2]))),
        [("node-sick", "n0", "comment"), ("node-sick", "n1", "comment")],
    ),
    "standing agents of which the journal alone tells": (
        Snapshot(nodes=cluster(*(replace(up(name), attended_s=30.0) for name in NAMES))),
        [],
    ),
    "a launcher says that its writes hang: it is not restarted": (
        Snapshot(jobs=(job(beat_age_s=25.0, told=frozenset({"storage-frozen"})),), nodes=cluster()),
        [],
    ),
    "all agents of a job are silent, all nodes answer": (
        Snapshot(
            jobs=(job(phase=Phase.STRANDED, agents_silent=dict.fromkeys(job().nodes, 30.0)),), nodes=cluster()
        ),
        [("agents-silent", "", "nothing")],
    ),
    "all agents of a job are silent while its ranks start: starved": (
        Snapshot(jobs=(job(agents_silent=dict.fromkeys(job().nodes, 9.0)),), nodes=cluster()),
        [],
    ),
    "one agent is silent, and that of a node which Slurm has taken from the job": (
        Snapshot(
            jobs=(
                job(
                    nodes=(NAMES[0], NAMES[4]),
                    rank_nodes=(NAMES[0], NAMES[4]),
                    agents_silent={NAMES[0]: 0.1, NAMES[1]: 50.0, NAMES[4]: 4.0},
                ),
            ),
            nodes=cluster(),
        ),
        [],
    ),
    "for more than a minute: its launcher is believed": (
        Snapshot(
            jobs=(job(phase=Phase.STRANDED, agents_silent=dict.fromkeys(job().nodes, 70.0)),), nodes=cluster()
        ),
        [("agents-silent", "", "nothing"), ("job-stranded", "", "restart")],
    ),
    "the same, and the agent of its own host is heard": (
        Snapshot(
            jobs=(
                job(phase=Phase.STRANDED, agents_silent={**dict.fromkeys(job().nodes, 70.0), job().nodes[0]: 0.1}),
            ),
            nodes=cluster(),
        ),
        [("agents-silent", "", "nothing"), ("job-stranded", "", "restart")],
    ),
    "most standing agents are silent": (
        Snapshot(
            nodes=cluster(*(replace(up(name), attended_s=30.0, heard_s=30.0) for name in NAMES[:5]), *(TOLD[5:]))
        ),
        [("agents-silent", "", "nothing")],
    ),
    "a few standing agents are silent": (
        Snapshot(
            nodes=cluster(*(replace(up(name), attended_s=30.0, heard_s=30.0) for name in NAMES[:3]), *(TOLD[3:]))
        ),
        [],
    ),
    "a fast reboot under a rank that its launcher does nothing about": (
        Snapshot(
            jobs=(job(agents_silent=missing(NAMES[1], 5.5), boots={NAMES[1]: "a"}),), nodes=cluster(REBOOTED)
        ),
        [("node-rebooted", "n1", "restart")],
    ),
    "a fast reboot of a spare: the ranks go on": (
        Snapshot(
            jobs=(
                job(agents_silent=missing(NAMES[1], 9.0), boots={NAMES[1]: "a"}, rank_nodes=(NAMES[0], NAMES[4])),
            ),
            nodes=cluster(REBOOTED),
        ),
        [],
    ),
    "a fast reboot: the launcher has a few seconds": (
        Snapshot(
            jobs=(job(agents_silent=missing(NAMES[1], 4.0), boots={NAMES[1]: "a"}),), nodes=cluster(REBOOTED)
        ),
        [],
    ),
    "a fast reboot: the launcher recovers": (
        Snapshot(
            jobs=(job(phase=Phase.RECOVERING, agents_silent=missing(NAMES[1], 9.0), boots={NAMES[1]: "a"}),),
            nodes=cluster(REBOOTED),
        ),
        [],
    ),
    "a fast reboot of the batch host": (
        Snapshot(
            jobs=(job(beat_age_s=3.5, boots={NAMES[0]: "a"}),), nodes=cluster(replace(up("n0"), boot_id="b"))
        ),
        [("node-rebooted", "n0", "restart")],
    ),
    "a fast reboot that Slurm's boot time shows": (
        Snapshot(jobs=(job(beat_age_s=3.5),), nodes=cluster(replace(up("n0"), booted_s=1.0))),
        [("node-rebooted", "n0", "restart")],
    ),
    "a boot before the launcher fell silent": (
        Snapshot(jobs=(job(beat_age_s=3.5),), nodes=cluster(replace(up("n0"), booted_s=90.0))),
        [],
    ),
    "a new slurmd, and then silence": (
        Snapshot(jobs=(job(beat_age_s=9.0),), nodes=cluster(replace(up("n0"), slurmd_restarted_s=90.0))),
        [],
    ),
    "silence, and then a new slurmd": (
        Snapshot(jobs=(job(beat_age_s=5.5),), nodes=cluster(replace(up("n0"), slurmd_restarted_s=1.0))),
        [("node-rebooted", "n0", "restart")],
    ),
    "a new slurmd, and a launcher that stammers": (
        Snapshot(jobs=(job(beat_age_s=4.0),), nodes=cluster(replace(up("n0"), slurmd_restarted_s=1.0))),
        [],
    ),
    "the same kernel, whatever Slurm's boot time": (
        Snapshot(
            jobs=(job(beat_age_s=5.5, boots={NAMES[0]: "a"}),),
            nodes=cluster(replace(up("n0"), boot_id="a", heard_s=1.0, booted_s=1.0, slurmd_restarted_s=1.0)),
        ),
        [],
    ),
    "the same kernel, as told before it fell silent": (
        Snapshot(
            jobs=(job(beat_age_s=5.5, boots={NAMES[0]: "a"}),),
            nodes=cluster(replace(up("n0"), boot_id="a", heard_s=5.6, slurmd_restarted_s=1.0)),
        ),
        [("node-rebooted", "n0", "restart")],
    ),
    "another kernel, but its launcher hears the agent": (
        Snapshot(jobs=(job(boots={NAMES[1]: "a"}),), nodes=cluster(REBOOTED)),
        [],
    ),
    "stranded by a fast reboot": (
        Snapshot(jobs=(replace(STRANDED, boots={NAMES[1]: "a"}),), nodes=cluster(REBOOTED)),
        [("node-rebooted", "n1", "restart")],
    ),
    "preempted": (
        Snapshot(jobs=(job(state=JobState.PREEMPTED, nodes=()),), nodes=cluster()),
        [("preempted", "", "nothing")],
    ),
    "out of time, and its launcher said so": (
        Snapshot(jobs=(job(state=JobState.TIMEOUT, nodes=(), told=frozenset({"time-limit"})),), nodes=cluster()),
        [],
    ),
    "a mate drained by us before does not make it a switch": (
        Snapshot(
            jobs=(STRANDED,),
            nodes=cluster(
                *(replace(gone(name), ours=True, drained=True) for name in ("n0", "n2", "n3")), gone("n1")
            ),
        ),
        [("node-dead", "n1", "drain-down")],
    ),
    "most are silent: it is us": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(*(gone(name) for name in NAMES[:5]))),
        [("self-in-doubt", "", "nothing")],
    ),
    "a leaf was given up, and what is left of it alone is probed for a job's sake": (
        Snapshot(
            nodes={name: replace(up(name), slurmd=ProbeResult.UNKNOWN) for name in NAMES[4:]}
            | {node.name: node for node in LEAF0},
            leaves_lately=frozenset({"leaf0"}),
        ),
        [],
    ),
    "the controller does not answer": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(gone("n1")), controller=False, controller_problem="frozen"),
        [("self-in-doubt", "", "nothing")],
    ),
    "every launcher is silent though their hosts answer: our ears": (
        Snapshot(jobs=(job(beat_age_s=30.0), job(attempt=Attempt(18, 0, 0), beat_age_s=30.0)), nodes=cluster()),
        [("launcher-lost", "", "nothing")] * 2,
    ),
    "every launcher is silent, and their hosts are not probed": (
        Snapshot(
            jobs=(job(beat_age_s=30.0), job(attempt=Attempt(18, 0, 0), beat_age_s=30.0)),
            nodes={name: replace(up(name), slurmd=ProbeResult.UNKNOWN) for name in NAMES},
        ),
        [],
    ),
    "one was lost for long, on a login node, when the host of the last one dies": (
        Snapshot(
            jobs=(
                job(beat_age_s=4.0),
                job(
                    attempt=Attempt(18, 0, 0),
                    beat_age_s=14.0,
                    batch_host=None,
                    nodes=NAMES[5:7],
                    rank_nodes=NAMES[5:7],
                ),
            ),
            nodes=cluster(gone("n0")),
        ),
        [("node-dead", "n0", "drain-down"), ("launcher-lost", "n0", "restart")],
    ),
    "one was lost, though its host answers, while the last one was still heard": (
        Snapshot(
            jobs=(
                job(beat_age_s=4.0),
                job(attempt=Attempt(18, 0, 0), beat_age_s=30.0, batch_host=NAMES[5], nodes=NAMES[5:7]),
            ),
            nodes=cluster(gone("n0")),
        ),
        [("node-dead", "n0", "drain-down"), ("launcher-lost", "n0", "restart"), ("launcher-lost", "", "restart")],
    ),
    "every launcher is silent, as their hosts are": (
        Snapshot(
            jobs=tuple(
                job(attempt=Attempt(17 + at, 0, 0), beat_age_s=30.0, batch_host=NAMES[at]) for at in (0, 1)
            ),
            nodes=cluster(gone("n0"), replace(up("n1"), slurmd=ProbeResult.UNKNOWN, down=True)),
        ),
        [
            ("node-dead", "n0", "drain-down"),
            ("launcher-lost", "n0", "restart"),
            ("launcher-lost", "n0", "restart"),
        ],
    ),
    "more launchers silent than can be believed: the brake": (
        Snapshot(
            jobs=(
                WELL_ELSEWHERE,
                *(job(attempt=Attempt(at, 0, 0), beat_age_s=20.0 - 4.0 * (at - 17)) for at in (17, 18, 19)),
            ),
            nodes=cluster(),
        ),
        [("launcher-lost", "", "nothing")],
    ),
    "one silent alone, though others were lost together long before": (
        Snapshot(
            jobs=(
                WELL_ELSEWHERE,
                job(beat_age_s=20.0),
                *(job(attempt=Attempt(at, 0, 0), beat_age_s=600.0) for at in (18, 19, 20)),
            ),
            nodes=cluster(),
        ),
        [("launcher-lost", "", "restart"), *[("launcher-lost", "", "nothing")] * 3],
    ),
    "those that may not be started again do not count": (
        Snapshot(
            jobs=(
                WELL_ELSEWHERE,
                job(beat_age_s=20.0),
                *(job(attempt=Attempt(at, 0, 0), beat_age_s=15.0, requeueable=False) for at in (18, 19, 20)),
            ),
            nodes=cluster(),
        ),
        [("launcher-lost", "", "restart")],
    ),
    "so many launchers silent as are believed": (
        Snapshot(
            jobs=(
                WELL_ELSEWHERE,
                *(job(attempt=Attempt(at, 0, 0), beat_age_s=20.0 - 6.0 * (at - 17)) for at in (17, 18, 19)),
            ),
            nodes=cluster(),
        ),
        [("launcher-lost", "", "restart")],
    ),
    "a stranger's job runs on the dead node: not downed": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(replace(gone("n1"), strangers=1))),
        [("node-dead", "n1", "drain"), ("job-stranded", "n1", "restart")],
    ),
    "more dead than can be believed: the brake": (
        Snapshot(jobs=(STRANDED,), nodes=cluster(gone("n1")), dead_lately=frozenset({NAMES[5], NAMES[6]})),
        [("node-dead", "n1", "nothing")],
    ),
    "a job that Slurm started again and that has not beaten yet": (
        Snapshot(jobs=(replace(STRANDED, restarts=1),), nodes=cluster(gone("n1"))),
        [],
    ),
    "requeued by Slurm and held, because of what went wrong": (
        Snapshot(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime", rescued=True),),
            nodes=cluster(),
        ),
        [("requeue-held", "", "restart")],
    ),
    "not started by a node, and held for it": (
        Snapshot(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason=LAUNCH_FAILED),),
            nodes=cluster(),
        ),
        [("requeue-held", "", "restart")],
    ),
    "not started by a node, of a run that has ended": (
        Snapshot(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason=LAUNCH_FAILED, phase=Phase.FAILED),),
            nodes=cluster(),
        ),
        [],
    ),
    "requeued by its user: his business": (
        Snapshot(jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime"),), nodes=cluster()),
        [],
    ),
    "requeued by Slurm, whose batch host had booted again": (
        Snapshot(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime", beat_age_s=3.0),),
            nodes=cluster(replace(up("n0"), slurmd_restarted_s=1.0)),
        ),
        [("node-rebooted", "n0", "restart")],
    ),
    "requeued by Slurm while we were away, and its batch host boots only now": (
        Snapshot(
            jobs=(REQUEUED_UNSEEN,),
            nodes=cluster(replace(up("n0"), slurmd_age_s=7.0)),
        ),
        [("node-rebooted", "n0", "restart")],
    ),
    "requeued while we were away, and slurmd was started on all its nodes": (
        Snapshot(
            jobs=(REQUEUED_UNSEEN,),
            nodes={name: replace(node, slurmd_age_s=7.0) for name, node in cluster().items()},
        ),
        [],
    ),
    "requeued while we were away, and slurmd was started on a node that is not its batch host": (
        Snapshot(
            jobs=(REQUEUED_UNSEEN,),
            nodes=cluster(replace(up("n1"), slurmd_age_s=7.0)),
        ),
        [],
    ),
    "put off by its user while we were away for long, and then a node boots": (
        Snapshot(
            jobs=(replace(REQUEUED_UNSEEN, missed_s=600.0),),
            nodes=cluster(replace(up("n0"), slurmd_age_s=1.0)),
        ),
        [],
    ),
    "requeued by its user, long after a node had booted": (
        Snapshot(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime", beat_age_s=3.0),),
            nodes=cluster(replace(up("n0"), slurmd_restarted_s=60.0, booted_s=61.0)),
        ),
        [],
    ),
    "put off by its user, and then a node boots": (
        Snapshot(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime", beat_age_s=3_600.0),),
            nodes=cluster(replace(up("n0"), slurmd_restarted_s=1.0, booted_s=1.0)),
        ),
        [],
    ),
    "may not be requeued": (
        Snapshot(jobs=(replace(STRANDED, requeueable=False),), nodes=cluster()),
        [("job-stranded", "", "nothing")],
    ),
    "ended": (Snapshot(jobs=(replace(STRANDED, phase=Phase.FAILED),), nodes=cluster(gone("n1"))), []),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_verdict(case: str) -> None:
    snapshot, expected = CASES[case]
    assert brief(judge(snapshot, POLICY)) == expected


def test_a_leaf_is_named_in_every_order_and_the_whole_of_it_is_left_out() -> None:
    *orders, restart = judge(Snapshot(jobs=(STRANDED,), nodes=cluster(*LEAF0)), POLICY)
    assert {verdict.incident for verdict in (*orders, restart)} == {"cluster-switch-suspect-leaf0"}
    assert len({verdict.key for verdict in (*orders, restart)}) == 4
    assert restart.exclude == NAMES[:4]


def test_a_leaf_given_up_stays_a_leaf_until_it_answers() -> None:
    why = "cluster-switch-suspect-leaf0@1700000000"
    drained = tuple(replace(node, ours=True, drained=True, why=why) for node in LEAF0[:2])
    verdicts = judge(Snapshot(jobs=(STRANDED,), nodes=cluster(*drained, *LEAF0[2:])), POLICY)
    assert brief(verdicts)[0] == ("switch-suspect", "leaf0", "nothing")
    assert {verdict.kind for verdict in verdicts} == {IncidentKind.SWITCH_SUSPECT, IncidentKind.JOB_STRANDED}
    back = tuple(replace(up(node.name), ours=True, drained=True, why=why, answering_s=61.0) for node in LEAF0[:2])
    assert brief(judge(Snapshot(nodes=cluster(*back)), POLICY)) == [
        ("node-back", "n0", "resume"),
        ("node-back", "n1", "resume"),
    ]


def test_only_nodes_that_we_drained_come_back_and_only_by_policy() -> None:
    back = replace(up("n1"), drained=True, answering_s=11.0)
    ours = Snapshot(nodes=cluster(replace(back, ours=True)))
    assert judge(ours, POLICY) == ()
    assert brief(judge(ours, replace(POLICY, resume=True))) == [("node-back", "n1", "resume")]
    assert judge(Snapshot(nodes=cluster(back)), replace(POLICY, resume=True)) == ()
    too_soon = replace(back, ours=True, answering_s=3.0)
    assert judge(Snapshot(nodes=cluster(too_soon)), replace(POLICY, resume=True)) == ()


def test_a_sick_node_without_a_standing_agent_stays_drained_since_nobody_can_say_it_is_well() -> None:
    back = replace(up("n1"), ours=True, drained=True, answering_s=10_000.0)
    policy = replace(POLICY, resume=True)
    dead, sick = (replace(back, why=why) for why in ("17.0.0-node-dead-n1@17", "cluster-node-sick-n1@17"))
    assert brief(judge(Snapshot(nodes=cluster(dead)), policy)) == [("node-back", "n1", "resume")]
    assert judge(Snapshot(nodes=cluster(sick)), policy) == ()
    assert targets((), cluster(sick), policy) == (), "each probe is two lines in slurmd's log"
    assert targets((), cluster(replace(sick, attended_s=1.0)), policy) == ("n1",)


CHECKED = replace(
    up("n1"), ours=True, drained=True, answering_s=100.0, attended_s=1.0, heard_s=1.0, well_s=11.0, why="17.0.0-x"
)
NOT_BACK = {
    "its agent finds it sick": replace(CHECKED, findings=(found("disk", Severity.WARNING),)),
    "a rank of an old attempt is left there": replace(CHECKED, findings=(found("processes", Severity.NOTE),)),
    "its agent is well for too short a time": replace(CHECKED, well_s=5.0),
    "its agent is silent": replace(CHECKED, attended_s=60.0, heard_s=60.0, well_s=0.0),
    "it was sick: it has to be well for longer": replace(CHECKED, why="cluster-node-sick-n1@17"),
}


@pytest.mark.parametrize("case", NOT_BACK)
def test_a_node_comes_back_only_when_its_own_checks_pass(case: str) -> None:
    policy = replace(POLICY, resume=True)
    assert brief(judge(Snapshot(nodes=cluster(CHECKED)), policy)) == [("node-back", "n1", "resume")]
    verdicts = judge(Snapshot(nodes=cluster(NOT_BACK[case])), policy)
    assert not [verdict for verdict in verdicts if verdict.remedy is Remedy.RESUME]
    noteworthy = replace(CHECKED, findings=(found("clock", Severity.NOTE),))
    assert ("node-back", "n1", "resume") in brief(judge(Snapshot(nodes=cluster(noteworthy)), policy))


def test_a_job_is_stranded_by_who_ran_its_ranks_not_by_a_lost_spare() -> None:
    with_spare = replace(
        STRANDED,
        nodes=NAMES[:3],
        rank_nodes=NAMES[1:3],
        agents_silent={NAMES[0]: 9.0, NAMES[1]: 4.0, NAMES[2]: 0.1},
    )
    verdicts = judge(Snapshot(jobs=(with_spare,), nodes=cluster(gone("n0"), gone("n1"))), POLICY)
    assert brief(verdicts)[-1] == ("job-stranded", "n1", "restart")


def test_what_is_no_jobs_keeps_its_name_whichever_jobs_it_hits() -> None:
    jobs = [job(), job(attempt=Attempt(18, 0, 0), nodes=(NAMES[1], NAMES[5]), rank_nodes=(NAMES[1], NAMES[5]))]
    mute = [replace(one, agents_silent=dict.fromkeys(one.nodes, 19.0)) for one in jobs]
    named = {
        judge(Snapshot(jobs=tuple(those), nodes=cluster()), POLICY)[0].incident
        for those in (mute, mute[:1], mute[1:])
    }
    assert named == {"cluster-agents-silent"}
    stranded = tuple(replace(one, phase=Phase.STRANDED, agents_silent={NAMES[1]: 4.0}) for one in jobs)
    verdicts = judge(Snapshot(jobs=stranded, nodes=cluster(*LEAF0)), POLICY)
    assert {verdict.incident for verdict in verdicts} == {"cluster-switch-suspect-leaf0"}
    restarts = [verdict for verdict in verdicts if verdict.remedy is Remedy.RESTART]
    assert len({verdict.key for verdict in restarts}) == len(restarts) == 2
    assert len({verdict.key for verdict in verdicts}) == len(verdicts)


def test_one_node_one_incident_whichever_verdict_names_it() -> None:
    verdicts = judge(Snapshot(jobs=(STRANDED,), nodes=cluster(gone("n1"))), POLICY)
    assert {verdict.incident for verdict in verdicts} == {"17.0.0-end"}
    assert len({verdict.key for verdict in verdicts}) == 2


def test_in_calm_nobody_is_probed_and_under_suspicion_neighbours_and_others_too() -> None:
    assert tense((job(),), POLICY) == ()
    assert targets((), cluster(), POLICY) == ()
    mute = [job(beat_age_s=age, attempt=Attempt(number, 0, 0)) for number, age in ((17, 170.0), (18, 400.0))]
    assert tense(mute, POLICY) == (mute[0],), "one silent for so long is not probed for its own sake"
    assert tense(mute, POLICY, cut_off=True) == tuple(mute), "it may have been we"
    suspicious = tense((job(agents_silent=missing(NAMES[4], 0.8), nodes=(NAMES[4],)),), POLICY)
    assert len(suspicious) == 1
    probed = targets(suspicious, cluster(), POLICY)
    assert set(NAMES[4:]) <= set(probed), "the whole leaf"
    assert set(NAMES[:4]) & set(probed), "and somebody elsewhere"


answers = st.sampled_from(list(ProbeResult))
seconds = st.floats(0, 60)
ages = st.floats(0, 60)


maybe_seconds = st.none() | st.floats(0, 60)
findings = st.builds(
    Finding,
    check=st.sampled_from(["disk", "mount", "slurmd", "processes"]),
    severity=st.sampled_from(sorted(HEALTH)),
    text=st.just("something is wrong"),
)


@st.composite
def nodes_seen(draw: st.DrawFn) -> dict[NodeName, NodeSnapshot]:
    seen = {}
    for name in NAMES:
        answer = draw(answers)
        seen[name] = NodeSnapshot(
            name=name,
            leaf=draw(st.sampled_from(["", "leaf0", "leaf1"])),
            slurmd=answer,
            away_s=draw(seconds) if answer.away else 0.0,
            away_probes=draw(st.integers(0, 20)) if answer.away else 0,
            probed_s=draw(st.sampled_from([0.0, 2.0])),
            responding=draw(st.booleans()),
            down=draw(st.booleans()),
            drained=draw(st.booleans()),
            ours=draw(st.booleans()),
            strangers=draw(st.integers(0, 1)),
            why=draw(st.sampled_from(["", "17.0.0-switch-suspect-leaf0@1", f"cluster-node-sick-{name}@1"])),
            findings=tuple(draw(st.lists(findings, max_size=2))),
            heard_s=draw(maybe_seconds),
            attended_s=draw(maybe_seconds),
            well_s=draw(seconds),
            boot_id=draw(st.sampled_from(["", "a", "b"])),
            booted_s=draw(maybe_seconds),
            slurmd_restarted_s=draw(maybe_seconds),
            slurmd_age_s=draw(maybe_seconds),
        )
    given_up = draw(st.sampled_from(["", "leaf0"]))
    why = f"cluster-switch-suspect-{given_up}@1"
    return {
        name: replace(node, slurmd=ProbeResult.SILENT, down=True, drained=True, ours=True, why=why)
        if given_up and node.leaf == given_up
        else node
        for name, node in seen.items()
    }


@st.composite
def jobs_seen(draw: st.DrawFn) -> JobSnapshot:
    nodes = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)))
    return JobSnapshot(
        attempt=Attempt(draw(st.integers(1, 3)), 0, 0),
        phase=draw(st.sampled_from(list(Phase))),
        state=draw(st.sampled_from([JobState.RUNNING, JobState.PENDING, JobState.COMPLETED, JobState.COMPLETING])),
        nodes=nodes,
        rank_nodes=nodes,
        batch_host=nodes[0],
        beat_age_s=draw(ages),
        restarts=draw(st.integers(0, 1)),
        agents_silent=draw(st.dictionaries(st.sampled_from(NAMES), seconds)),
        heard=draw(st.booleans()),
        missed_s=draw(ages),
        spares=tuple(draw(st.lists(st.sampled_from(NAMES), max_size=1))),
        rescued=draw(st.booleans()),
        reason=draw(st.sampled_from(["", "BeginTime", "Resources"])),
        boots=draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["a", "b"]))),
        told=draw(st.frozensets(st.sampled_from(["storage-frozen", "rank-failed"]))),
        doubted=draw(st.booleans()),
    )


sights = st.builds(
    Snapshot,
    jobs=st.lists(jobs_seen(), max_size=2).map(tuple),
    nodes=nodes_seen(),
    controller=st.booleans(),
    dead_lately=st.frozensets(st.sampled_from(NAMES), max_size=2),
    leaves_lately=st.frozensets(st.sampled_from(["leaf0", "leaf1"]), max_size=1),
)
policies = st.sampled_from([POLICY, replace(POLICY, resume=True)])


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies)
def test_nothing_is_done_while_we_are_in_doubt(snapshot: Snapshot, policy: WatchPolicy) -> None:
    tried = [
        node
        for node in snapshot.nodes.values()
        if node.slurmd is not ProbeResult.UNKNOWN
        and not node.down
        and not (node.slurmd.away and (node.name in snapshot.dead_lately or node.leaf in snapshot.leaves_lately))
    ]
    mostly_away = sum(node.slurmd.away for node in tried) * 2 > len(tried)
    verdicts = judge(snapshot, policy)
    if mostly_away or not snapshot.controller:
        assert all(verdict.remedy is Remedy.NOTHING for verdict in verdicts)
        assert [verdict.kind for verdict in verdicts] == [IncidentKind.WATCHDOG_PARTITIONED]


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies)
def test_no_node_is_condemned_that_was_not_tried_or_that_answers(snapshot: Snapshot, policy: WatchPolicy) -> None:
    for verdict in judge(snapshot, policy):
        if verdict.kind is IncidentKind.NODE_SICK and verdict.remedy is not Remedy.NOTHING and verdict.node:
            assert {Severity.WARNING, Severity.ERROR} & {
                each.severity for each in snapshot.nodes[verdict.node].findings
            }
            assert verdict.remedy in {Remedy.COMMENT, Remedy.DRAIN}, "its jobs go on"
        elif verdict.remedy in {Remedy.DRAIN, Remedy.DRAIN_DOWN} and verdict.node:
            node = snapshot.nodes[verdict.node]
            assert node.slurmd.away
            assert node.away_probes >= policy.away_probes
            assert not node.down
            assert any(verdict.node in seen.nodes and not seen.phase.ended for seen in snapshot.jobs)
            assert verdict.remedy is Remedy.DRAIN or not node.strangers


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies)
def test_no_job_is_requeued_while_a_node_of_it_may_hang(snapshot: Snapshot, policy: WatchPolicy) -> None:
    verdicts = judge(snapshot, policy)
    condemned = {verdict.node for verdict in verdicts if verdict.remedy in ACTS}
    for verdict in verdicts:
        if verdict.remedy is Remedy.RESTART:
            candidates = [seen for seen in snapshot.jobs if seen.attempt == verdict.attempt]
            assert any(
                seen.state is JobState.PENDING  # Slurm has done it
                or (
                    seen.running
                    and all(
                        name in condemned
                        or snapshot.nodes[name].down
                        or snapshot.nodes[name].slurmd is ProbeResult.ANSWERS
                        for name in seen.nodes
                    )
                )
                for seen in candidates
            )


@settings(max_examples=examples(40))
@given(snapshot=sights)
def test_more_silence_never_clears_a_node(snapshot: Snapshot) -> None:
    before = {verdict.node for verdict in judge(snapshot, POLICY) if verdict.kind is IncidentKind.NODE_DEAD}
    longer = {
        name: replace(node, away_s=node.away_s + 5, away_probes=node.away_probes + 5) if node.slurmd.away else node
        for name, node in snapshot.nodes.items()
    }
    after = judge(replace(snapshot, nodes=longer), POLICY)
    blamed = {verdict.node for verdict in after if verdict.kind is IncidentKind.NODE_DEAD}
    assert before <= blamed


def touched(verdicts: tuple[Verdict, ...]) -> set[tuple[object, ...]]:
    return {
        (verdict.node, verdict.attempt, verdict.remedy)
        for verdict in verdicts
        if verdict.remedy not in {Remedy.NOTHING, Remedy.RESUME}
    }


DISK_AND_MOUNT = replace(
    up("n4"), findings=(found("disk", Severity.WARNING), found("mount", Severity.ERROR)), heard_s=0.5
)
BRAKED = Snapshot(
    nodes=cluster(
        DISK_AND_MOUNT,
        *(
            replace(up(name), ours=True, drained=True, why=f"cluster-node-sick-{name}@17", heard_s=0.5)
            for name in ("n1", "n2")
        ),
    )
)
DRAINED_BY_OTHERS = Snapshot(nodes=cluster(replace(DISK_AND_MOUNT, drained=True)))


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies, check=st.sampled_from(["disk", "mount", "slurmd", "processes"]))
@example(snapshot=BRAKED, policy=POLICY, check="mount")
@example(snapshot=DRAINED_BY_OTHERS, policy=POLICY, check="mount")
def test_what_a_check_could_not_tell_is_no_reason_to_touch_anything(
    snapshot: Snapshot, policy: WatchPolicy, check: str
) -> None:
    unknown = (found(check, Severity.UNKNOWN),)
    nodes = {name: replace(node, findings=node.findings + unknown) for name, node in snapshot.nodes.items()}
    before = touched(judge(snapshot, policy))
    # What would be drained may get a comment: a mount that stands still everywhere is not the node's.
    milder = {(node, attempt, Remedy.COMMENT) for node, attempt, remedy in before if remedy is Remedy.DRAIN}
    assert touched(judge(replace(snapshot, nodes=nodes), policy)) <= before | milder


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies, name=st.sampled_from(NAMES))
def test_a_node_that_is_seen_to_be_well_is_not_touched(
    snapshot: Snapshot, policy: WatchPolicy, name: NodeName
) -> None:
    well = replace(up(name), leaf=snapshot.nodes[name].leaf, heard_s=0.1, attended_s=0.1, well_s=60.0)
    verdicts = judge(replace(snapshot, nodes={**snapshot.nodes, name: well}), policy)
    assert not [
        verdict for verdict in verdicts if verdict.node == name and verdict.remedy in ACTS - {Remedy.RESTART}
    ]


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies, name=st.sampled_from(NAMES))
def test_an_agent_that_is_heard_makes_no_verdict_on_its_node_worse(
    snapshot: Snapshot, policy: WatchPolicy, name: NodeName
) -> None:
    order = [Remedy.NOTHING, Remedy.COMMENT, Remedy.DRAIN, Remedy.DRAIN_DOWN]

    def worst(seen: Snapshot) -> int:
        about = [verdict.remedy for verdict in judge(seen, policy) if verdict.node == name]
        return max((order.index(remedy) for remedy in about if remedy in order), default=-1)

    heard = replace(snapshot.nodes[name], heard_s=0.0, attended_s=0.0)
    assert worst(replace(snapshot, nodes={**snapshot.nodes, name: heard})) <= max(worst(snapshot), 0)


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies)
def test_all_nodes_silent_at_once_are_not_touched(snapshot: Snapshot, policy: WatchPolicy) -> None:
    nodes = {name: replace(gone(name, 30.0), leaf=node.leaf) for name, node in snapshot.nodes.items()}
    assert brief(judge(replace(snapshot, nodes=nodes), policy)) == [("self-in-doubt", "", "nothing")]


@settings(max_examples=examples(40))
@given(jobs=st.lists(jobs_seen(), max_size=2), policy=policies, silent_s=st.floats(3.0, 59.0))
def test_all_agents_silent_at_once_cost_no_node_and_no_running_job(
    jobs: list[JobSnapshot], policy: WatchPolicy, silent_s: float
) -> None:
    mute = tuple(
        replace(one, agents_silent=dict.fromkeys(one.nodes, silent_s), beat_age_s=0.5)
        for one in jobs
        if len(one.nodes) > 1 and one.state is JobState.RUNNING
    )
    nodes = cluster(*(replace(up(name), attended_s=30.0, heard_s=30.0) for name in NAMES))
    assert touched(judge(Snapshot(jobs=mute, nodes=nodes), policy)) == set()


@settings(max_examples=examples(40))
@given(snapshot=sights, policy=policies)
def test_frozen_storage_restarts_no_job_whose_nodes_live(snapshot: Snapshot, policy: WatchPolicy) -> None:
    nodes = cluster(*(sick(name, Severity.ERROR, "mount") for name in NAMES))
    verdicts = judge(replace(snapshot, nodes=nodes, controller=True), policy)
    running = {one.attempt for one in snapshot.jobs if one.running}
    queued = {one.attempt for one in snapshot.jobs if not one.running}
    assert not [
        verdict
        for verdict in verdicts
        if verdict.remedy in ACTS and (verdict.node or verdict.attempt in running - queued)
    ]


@settings(max_examples=examples(40))
@given(count=st.integers(0, 8), held=st.integers(0, 3))
def test_no_more_nodes_are_drained_for_their_checks_than_can_be_believed(count: int, held: int) -> None:
    grave = [sick(name, Severity.ERROR) for name in NAMES[:count]]
    grave = [replace(node, drained=index < held) for index, node in enumerate(grave)]
    drained = [v for v in judge(Snapshot(nodes=cluster(*grave)), POLICY) if v.remedy is Remedy.DRAIN]
    assert len(drained) <= POLICY.most_at_once


@pytest.mark.parametrize(("away_s", "remedies"), [(4.0, {"nothing"}), (61.0, {"drain-down"})])
def test_three_jobs_that_lose_a_node_at_once_are_looked_at_again_after_a_minute(
    away_s: float, remedies: set[str]
) -> None:
    here = replace(STRANDED, agents_silent=missing(NAMES[1], away_s))
    there = replace(WELL_ELSEWHERE, agents_silent={NAMES[5]: 0.1, NAMES[6]: away_s})
    nodes = (NAMES[3], NAMES[2])
    yonder = replace(
        STRANDED,
        attempt=Attempt(18, 0, 0),
        nodes=nodes,
        rank_nodes=nodes,
        batch_host=NAMES[3],
        agents_silent={NAMES[3]: 0.1, NAMES[2]: away_s},
    )
    lost = cluster(*(gone(name, away_s) for name in ("n1", "n2", "n6")))
    verdicts = judge(Snapshot(jobs=(there, here, yonder), nodes=lost), POLICY)
    assert {verdict.remedy for verdict in verdicts if verdict.kind is IncidentKind.NODE_DEAD} == remedies
    assert any(verdict.remedy is Remedy.RESTART for verdict in verdicts) is (away_s > 60.0)


def test_nodes_that_one_job_loses_at_once_are_one_loss_and_not_braked() -> None:
    job = replace(STRANDED, agents_silent={NAMES[0]: 0.1, NAMES[1]: 4.0, NAMES[4]: 4.0, NAMES[2]: 4.0})
    lost = replace(job, nodes=(*job.nodes, NAMES[2]), rank_nodes=(*job.nodes, NAMES[2]))
    verdicts = judge(Snapshot(jobs=(lost,), nodes=cluster(gone("n1"), gone("n2"), gone("n4"))), POLICY)
    assert brief(verdicts) == [
        *[("node-dead", name, "drain-down") for name in ("n1", "n2", "n4")],
        ("job-stranded", "n1", "restart"),
    ]


def test_every_line_of_the_table_is_reached() -> None:
    reached = {(kind, remedy) for _, expected in CASES.values() for kind, _, remedy in expected}
    ended = [job(state=state, nodes=()) for state in (JobState.TIMEOUT, JobState.OUT_OF_MEMORY)]
    seen = (Snapshot(jobs=tuple(ended), nodes=cluster()), Snapshot(nodes=cluster(CHECKED)))
    reached |= {(each.kind, each.remedy) for one in seen for each in judge(one, replace(POLICY, resume=True))}
    assert {kind for kind, _ in IN_TABLE} == {kind for kind, _ in reached}
    assert {(kind, remedy) for kind, remedy in IN_TABLE if remedy is not Remedy.NOTHING} <= reached
