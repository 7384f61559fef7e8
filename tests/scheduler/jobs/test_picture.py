"""One job as it is shown, from what Slurm says and what it left; no word is taken for longer than it counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.jobs.job_folder import note, read_folder
from deeplink.scheduler.jobs.job_view import Queued
from deeplink.scheduler.jobs.picture import FRESH_S, JobNode, Picture, picture
from deeplink.scheduler.recovery.records import Incident, IncidentKind, Phase
from deeplink.scheduler.slurm.parse import JobRow, NodeRow
from deeplink.scheduler.slurm.states import JobState, NodeFlag, NodeState
from tests.scheduler.jobs.left import event, launched
from tests.scheduler.jobs.test_job_names import row

NOW = 1_700_000_000.0
NAMES = tuple(NodeName(name) for name in ("n0", "n1", "n2"))


def queued(state: JobState = JobState.RUNNING, **facts: object) -> Queued:
    made: JobRow = dataclasses.replace(row(7, "7", state), nodes=NAMES if state is JobState.RUNNING else ())
    return Queued(job=dataclasses.replace(made, **facts), used_s=60.0)  # type: ignore[arg-type]


def node(name: str, state: NodeState = NodeState.ALLOCATED, *flags: NodeFlag, reason: str = "") -> NodeRow:
    return NodeRow(
        name=NodeName(name),
        address=name,
        host=name,
        port=None,
        state=state,
        flags=frozenset(flags),
        reason=reason,
        reason_by="",
        boot_time="",
        gpus=0,
    )


def seen(folder: Path, one: Queued | None, *nodes: NodeRow, now: float = NOW, asked: bool = True) -> Picture:
    return picture(7, one, read_folder(folder, 7), {row.name: row for row in nodes}, now, asked=asked)


def test_a_running_job(tmp_path: Path) -> None:
    found = seen(launched(tmp_path, 7, NOW), queued())
    assert (found.state, found.phase, found.attempt, found.restarts, found.relaunches) == (
        "RUNNING", "running", "7.0.0", 0, 0,
    )  # fmt: skip
    assert found.seats == (
        JobNode(node="n1", ranks=(0, 1)),
        JobNode(node="n0", ranks=(2, 3)),
        JobNode(node="n2", spare=True),
    )
    assert (found.pace.step, found.pace.steps_per_s, found.pace.samples_per_s) == (5, 1.0, 8.0)
    assert (found.ring, found.ring_stock, found.final, found.gone) == (2, 2, False, False)


def test_a_silent_launchers_word_is_not_taken(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW)
    found = seen(folder, queued(), now=NOW + FRESH_S + 1)
    assert (found.state, found.phase) == ("RUNNING", "")
    assert (found.pace.step, found.pace.steps_per_s) == (5, None)


def test_trouble_of_nodes_is_told_by_whoever_sees_it(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW, silent="n0")
    found = seen(
        folder,
        queued(),
        node("n1", NodeState.DOWN, NodeFlag.DRAIN, reason="ECC"),
        node("n2", NodeState.IDLE, NodeFlag.NOT_RESPONDING),
    )
    assert [seat.trouble for seat in found.seats] == [
        "down by Slurm's word, draining (ECC)",
        "silent for 7 s",
        "not answering Slurm",
    ]


def test_a_job_that_only_slurm_knows_has_nodes_and_no_ranks(tmp_path: Path) -> None:
    found = seen(tmp_path / "none", queued(), node("n0"))
    assert found.seats == tuple(JobNode(node=name) for name in NAMES)
    assert (found.watched, found.phase, found.attempt, found.pace.step, found.ring) == (False, "", "", None, None)


def test_a_job_that_waits(tmp_path: Path) -> None:
    found = seen(tmp_path / "none", queued(JobState.PENDING, reason="Resources"))
    assert found.reason == "Resources: no suitable nodes are free"
    assert found.seats == ()


def test_a_job_that_slurm_has_forgotten_is_shown_by_what_it_left(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW, phase=Phase.SUCCEEDED)
    event(folder, "ended", NOW, code=0, because="done")
    found = seen(folder, None, now=NOW + 9999)
    assert (found.gone, found.final, found.state, found.phase) == (True, True, "", "succeeded")
    assert found.end == "ended with exit code 0: done"
    assert (found.name, found.user, found.pace.step) == ("tr ü", "eve", 5)


def test_where_slurm_does_not_answer_a_job_is_not_gone(tmp_path: Path) -> None:
    found = seen(launched(tmp_path, 7, NOW), None, asked=False)
    assert (found.gone, found.final, found.state, found.phase) == (False, False, "", "running")
    assert len(found.seats) == 3


def test_who_cancelled_it_counts_more_than_how_its_launcher_ended(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW, phase=Phase.FAILED)
    note(folder, "cancelled", NOW + 1, by="eve")
    event(folder, "ended", NOW + 2, code=143)
    assert seen(folder, queued(JobState.CANCELLED)).end == "cancelled by eve"


def test_after_a_requeue_what_the_run_before_left_is_not_told_of_the_new_one(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW, phase=Phase.FAILED)
    event(folder, "ended", NOW, code=143)
    found = seen(folder, queued(restarts=1))
    assert (found.phase, found.end, found.ring, found.pace.steps_per_s) == ("", "", None, None)
    assert found.seats == tuple(JobNode(node=name) for name in NAMES)
    assert (found.restarts, found.attempt) == (1, "7.0.0")


def test_a_job_that_was_held_has_not_failed_and_what_helps_is_told(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW, phase=Phase.FAILED)
    event(folder, "ended", NOW, code=5, because="exit code 5 again at step 12")
    held = queued(JobState.PENDING, reason="job requeued in held state", restarts=1, label="6_2")
    ending = queued(JobState.COMPLETING, reason="job requeued in held state", label="6_2")
    for one in (held, queued(JobState.PENDING, reason="job requeued in held state", label="6_2"), ending):
        found = seen(folder, one)
        assert (found.label, found.phase, found.held, found.final) == ("6_2", "", True, False)
        assert found.remedies == ("held: `scontrol release 6_2` lets it start",)
    waits = seen(folder, queued(JobState.PENDING, reason="BeginTime", restarts=1))
    assert (waits.phase, waits.held, waits.remedies) == ("", False, ())


def test_what_the_checks_of_its_nodes_find_is_told_with_what_helps(tmp_path: Path) -> None:
    found = seen(launched(tmp_path, 7, NOW, sick="n0"), queued())
    assert found.remedies == ("n0: disk (comment): slow; `deeplink health` on n0 looks again",)
    over = seen(launched(tmp_path / "over", 7, NOW, sick="n0", phase=Phase.SUCCEEDED), queued(JobState.COMPLETED))
    assert over.remedies == ()


def test_an_open_incident_is_told(tmp_path: Path) -> None:
    incident = Incident(
        id="7.0.0-node-silent-n0", kind=IncidentKind.NODE_SILENT, node=NodeName("n0"), attempt=Attempt(7, 0, 0),
        began_unix=NOW - 3, detected_unix=NOW,
    )  # fmt: skip
    found = seen(launched(tmp_path, 7, NOW, phase=Phase.RECOVERING, steps=0, incidents=(incident,)), queued())
    assert found.open_incident is not None
    assert (found.open_incident.node, found.incidents) == ("n0", 1)


def test_a_run_without_slurm_is_not_gone_and_ends_with_its_launcher(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW)
    event(folder, "job-started", NOW, backend="local")
    found = seen(folder, None)
    assert (found.local, found.gone, found.final, found.phase) == (True, False, False, "running")
    assert seen(folder, None, now=NOW + FRESH_S + 1).final
