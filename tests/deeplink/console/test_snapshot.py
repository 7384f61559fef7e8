"""From rows to what the page shows."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deeplink.cache.replicate import residency
from deeplink.console.collect import Collector, ConsoleSettings, FactSource, JournalFacts, Readings, SourceState
from deeplink.console.concerns import ConcernKind, concerns, headline
from deeplink.console.feed import Feed
from deeplink.console.jobs import MOST_JOBS, Mood
from deeplink.console.journal_queries import JournalQueries
from deeplink.console.nodes import NodeView, ShownHealth, slurm_health
from deeplink.console.query import search
from deeplink.console.snapshot import ConsoleSnapshot, Memo, build
from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.jobs.picture import help_for
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, NodeRecord, Phase, ProgressPoint
from deeplink.scheduler.slurm.parse import NodeRow
from deeplink.scheduler.slurm.states import parse_node_state


def shown(collector: Collector) -> ConsoleSnapshot:
    collector.refresh_slurm()
    return build(collector.readings())


def test_a_recorded_cluster_with_a_filled_journal(filled: Journal, collector: Collector) -> None:
    snapshot = shown(collector)
    nodes = {node.name: node for node in snapshot.nodes}
    assert snapshot.cluster == "recorded"
    assert list(nodes) == [f"n{number}" for number in range(8)]
    assert nodes["n1"].health is ShownHealth.DOWN
    assert nodes["n7"].health is ShownHealth.DRAINED
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
    curve = JournalQueries(journal.path).curve(3)
    assert curve is not None
    assert curve["points"] == [[0, 1.0, 0], [1, None, 0], [2, None, 0]]


def test_without_slurm_the_tree_comes_from_the_nodes_and_nothing_is_guessed(filled: Journal) -> None:
    settings = ConsoleSettings(journal=filled.path, slurm=False)
    snapshot = shown(Collector(settings))
    nodes = {node.name: node for node in snapshot.nodes}
    assert {switch.name for switch in snapshot.switches} >= {"core", "spine0", "spine1", "leaf0", "leaf3"}
    assert nodes["n0"].health is ShownHealth.BUSY, "its agent answers its job's launcher"
    assert nodes["n1"].health is ShownHealth.UNKNOWN, "no job speaks for it any more"
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
    snapshot = shown(Collector(ConsoleSettings(journal=journal.path, slurm=False)))
    assert snapshot.nodes[0].health is ShownHealth.UNKNOWN
    assert snapshot.jobs[0].phase == "", "a launcher's old word is not taken"


def test_an_agent_that_does_not_answer_its_fresh_launcher_is_silent(journal: Journal) -> None:
    attempt, name = Attempt(5, 0, 0), NodeName("n0")
    lost = NodeRecord(name=name, seen_unix=time.time() - 9, silent_s=9.0, job=5)
    beat = Beat(attempt=attempt, phase=Phase.RECOVERING, nodes=(name,), world_size=1, node_beats=(lost,))
    journal.record_beat(beat, time.time())
    snapshot = shown(Collector(ConsoleSettings(journal=journal.path, slurm=False)))
    assert snapshot.nodes[0].health is ShownHealth.SILENT
    assert "job 5 is recovering" in snapshot.headline.text.lower()
    assert snapshot.headline.mood is Mood.BAD


def test_a_watchdog_that_hears_nobody_is_said_where_jobs_run(
    journal: Journal, collector: Collector, slurm: Any
) -> None:
    slurm.jobs = (("41", "41", "RUNNING", "None", "0", "1", "dora", "n[2-3]", "n2", "someone's own"),)
    journal.record_beat(Beat(attempt=Attempt(41, 0, 0), phase=Phase.RUNNING), time.time() - 3601)
    silent = shown(collector).headline
    assert "the watchdog has heard no agent and no launcher for 60 minutes" in silent.text.replace("The", "the")
    assert silent.mood in {Mood.WARN, Mood.BAD}
    journal.record_node(NodeRecord(name=NodeName("n2"), seen_unix=time.time() - 601))
    assert "no launcher for 10 minutes" in shown(collector).headline.text
    journal.record_node(NodeRecord(name=NodeName("n2"), seen_unix=time.time()))
    assert "has heard no agent" not in shown(collector).headline.text


@pytest.mark.parametrize("phase", [None, Phase.SUCCEEDED], ids=["not on record", "its attempt has ended"])
def test_a_job_that_no_launcher_speaks_for_makes_no_watchdog_deaf(
    phase: Phase | None, journal: Journal, collector: Collector, slurm: Any
) -> None:
    slurm.jobs = (("41", "41", "RUNNING", "None", "0", "1", "dora", "n[2-3]", "n2", "someone's own"),)
    if phase is not None:
        journal.record_beat(Beat(attempt=Attempt(41, 0, 0), phase=phase), time.time() - 3601)
    assert "has heard no agent" not in shown(collector).headline.text


def test_a_standing_agent_that_was_removed_is_missed_for_a_day(journal: Journal, collector: Collector) -> None:
    journal.record_node(NodeRecord(name=NodeName("n2"), seen_unix=time.time() - 90_000))
    assert "has heard no agent" not in shown(collector).headline.text
    journal.record_node(NodeRecord(name=NodeName("n3"), seen_unix=time.time() - 80_000))
    assert "has heard no agent" in shown(collector).headline.text


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


def test_tasks_that_wait_together_are_one_line_that_counts_them(collector: Collector, slurm: Any) -> None:
    rest = ("PENDING", "Resources", "0", "1", "dora", "", "", "sweep")
    slurm.jobs = (
        *(("6", f"6_{task}", *rest) for task in (1, 2, 3)),
        ("7", "6_0", "RUNNING", "None", "0", "1", "dora", "n2", "n2", "sweep"),
    )
    assert [(job.id, job.label) for job in shown(collector).jobs] == [(7, "6_0"), (6, "6 (3 tasks)")]
    slurm.jobs = tuple(
        ("6", f"6_{task}", "PENDING", "JobHeldUser" if task == 2 else "Priority", *rest[2:]) for task in (1, 2, 3)
    )
    (held,) = shown(collector).jobs
    assert held.remedy == "held: `scontrol release 6` lets it start", "that of one task would leave others held"


def test_more_jobs_than_a_page_can_hold(filled: Journal, collector: Collector, slurm: Any) -> None:
    waiting = [(str(i), str(i), "PENDING", "Priority", "0", "1", "dora", "", "", "many") for i in range(100, 900)]
    slurm.jobs = (("50", "50", "RUNNING", "None", "0", "1", "dora", "n2", "n2", "old but running"), *waiting)
    snapshot = shown(collector)
    document = snapshot.document()
    assert (len(document["jobs"]), document["jobs_known"]) == (MOST_JOBS, 805)
    assert {"17", "21", "50"} <= set(document["jobs"]), "those that run are never left out"
    slurm.jobs = (("99", "99", "PENDING", "JobHeldUser", "0", "1", "dora", "", "", "held"), *waiting)
    assert "99" in shown(collector).document()["jobs"], "nor is one that needs somebody"


def test_what_slurm_knows_of_the_end_goes_before_a_launchers_last_word(
    filled: Journal, collector: Collector, slurm: Any
) -> None:
    slurm.jobs = (("17", "17", "CANCELLED", "None", "0", "1", "alice", "n0", "n0", "digits-ddp"),)
    job = next(job for job in shown(collector).jobs if job.id == 17)
    assert (job.phase, job.slurm_state, job.rate) == ("", "CANCELLED", None)
    assert all(node.job != 17 for node in shown(collector).nodes)


HELD = "job requeued in held state"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (("PENDING", HELD), "held: `scontrol release 12_3` lets it start"),
        (("PENDING", "JobHeldUser"), "held: `scontrol release 12_3` lets it start"),
        (("PENDING", "launch failed requeued held"), "held: `scontrol release 12_3` lets it start"),
        (("PENDING", "JobHoldMaxRequeue"), "held: `scontrol release 12_3` lets it start"),
        (("COMPLETING", HELD), "held: `scontrol release 12_3` lets it start"),
        (
            ("PENDING", "JobHeldAdmin"),
            "held by an administrator: an operator's `scontrol release 12_3` lets it start",
        ),
        (("REQUEUE_HOLD", "None"), "held: `scontrol release 12_3` lets it start"),
        (("PENDING", "Resources"), ""),
    ],
)  # fmt: skip
def test_a_job_that_went_back_into_the_queue_has_not_failed_and_one_that_is_held_says_what_helps(
    journal: Journal, collector: Collector, slurm: Any, said: tuple[str, str], remedy: str
) -> None:
    beat = Beat(attempt=Attempt(17, 0, 1), phase=Phase.FAILED, job_label="12_3", detail="exit code 5 again")
    journal.record_beat(beat, time.time())
    slurm.jobs = (("17", "12_3", *said, "1", "1", "alice", "", "", "digits-ddp"),)
    snapshot = shown(collector)
    (job,) = snapshot.jobs
    assert (job.label, job.phase, job.slurm_state, job.remedy) == ("12_3", "", said[0], remedy)
    assert (job.attempt, job.attempts[0].name) == ("12_3.0.1", "12_3.0.1")
    assert ("job 12_3 is held" in snapshot.headline.text.lower()) == bool(remedy)


def test_a_launcher_that_failed_has_failed_where_slurm_knows_nothing_newer(
    journal: Journal, collector: Collector, slurm: Any
) -> None:
    journal.record_beat(Beat(attempt=Attempt(17, 0, 0), phase=Phase.FAILED), time.time())
    assert shown(collector).jobs[0].phase == "failed"
    slurm.jobs = (("17", "17", "FAILED", "NonZeroExitCode", "0", "1", "alice", "n0", "n0", "x"),)
    assert (shown(collector).jobs[0].phase, shown(collector).jobs[0].remedy) == ("failed", "")


def test_what_the_checks_of_a_node_find_is_shown_with_what_helps(journal: Journal, collector: Collector) -> None:
    worn = Finding(check="disk", severity=Severity.WARNING, text="slow <b>", since_unix=1.0)
    late = Finding(check="clock", severity=Severity.NOTE, text="late")
    unknown = Finding(check="gpu", severity=Severity.UNKNOWN, text="no nvidia-smi")
    journal.record_node(NodeRecord(name=NodeName("n2"), seen_unix=time.time(), health=(worn, unknown)))
    journal.record_node(NodeRecord(name=NodeName("n3"), seen_unix=time.time(), health=(late,)))
    snapshot = shown(collector)
    nodes = {node.name: node for node in snapshot.nodes}
    assert nodes["n3"].findings == ("clock (observe): late",)
    assert "n3" not in snapshot.headline.text
    assert nodes["n2"].findings == ("disk (comment): slow <b>",)
    assert nodes["n2"].remedy == "`deeplink health` on n2 looks again"
    assert (nodes["n0"].findings, nodes["n0"].remedy) == ((), "")
    assert "n2: disk (comment): slow" in snapshot.headline.text
    assert snapshot.document()["nodes"]["n2"]["findings"] == ["disk (comment): slow <b>"]


def test_a_node_that_we_drained_says_how_it_comes_back() -> None:
    row = dataclasses.replace(node_row("IDLE+DRAIN"), name=NodeName("n3"), reason="deeplink: n3")
    assert help_for("n3", row, ()) == "once it is mended: `scontrol update nodename=n3 state=resume`"
    assert not help_for("n3", dataclasses.replace(row, reason="fan is loud"), ())


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
    snapshot = shown(Collector(ConsoleSettings(journal=journal.path, slurm=False)))
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


def test_what_needs_a_hand_comes_in_order_with_the_command_that_helps(
    filled: Journal, collector: Collector, slurm: Any
) -> None:
    worn = Finding(check="disk", severity=Severity.WARNING, text="full", since_unix=1.0)
    filled.record_node(NodeRecord(name=NodeName("n2"), seen_unix=time.time(), health=(worn,)))
    filled.record_incident(Incident(id="x-1", kind="node-dead", began_unix=1.0, detected_unix=2.0))
    slurm.jobs = (
        ("50", "50", "PENDING", "JobHeldAdmin", "0", "1", "dora", "", "", "held by an administrator"),
        ("51", "51", "PENDING", "JobHeldUser", "0", "1", "dora", "", "", "her own affair"),
    )
    found = shown(collector).concerns
    assert [(each.kind.value, each.command) for each in found] == [
        ("down", "scontrol update nodename=n[1,4] state=resume"),
        ("held", "scontrol release 50"),
        ("finding", "ssh n2 deeplink health"),
        ("drained", "scontrol update nodename=n7 state=resume"),
        ("incident", "deeplink incident 4"),
    ]
    slurm.dead = True
    assert [each.command for each in shown(collector).concerns][:1] == ["scontrol ping"]


@pytest.mark.parametrize("word", ["12; touch /x", "$(touch /x)", "`x`", "a'b", "-rf /", "n[1;2]", "a b[", "n1,"])
def test_what_a_launcher_says_of_itself_is_one_word_of_a_command_to_copy(word: str, journal: Journal) -> None:
    for phase in (Phase.STRANDED, Phase.RECOVERING):
        attempt = Attempt(11 + (phase is Phase.STRANDED), 0, 0)
        nodes = (NodeName(word), NodeName("n9" * 9_999), NodeName("n1"))
        beat = Beat(attempt=attempt, phase=phase, job_label=word, nodes=nodes)
        journal.record_beat(beat, time.time())
    found = shown(Collector(ConsoleSettings(journal=journal.path, slurm=False))).concerns
    said = [shlex.split(each.command) for each in found if each.command]
    assert ["deeplink", "incidents", "--job", word] in said
    assert ["deeplink", "status", word, "--watch"] in said
    assert ["scontrol", "show", "node", "n1"] in said, "what cannot be a node is none"


def test_of_many_alike_twenty_are_listed_and_the_others_counted(journal: Journal, collector: Collector) -> None:
    worn = Finding(check="disk", severity=Severity.WARNING, text="full", since_unix=1.0)
    for number in range(30):
        journal.record_node(NodeRecord(name=NodeName(f"m{number}"), seen_unix=time.time(), health=(worn,)))
    snapshot = shown(collector)
    findings = [each for each in snapshot.concerns if each.kind is ConcernKind.FINDING]
    assert (len(findings), findings[-1].title) == (21, "10 more findings")
    assert "30 findings" in snapshot.headline.text


def test_a_leaf_of_which_every_node_is_lost_is_told_as_one(journal: Journal) -> None:
    lost = [node_view(f"n{number}", "leaf1", ShownHealth.DOWN) for number in (2, 3)]
    well = [node_view(f"n{number}", "leaf0", ShownHealth.IDLE) for number in (0, 1)]
    readings = Readings(unix=1.0, interval_s=1.0, sources=())
    titles = [each.title for each in concerns(readings, (*well, *lost), (), Memo())]
    assert titles == ["2 nodes down", "every node of leaf1 is lost"]


def test_what_the_first_line_does_not_name_is_counted_in_words_that_agree() -> None:
    nodes = [node_view(f"n{number}", f"leaf{number // 2}", ShownHealth.DOWN) for number in range(10)]
    failures = tuple(
        Incident(
            id=f"x-{number}", kind="node-dead", node=NodeName(f"m{number % 5}"), began_unix=1.0, detected_unix=1.0
        )
        for number in range(15)
    )
    readings = Readings(unix=2.0, interval_s=1.0, sources=(), journal=JournalFacts(incidents=failures))
    text = headline(concerns(readings, (*nodes,), (), Memo()), len(nodes), Counter(), 15).text
    assert " · 3 more leaves · " in text
    assert " · 3 more failing nodes · " in text


def test_jobs_that_starve_beyond_those_listed_are_found_where_the_page_says() -> None:
    assert ConcernKind.STARVING.place == "jobs?state=running", "no job is in a state of that name"


def node_view(name: str, switch: str, health: ShownHealth) -> NodeView:
    return NodeView(
        name=name, order=0, switch=switch, health=health, state="", reason="", gpus=None, job=None, ranks=(),
        spare=False, shards=None, shard_bytes=None, verified_bytes=None, free_bytes=None, live=False,
        standing=False, heard_unix=0.0, findings=(), found_unix=0.0, unfit=False, remedy="",
    )  # fmt: skip


def test_datasets_say_how_large_they_are_and_where_they_were_found(tmp_path: Path) -> None:
    root = tmp_path / "catalog"
    for version in ("a" * 40, "b" * 40):
        (root / "digits").mkdir(parents=True, exist_ok=True)
        (root / "digits" / f"{version}.arrow").touch()
        (root / "digits" / "latest").write_text(version)
        text = json.dumps({"source": "/d", "plan": "p", "files": 9, "bytes": 90, "shards": 1, "packed_unix": 1.0})
        (root / "digits" / f"{version}.json").write_text(text)
    residency.note(root, "digits", "b" * 40, {NodeName("n2"): 45}, total=90, unix=time.time())
    collector = Collector(ConsoleSettings(journal=tmp_path / "none", slurm=False, catalog=root))
    assert collector.readings().source("catalog").state is SourceState.WAITING
    collector.refresh_datasets()
    found = {each.version[0]: each for each in build(collector.readings()).datasets}
    assert (found["b"].newest, found["b"].nodes, found["b"].total) == (True, (("n2", 45),), 90)
    assert (found["a"].newest, found["a"].files, found["a"].nodes) == (False, 9, None), "nobody has looked"


@pytest.mark.parametrize(
    "record",
    [
        '"files": NaN, "bytes": Infinity', '"files": [1], "bytes": {}', '"home": [[1]]', '"source": "\\ud800"',
        '"files": 1' + "0" * 400, '"files": ' + "[" * 900 + "]" * 900, '"files": ' + "[" * 9_999 + "]" * 9_999,
    ],
)  # fmt: skip
def test_no_record_of_a_dataset_however_odd_ends_the_console(record: str, tmp_path: Path) -> None:
    rest = {"source": "/d", "plan": "p", "files": 9, "bytes": 90, "shards": 1, "packed_unix": 1.0}
    for name, text in (("odd", f"{json.dumps(rest)[:-1]}, {record}}}"), ("well", json.dumps(rest))):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{'a' * 40}.arrow").touch()
        (tmp_path / name / "latest").write_text("a" * 40)
        (tmp_path / name / f"{'a' * 40}.json").write_text(text)
    collector = Collector(ConsoleSettings(journal=tmp_path / "none", slurm=False, catalog=tmp_path))
    feed = Feed(build(collector.readings()).document())
    collector.refresh_datasets()
    feed.publish(build(collector.readings()).document())
    told = json.loads(feed.latest.body)["datasets"]
    assert told[f"well@{'a' * 40}"]["files"] == 9
    assert told.get(f"odd@{'a' * 40}", {"shards": 1})["shards"] == 1


def test_a_name_is_found_whatever_is_in_it_and_leads_to_its_place(collector: Collector, slurm: Any) -> None:
    slurm.jobs = (("41", "41", "RUNNING", "None", "0", "1", "d&o#r%a", "n[2-3]", "n2", "x" * 10_000),)
    snapshot = shown(collector)
    (hit,) = search("D&O#", snapshot.document(), snapshot.jobs)
    assert hit["place"] == "jobs?user=d%26o%23r%25a"
    assert search("xxxx", snapshot.document(), snapshot.jobs)[0]["place"] == "jobs/41"


def test_agents_that_are_heard_once_more_are_no_news(journal: Journal, collector: Collector) -> None:
    def rows() -> dict[str, Any]:
        found: dict[str, Any] = shown(collector).document()["nodes"]
        return found

    now = time.time()
    journal.record_node(NodeRecord(name=NodeName("n2"), seen_unix=now - 2, free_bytes=10 << 30))
    journal.record_node(NodeRecord(name=NodeName("n3"), seen_unix=now - 100))
    before = rows()
    assert (before["n2"]["live"], before["n3"]["live"], before["n0"]["live"]) == (True, False, False)
    assert before["n3"]["heard_unix"] == pytest.approx(now - 100, abs=1)
    journal.record_node(NodeRecord(name=NodeName("n2"), seen_unix=now, free_bytes=(10 << 30) + 4096))
    assert rows() == before


def test_a_quiet_page_says_so() -> None:
    off = FactSource(name="journal", title="journal", state=SourceState.OK, period_s=1.0)
    assert build(Readings(unix=1.0, interval_s=1.0, sources=(off,))).headline.mood is Mood.UNKNOWN


@pytest.mark.parametrize(
    ("said", "health"),
    [
        ("IDLE", ShownHealth.IDLE),
        ("MIXED", ShownHealth.BUSY),
        ("IDLE+PLANNED", ShownHealth.IDLE),
        ("ALLOCATED+DRAIN", ShownHealth.DRAINING),
        ("IDLE+DRAIN", ShownHealth.DRAINED),
        ("IDLE+COMPLETING+DRAIN", ShownHealth.DRAINING),
        ("ALLOCATED+NOT_RESPONDING", ShownHealth.SILENT),
        ("DOWN+DRAIN+NOT_RESPONDING", ShownHealth.DOWN),
        ("IDLE+INVALID_REG", ShownHealth.DOWN),
        ("IDLE+MAINTENANCE", ShownHealth.MAINT),
        ("UNKNOWN", ShownHealth.UNKNOWN),
        ("FUTURE", ShownHealth.UNKNOWN),
    ],
)
def test_what_slurm_says_becomes_one_word(said: str, health: ShownHealth) -> None:
    assert slurm_health(node_row(said)) is health


def node_row(said: str) -> NodeRow:
    state, flags = parse_node_state(said)
    return NodeRow(
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


def test_the_snapshot_is_frozen(collector: Collector) -> None:
    made: Callable[[], Any] = lambda: setattr(shown(collector), "cluster", "x")  # noqa: E731
    with pytest.raises(dataclasses.FrozenInstanceError):
        made()
    assert JournalFacts().jobs == ()


def test_only_what_changed_is_made_again(filled: Journal, collector: Collector, slurm: Any) -> None:
    memo = Memo()
    looks = []
    for state in ("PENDING", "PENDING", "RUNNING"):
        slurm.jobs = (("40", "40", state, "Priority", "0", "1", "dora", "", "", "sweep"),)
        collector.refresh_slurm()
        made = build(collector.readings(), memo)
        looks.append((made, made.document(memo)))
    (first, before), (second, same), (_, after) = looks
    assert second.nodes is first.nodes
    assert second.jobs is first.jobs
    assert all(same[table] is before[table] for table in ("nodes", "jobs", "switches", "incidents", "datasets"))
    assert after["jobs"] is not same["jobs"]
    assert [job for job, row in after["jobs"].items() if row is not same["jobs"].get(job)] == ["40"]
    assert after["nodes"] is same["nodes"]
