"""The next command of an action follows from what is true now, in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deeplink.core.types import Attempt, JobId, NodeName
from deeplink.scheduler.recovery.evidence import Remedy
from deeplink.scheduler.recovery.records import ActionRecord
from deeplink.scheduler.recovery.recovery_steps import (
    LISTEN_S,
    LONGEST_S,
    NEXT_SECOND_S,
    RELAX_S,
    SETTLE_S,
    WELL_S,
    ActionFacts,
    RecoveryStep,
    next_command,
)
from deeplink.scheduler.slurm.parse import JobRow, NodeRow
from deeplink.scheduler.slurm.states import JobState, NodeFlag, NodeState

N0, N1 = NodeName("n0"), NodeName("n1")
DOWNED = ActionRecord(key="k", incident="i", remedy=Remedy.DRAIN_DOWN, attempt=Attempt(17, 0, 0), node=N1)
DRAINED = replace(DOWNED, remedy=Remedy.DRAIN)
RESTART = replace(DOWNED, remedy=Remedy.RESTART, exclude=(N1,))
RESUME = replace(DOWNED, remedy=Remedy.RESUME)


COMMENTED = replace(DOWNED, remedy=Remedy.COMMENT, reason="deeplink: 17.0.0-node-sick-n1: disk slow")


def node(state: NodeState = NodeState.ALLOCATED, *flags: NodeFlag, comment: str = "", reason: str = "") -> NodeRow:
    return NodeRow(
        name=N1,
        address="n1",
        host="n1",
        port=None,
        state=state,
        flags=frozenset(flags),
        reason=reason,
        reason_by="",
        boot_time="",
        gpus=0,
        comment=comment,
    )


def job(state: JobState = JobState.RUNNING, restarts: int = 0, reason: str = "") -> JobRow:
    return JobRow(
        id=JobId(17),
        label="17",
        state=state,
        reason=reason,
        restarts=restarts,
        requeueable=True,
        user="ada",
        nodes=(N1,),
        batch_host=N1,
        name="x",
    )


AWAY = ActionFacts(node=node(), answers=False, sent={})
DRAIN_SEEN = replace(AWAY, node=node(NodeState.ALLOCATED, NodeFlag.DRAIN))
RUNS = ActionFacts(job=job(), sent={})
LEFT = replace(RUNS, job=replace(job(), nodes=(N0, N1), batch_host=N0), unreachable=(N1,))
OURS_BACK = ActionFacts(
    node=node(NodeState.IDLE, NodeFlag.DRAIN, reason="deeplink: 17.0.0-node-dead-n1"), answers=True, sent={}
)
WAITS = ActionFacts(job=job(JobState.PENDING, 1, "BeginTime"), sent={})
QUEUED = replace(WAITS, job=job(JobState.PENDING, 1, "Resources"))
RELAXED = replace(QUEUED, sent={RecoveryStep.RELEASE: 40.0, RecoveryStep.RELAX: SETTLE_S}, kept_off=True)

CASES: dict[str, tuple[ActionRecord, ActionFacts, RecoveryStep]] = {
    "drain comes first": (DOWNED, AWAY, RecoveryStep.DRAIN),
    "then down": (DOWNED, DRAIN_SEEN, RecoveryStep.DOWN),
    "then it is done": (DOWNED, replace(AWAY, node=node(NodeState.DOWN, NodeFlag.DRAIN)), RecoveryStep.DONE),
    "only drained where no more is wanted": (DRAINED, DRAIN_SEEN, RecoveryStep.DONE),
    "a node that answers again is not downed": (DOWNED, replace(DRAIN_SEEN, answers=True), RecoveryStep.GIVE_UP),
    "nor one that was not probed, after our return": (
        DOWNED,
        replace(DRAIN_SEEN, answers=None),
        RecoveryStep.WAIT,
    ),
    "nor drained": (DOWNED, replace(AWAY, answers=None), RecoveryStep.WAIT),
    "a command is not sent twice at once": (
        DOWNED,
        replace(AWAY, sent={RecoveryStep.DRAIN: 0.1}),
        RecoveryStep.WAIT,
    ),
    "but again when it shows no effect": (
        DOWNED,
        replace(AWAY, sent={RecoveryStep.DRAIN: SETTLE_S}),
        RecoveryStep.DRAIN,
    ),
    "no rights": (DOWNED, replace(AWAY, refused=frozenset({RecoveryStep.DRAIN})), RecoveryStep.GIVE_UP),
    "Slurm was quicker": (DOWNED, replace(AWAY, node=node(NodeState.DOWN)), RecoveryStep.DONE),
    "an unknown node": (DOWNED, replace(AWAY, node=None), RecoveryStep.GIVE_UP),
    "not for ever": (DOWNED, replace(AWAY, age_s=LONGEST_S + 1), RecoveryStep.GIVE_UP),
    "every node answers: requeue": (RESTART, RUNS, RecoveryStep.REQUEUE),
    "never while a node is unreachable": (RESTART, replace(RUNS, unreachable=(N1,)), RecoveryStep.WAIT),
    "the requeue works": (RESTART, replace(RUNS, sent={RecoveryStep.REQUEUE: 0.2}), RecoveryStep.WAIT),
    "the job is ending": (RESTART, replace(RUNS, job=job(JobState.COMPLETING)), RecoveryStep.WAIT),
    "it waits: exclude and clear the hold": (RESTART, WAITS, RecoveryStep.RELEASE),
    "not in the second in which its last run was ended": (RESTART, replace(WAITS, waits_s=0.2), RecoveryStep.WAIT),
    "nor when it is we who ended it": (
        RESTART,
        replace(WAITS, sent={RecoveryStep.REQUEUE: 0.2}),
        RecoveryStep.WAIT,
    ),
    "but in the next": (
        RESTART,
        replace(WAITS, sent={RecoveryStep.REQUEUE: 1.3}, waits_s=NEXT_SECOND_S),
        RecoveryStep.RELEASE,
    ),
    "released: wait for it to run": (RESTART, replace(WAITS, sent={RecoveryStep.RELEASE: 1.0}), RecoveryStep.WAIT),
    "no room without the excluded ones": (
        RESTART,
        replace(QUEUED, sent={RecoveryStep.RELEASE: RELAX_S}),
        RecoveryStep.RELAX,
    ),
    "not onto a node of whose death Slurm does not know": (
        RESTART,
        replace(QUEUED, sent={RecoveryStep.RELEASE: RELAX_S}, excluded_is_silent=True),
        RecoveryStep.WAIT,
    ),
    "relaxed, it waits like any other job": (
        RESTART,
        replace(QUEUED, sent={RecoveryStep.RELEASE: 20.0, RecoveryStep.RELAX: 1.0}),
        RecoveryStep.DONE,
    ),
    "what relaxes it shows no effect yet": (
        RESTART,
        replace(RELAXED, sent={RecoveryStep.RELEASE: 20.0, RecoveryStep.RELAX: 1.0}),
        RecoveryStep.WAIT,
    ),
    "nor after a while: again": (RESTART, RELAXED, RecoveryStep.RELAX),
    "not where Slurm refuses it": (
        RESTART,
        replace(RELAXED, refused=frozenset({RecoveryStep.RELAX})),
        RecoveryStep.DONE,
    ),
    "nothing excluded, it waits like any other job": (
        replace(RESTART, exclude=()),
        replace(QUEUED, sent={RecoveryStep.RELEASE: 20.0}),
        RecoveryStep.DONE,
    ),
    "still held though released: again": (
        RESTART,
        replace(WAITS, sent={RecoveryStep.RELEASE: SETTLE_S}),
        RecoveryStep.RELEASE,
    ),
    "it runs again": (RESTART, replace(RUNS, job=job(restarts=1)), RecoveryStep.DONE),
    "it is being set up again": (RESTART, replace(RUNS, job=job(JobState.CONFIGURING, 1)), RecoveryStep.DONE),
    "its last run is still ending": (RESTART, replace(RUNS, job=job(JobState.COMPLETING, 1)), RecoveryStep.WAIT),
    "it ended": (RESTART, replace(RUNS, job=job(JobState.CANCELLED)), RecoveryStep.DONE),
    "Slurm forgot it": (RESTART, replace(RUNS, job=None), RecoveryStep.DONE),
    "an operator holds it": (RESTART, replace(RUNS, job=job(JobState.REQUEUE_HOLD, 1)), RecoveryStep.GIVE_UP),
    "not ours to requeue": (
        RESTART,
        replace(RUNS, refused=frozenset({RecoveryStep.REQUEUE})),
        RecoveryStep.GIVE_UP,
    ),
    "back into service": (RESUME, OURS_BACK, RecoveryStep.RESUME),
    "not what somebody else has drained since": (
        RESUME,
        replace(OURS_BACK, node=node(NodeState.IDLE, NodeFlag.DRAIN, reason="disk to be replaced")),
        RecoveryStep.GIVE_UP,
    ),
    "nor what is silent again": (RESUME, replace(OURS_BACK, answers=False), RecoveryStep.GIVE_UP),
    "nor unseen": (RESUME, replace(OURS_BACK, answers=None), RecoveryStep.WAIT),
    "nor what was well a while ago": (RESUME, replace(OURS_BACK, age_s=WELL_S + 1), RecoveryStep.GIVE_UP),
    "on return its launcher is heard first": (RESTART, replace(RUNS, returned_s=0.1), RecoveryStep.WAIT),
    "it tells nothing else: requeue": (RESTART, replace(RUNS, returned_s=LISTEN_S), RecoveryStep.REQUEUE),
    "it goes on by itself": (RESTART, replace(RUNS, goes_on=True), RecoveryStep.GIVE_UP),
    "also while a lost node is a part of it still": (
        RESTART,
        replace(LEFT, given_up=True, goes_on=True),
        RecoveryStep.GIVE_UP,
    ),
    "what is under way is carried through": (
        RESTART,
        replace(RUNS, goes_on=True, sent={RecoveryStep.REQUEUE: 0.1}),
        RecoveryStep.WAIT,
    ),
    "but not begun again where it came to nothing, and the job goes on": (
        RESTART,
        replace(RUNS, goes_on=True, sent={RecoveryStep.REQUEUE: SETTLE_S}),
        RecoveryStep.GIVE_UP,
    ),
    "kept off nodes of an earlier restart alone": (
        replace(RESTART, exclude=()),
        replace(QUEUED, sent={RecoveryStep.RELEASE: RELAX_S}, kept_off=True),
        RecoveryStep.RELAX,
    ),
    "in service": (RESUME, replace(AWAY, answers=True), RecoveryStep.DONE),
    "a dead node is taken out of the job, where nobody else can take it from Slurm": (
        RESTART,
        replace(LEFT, given_up=True),
        RecoveryStep.DROP_NODES,
    ),
    "not while we are about to set it down": (
        RESTART,
        replace(LEFT, given_up=True, being_downed=True),
        RecoveryStep.WAIT,
    ),
    "not one that only does not answer just now": (RESTART, replace(LEFT, given_up=False), RecoveryStep.WAIT),
    "not the batch host": (RESTART, replace(LEFT, given_up=True, unreachable=(N0,)), RecoveryStep.WAIT),
    "not twice": (
        RESTART,
        replace(LEFT, given_up=True, refused=frozenset({RecoveryStep.DROP_NODES})),
        RecoveryStep.WAIT,
    ),
    "taken out, every node answers": (
        RESTART,
        replace(LEFT, unreachable=(), sent={RecoveryStep.DROP_NODES: 0.1}),
        RecoveryStep.REQUEUE,
    ),
    "a held job is not let go": (
        RESTART,
        replace(WAITS, job=job(JobState.PENDING, 1, "JobHeldUser")),
        RecoveryStep.GIVE_UP,
    ),
    "a comment on a node": (COMMENTED, AWAY, RecoveryStep.COMMENT),
    "it stands there": (COMMENTED, replace(AWAY, node=node(comment=COMMENTED.reason)), RecoveryStep.DONE),
    "in place of an older one of ours": (
        COMMENTED,
        replace(AWAY, node=node(comment="deeplink: old")),
        RecoveryStep.COMMENT,
    ),
    "never in place of an administrator's": (
        COMMENTED,
        replace(AWAY, node=node(comment="loaner")),
        RecoveryStep.DONE,
    ),
    "no right to comment": (
        COMMENTED,
        replace(AWAY, refused=frozenset({RecoveryStep.COMMENT})),
        RecoveryStep.GIVE_UP,
    ),
    "a comment on no node": (COMMENTED, replace(AWAY, node=None), RecoveryStep.GIVE_UP),
    "of an older watchdog's": (replace(RESTART, remedy="hold"), RUNS, RecoveryStep.GIVE_UP),
    "nothing to do": (replace(DOWNED, remedy=Remedy.NOTHING), AWAY, RecoveryStep.DONE),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_step(case: str) -> None:
    action, facts, expected = CASES[case]
    assert next_command(action, facts).step is expected


def test_whoever_gives_up_says_why() -> None:
    for action, facts, expected in CASES.values():
        if expected is RecoveryStep.GIVE_UP:
            assert next_command(action, facts).why
