"""What a storm left behind is told whole: who fenced whom, what was fed, and what became of each fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.watchdog.aftermath import Aftermath, drained_used, fed_wrongly, fences, page
from benchmarks.watchdog.facts import Line
from deeplink.core.types import Attempt
from deeplink.data.digest import DeliveryDigest, receipt
from tests.benchmarks.test_strikes import STRUCK, TOLD


def line(relaunch: int, what: str, unix: float, rank: int = 0) -> Line:
    return Line(attempt=Attempt(1, 0, relaunch), rank=rank, what=what, unix=unix, step=0, node="n0")


def test_who_ended_before_it_resumed_fences_nobody() -> None:
    lines = [
        *(line(0, "resumed", 1.0), line(0, "step", 2.0)),
        line(1, "process", 3.0),
        *(line(2, "process", 4.0), line(2, "imported", 5.0)),
        *(line(3, "resumed", 7.0), line(3, "resumed", 7.5, rank=1), line(3, "step", 8.0)),
        line(4, "process", 9.0),
    ]
    assert fences(lines) == [(Attempt(1, 0, number), 7.5) for number in range(3)]
    assert fences([line(0, "process", 1.0), line(1, "process", 2.0)]) == []
    assert fences([]) == []


def at(attempt: str, node: str, unix: float) -> Line:
    return Line(attempt=Attempt.parse(attempt), rank=0, what="step", unix=unix, step=1, node=node)


def test_a_drained_node_is_used_only_where_no_other_spare_is_left() -> None:
    drain = replace(
        STRUCK, strike=replace(STRUCK.strike, fault="node-drained"), target="n2", hit_unix=10, over_unix=60
    )
    nodes = {0: {"n0", "n1", "n2", "n3"}}
    before = [at("1.0.0", "n0", 1), at("1.0.0", "n1", 1)]
    wrong = [*before, at("1.0.1", "n0", 20), at("1.0.1", "n2", 20)]
    assert drained_used(wrong, [drain], nodes) == ["attempt 1.0.1 has ranks on n2, which is drained, not on n3"]
    well = [*before, at("1.0.1", "n0", 20), at("1.0.1", "n3", 20)]
    assert drained_used(well, [drain], nodes) == []
    later = [*wrong, at("1.0.2", "n3", 30)]
    assert len(drained_used(later, [drain], nodes)) == 1, "though the other one was used later"
    last = [*well, at("1.0.2", "n2", 30), at("1.0.2", "n3", 30)]
    assert drained_used(last, [drain], nodes) == [], "no other is left"
    assert drained_used(wrong, [replace(drain, hit_unix=25)], nodes) == [], "drained since"
    assert drained_used(wrong, [STRUCK], nodes) == []
    elsewhere = [*before, at("1.1.0", "n2", 20)]
    assert drained_used(elsewhere, [drain], {**nodes, 1: {"n2", "n3"}}) == [], "Slurm's own choice"


def digest(*samples: int) -> DeliveryDigest:
    made = DeliveryDigest()
    made.add(0, [receipt(row, b"%d" % row) for row in samples])
    return made


def test_a_job_without_a_digest_or_with_a_sample_twice_was_fed_wrongly(tmp_path: Path) -> None:
    assert fed_wrongly(tmp_path, digest(1, 2)) == ["it left no digest"]
    kept = tmp_path / "digest.json"
    kept.write_text(json.dumps(digest(2, 1).state_dict()))
    assert fed_wrongly(tmp_path, digest(1, 2)) == []
    kept.write_text(json.dumps(digest(1, 1, 2).state_dict()))
    assert fed_wrongly(tmp_path, digest(1, 2)) != []


def test_the_page_tells_of_every_fault_and_of_what_does_not_hold() -> None:
    missed = replace(STRUCK, target="", missed="the storm was over by then")
    hiccup = replace(STRUCK, strike=replace(STRUCK.strike, fault="disk-full"), job=0)
    left = Aftermath(
        struck=[STRUCK, hiccup, missed], ended=["COMPLETED", "COMPLETED"], problems=[], remarks=["a remark"]
    )
    text = page(60, 7, left, [TOLD])
    assert "--minutes 60 --seed 7 --write-docs" in text
    assert "1 faults and 1 hiccups came, 1 were left out.\n2 jobs: 2 COMPLETED." in text
    assert "What does not hold: nothing" in text
    assert "- a remark" in text
    assert "| 30 | node-killed | n3 | 20 | 5 | node-dead (drain-down, recovered) |" in text
    faults, _, hiccups = text.partition("## Hiccups")
    assert "| left out: the storm was over by then |" in faults
    assert "| 30 | disk-full | n3 | 20 |  |  |" in hiccups
    text = page(60, 7, replace(left, problems=["job 5 has not finished"]), [TOLD])
    assert "What does not hold: 1\n\n- job 5 has not finished\n" in text
