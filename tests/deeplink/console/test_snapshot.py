"""From rows to what the page shows."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from deeplink.console.collect import Collector, Settings
from deeplink.console.jobs import MOST_JOBS
from deeplink.console.nodes import Health, slurm_health
from deeplink.console.readings import JournalFacts, Readings, Source, SourceState
from deeplink.console.snapshot import Mood, Snapshot, build
from deeplink.scheduler.slurm.parse import NodeRow
from deeplink.scheduler.slurm.states import parse_node_state
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.records import Beat, NodeRecord, Phase, ProgressPoint
from deeplink.types import Attempt, NodeName


def shown(collector: Collector) -> Snapshot:
    collector.refresh_slurm()
    return build(collector.readings())


def test_a_recorded_cluster_with_a_filled_journal(filled: Journal, collector: Collector) -> None:
    snapshot = shown(collector)
    nodes = {node.name: node for node in snapshot.nodes}
    assert snapshot.cluster == "recorded"
    assert list(nodes) == [f"n{number}" for number in range(8)]
    assert nodes["n1"].health is Health.DOWN
    assert nodes["n7"].health is Health.DRAINED
    assert nodes["n7"].reason == 'ECC errors: GPU 0 | dbe=2, "row remap'
    assert [nodes[name].ranks for name in ("n0", "n2", "n3", "n6")] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert nodes["n6"].switch == "leaf3"
    assert nodes["n5"].job == 21
    assert nodes["n4"].shards is None, "nobody ever said what n4 holds"
    assert nodes["n4"].verified_bytes is None
    assert nodes["n3"].verified_bytes == 41 * 251 << 20
    parents = {switch.name: switch.parent for switch in snapshot.switches}
    assert parents["leaf3"] == "spine1"
    assert parents["core"] is None


def test_jobs_say_what_was_repeated_and_which_attempt_counts(filled: Journal, collector: Collector) -> None:
    jobs = {job.id: job for job in shown(collector).jobs}
    digits = jobs[17]
    assert (digits.attempt, len(digits.attempts), digits.step) == ("17.0.1", 2, 639)
    assert digits.repeated_steps == 412 - 381 + 1
    assert (digits.ring, digits.ring_stock) == (2, 4)
    assert digits.rate == pytest.approx(2 / 1.9)
    assert jobs[9].phase == "succeeded"
    assert jobs[9].rate is None


def test_the_document_is_strict_json_also_with_a_loss_of_nan(journal: Journal, collector: Collector) -> None:
    attempt = Attempt(3, 0, 0)
    reports = tuple(
        ProgressPoint(attempt=attempt, step=step, unix=1.0 + step, metrics={"loss": value})
        for step, value in enumerate([1.0, math.nan, math.inf])
    )
    journal.record_beat(Beat(attempt=attempt, phase=Phase.RUNNING, progress=reports), time.time())
    document = shown(collector).document()
    json.dumps(document, allow_nan=False)
    assert document["jobs"]["3"]["loss"] == "inf"
    assert document["curves"]["3"]["points"] == [[0, 1.0, 0], [1, None, 0], [2, None, 0]]


def test_without_slurm_the_tree_comes_from_the_nodes_and_nothing_is_guessed(filled: Journal) -> None:
    settings = Settings(journal=filled.path, slurm=False)
    snapshot = shown(Collector(settings))
    nodes = {node.name: node for node in snapshot.nodes}
    assert {switch.name for switch in snapshot.switches} >= {"core", "spine0", "spine1", "leaf0", "leaf3"}
    assert nodes["n0"].health is Health.BUSY, "its agent answers its job's launcher"
    assert nodes["n1"].health is Health.UNKNOWN, "no job speaks for it any more"
    assert nodes["n0"].gpus is None
    assert all(source.state is SourceState.OFF for source in snapshot.sources if source.name != "journal")


def test_a_silent_launcher_says_nothing_about_nodes(journal: Journal) -> None:
    attempt, name = Attempt(5, 0, 0), NodeName("n0")
    beat = Beat(
        attempt=attempt,
        phase=Phase.RUNNING,
        nodes=(name,),
        world_size=1,
        node_beats=(NodeRecord(name=name, seen_unix=time.time() - 600, job=5),),
    )
    journal.record_beat(beat, time.time() - 600)
    snapshot = shown(Collector(Settings(journal=journal.path, slurm=False)))
    assert snapshot.nodes[0].health is Health.UNKNOWN
    assert snapshot.jobs[0].phase == "", "a launcher's old word is not taken"


def test_an_agent_that_does_not_answer_its_fresh_launcher_is_silent(journal: Journal) -> None:
    attempt, name = Attempt(5, 0, 0), NodeName("n0")
    lost = NodeRecord(name=name, seen_unix=time.time() - 9, silent_s=9.0, job=5)
    beat = Beat(attempt=attempt, phase=Phase.RECOVERING, nodes=(name,), world_size=1, node_beats=(lost,))
    journal.record_beat(beat, time.time())
    snapshot = shown(Collector(Settings(journal=journal.path, slurm=False)))
    assert snapshot.nodes[0].health is Health.SILENT
    assert "job 5 is recovering" in snapshot.headline.text.lower()
    assert snapshot.headline.mood is Mood.BAD


def test_jobs_that_slurm_alone_knows(collector: Collector, slurm: Any) -> None:
    slurm.jobs = (
        ("41", "41", "RUNNING", "None", "0", "1", "dora", "n[2-3]", "n2", "someone's own"),
        ("42", "42", "PENDING", "Resources", "0", "1", "dora", "", "", "waits"),
        ("40", "40", "COMPLETED", "None", "0", "1", "dora", "n6", "n6", "over"),
    )
    snapshot = shown(collector)
    assert [(job.id, job.slurm_state, job.watched) for job in snapshot.jobs] == [
        (41, "RUNNING", False),
        (42, "PENDING", False),
    ]
    assert snapshot.jobs[1].pending_reason == "Resources"
    assert {node.name for node in snapshot.nodes if node.job == 41} == {"n2", "n3"}
    assert snapshot.jobs[0].step is None


def test_more_jobs_than_a_page_can_hold(filled: Journal, collector: Collector, slurm: Any) -> None:
    waiting = [(str(i), str(i), "PENDING", "Priority", "0", "1", "dora", "", "", "many") for i in range(100, 900)]
    slurm.jobs = (("50", "50", "RUNNING", "None", "0", "1", "dora", "n2", "n2", "old but running"), *waiting)
    snapshot = shown(collector)
    assert (len(snapshot.jobs), snapshot.jobs_known) == (MOST_JOBS, 805)
    assert {17, 21, 50} <= {job.id for job in snapshot.jobs}, "those that run are never left out"


def test_what_slurm_knows_of_the_end_goes_before_a_launchers_last_word(
    filled: Journal, collector: Collector, slurm: Any
) -> None:
    slurm.jobs = (("17", "17", "CANCELLED", "None", "0", "1", "alice", "n0", "n0", "digits-ddp"),)
    job = next(job for job in shown(collector).jobs if job.id == 17)
    assert (job.phase, job.slurm_state, job.rate) == ("", "CANCELLED", None)
    assert all(node.job != 17 for node in shown(collector).nodes)


def test_a_spare_is_called_one(journal: Journal, collector: Collector) -> None:
    beat = Beat(
        attempt=Attempt(5, 0, 0),
        phase=Phase.RUNNING,
        nodes=(NodeName("n3"), NodeName("n2")),
        spares=(NodeName("n6"),),
        world_size=4,
    )
    journal.record_beat(beat, time.time())
    nodes = {node.name: node for node in shown(collector).nodes}
    assert (nodes["n6"].spare, nodes["n6"].ranks, nodes["n6"].job) == (True, (), 5)
    assert (nodes["n3"].ranks, nodes["n2"].ranks) == ((0, 1), (2, 3)), "in ring order, not by name"


def test_ranks_that_do_not_divide_are_not_guessed(journal: Journal) -> None:
    beat = Beat(
        attempt=Attempt(5, 0, 0), phase=Phase.RUNNING, nodes=(NodeName("n0"), NodeName("n1")), world_size=3
    )
    journal.record_beat(beat, time.time())
    snapshot = shown(Collector(Settings(journal=journal.path, slurm=False)))
    assert [node.ranks for node in snapshot.nodes] == [(), ()]
    assert [node.job for node in snapshot.nodes] == [5, 5]


def test_slurm_dead_from_the_start_and_slurm_dead_later(collector: Collector, slurm: Any) -> None:
    slurm.dead = True
    first = shown(collector)
    assert first.headline.text.startswith("Slurm does not answer")
    assert first.nodes == ()
    slurm.dead = False
    assert shown(collector).headline.text.startswith("2 nodes down")
    slurm.dead = True
    later = shown(collector)
    assert later.headline.text.startswith("Slurm stopped answering")
    assert later.headline.mood is Mood.BAD
    assert len(later.nodes) == 8, "what was known stays, with its age"
    source = next(source for source in later.sources if source.name == "nodes")
    assert source.state is SourceState.FAILING
    assert source.at_unix > 0


def test_a_quiet_page_says_so() -> None:
    off = Source(name="journal", title="journal", state=SourceState.OK, period_s=1.0)
    assert build(Readings(unix=1.0, interval_s=1.0, sources=(off,))).headline.mood is Mood.UNKNOWN


@pytest.mark.parametrize(
    ("said", "health"),
    [
        ("IDLE", Health.IDLE),
        ("MIXED", Health.BUSY),
        ("IDLE+PLANNED", Health.IDLE),
        ("ALLOCATED+DRAIN", Health.DRAINING),
        ("IDLE+DRAIN", Health.DRAINED),
        ("IDLE+COMPLETING+DRAIN", Health.DRAINING),
        ("ALLOCATED+NOT_RESPONDING", Health.SILENT),
        ("DOWN+DRAIN+NOT_RESPONDING", Health.DOWN),
        ("IDLE+INVALID_REG", Health.DOWN),
        ("IDLE+MAINTENANCE", Health.MAINT),
        ("UNKNOWN", Health.UNKNOWN),
        ("FUTURE", Health.UNKNOWN),
    ],
)
def test_what_slurm_says_becomes_one_word(said: str, health: Health) -> None:
    state, flags = parse_node_state(said)
    row = NodeRow(
        name=NodeName("n0"),
        address="n0",
        host="n0",
        port=None,
        state=state,
        flags=flags,
        reason="",
        reason_by="",
        boot_time="",
        gpus=0,
    )
    assert slurm_health(row) is health


def test_the_snapshot_is_frozen(collector: Collector) -> None:
    made: Callable[[], Any] = lambda: setattr(shown(collector), "cluster", "x")  # noqa: E731
    with pytest.raises(dataclasses.FrozenInstanceError):
        made()
    assert JournalFacts().jobs == ()
