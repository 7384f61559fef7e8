"""A run is judged by facts alone: figures, and every promise that can be broken."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.watchdog.facts import Facts, Line, Told, newest_step, read_logs
from benchmarks.watchdog.faults import Measured, differing, notes_of, rows_of, stock_rows, told
from benchmarks.watchdog.judging import _CHECKS, judge
from benchmarks.watchdog.playing import _gathered, _kill_watchdog, late_output
from benchmarks.watchdog.scenarios import BY_NAME, SCENARIOS, STOCK, After, Never, Scenario
from benchmarks.watchdog.stand import Stand, StandError
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.recovery.records import ActionRecord, IncidentOutcome
from deeplink.scheduler.testbed.lab.faults import FAULTS

OLD, NEW = Attempt(1, 0, 0), Attempt(1, 0, 1)
SPARE = BY_NAME["node-killed-spare"]


def line(attempt: Attempt, what: str, unix: float, *, step: int = 0, rank: int = 0, node: str = "n0") -> Line:
    return Line(attempt=attempt, rank=rank, what=what, unix=unix, step=step, node=node)


LINES = (
    line(OLD, "step", 99.0, step=47),
    line(OLD, "step", 103.0, step=47, rank=3, node="n7"),
    line(NEW, "process", 103.2),
    line(NEW, "imported", 103.7),
    line(NEW, "resumed", 103.8, step=40),
    line(NEW, "step", 104.0, step=41),
)
TOLD = Told(
    by="launcher",
    id="1.0.0-node-silent-n7",
    kind="node-silent",
    node="n7",
    attempt="1.0.0",
    began_unix=100.0,
    detected_unix=103.0,
    action="relaunch",
    outcome=IncidentOutcome.RECOVERED,
    evidence="",
    stacks=4,
)
GOOD = Facts(
    fault_unix=100.0,
    attempt=OLD,
    victims=("n7",),
    lines=LINES,
    incidents=(TOLD,),
    state="RUNNING",
    gpus_s=0.1,
    output="skipped step-0000000040.a1: torn",
)


def test_a_run_as_it_should_be() -> None:
    figures = judge(SPARE, GOOD)
    assert figures.detected_s == pytest.approx(3.0)
    assert figures.first_step_s == pytest.approx(4.0)
    assert figures.start_s == pytest.approx(3.2)
    assert figures.import_s == pytest.approx(0.5)
    assert figures.repeated == 7
    assert figures.zombie_s == 0.0
    assert not figures.broken
    assert not figures.missing
    assert told(figures) == "detected 3.00 s; first step 4.00 s"


def test_what_never_came_is_said() -> None:
    facts = dataclasses.replace(GOOD, lines=LINES[:2], incidents=())
    figures = judge(SPARE, facts)
    assert figures.first_step_s is None
    assert len(figures.missing) == 2
    rows = {row.row: row for row in rows_of(SPARE, [figures], [158.0])}
    detected = rows[f"{SPARE.title}: detected"]
    assert (detected.value, detected.reached) == (SPARE.bound_s, False)
    measured = Measured(ours={SPARE.name: [figures]}, stock={"rank-exit": [None]})
    said = "\n".join(notes_of(measured))
    assert "no incident of kind" in said
    assert "trains again in 0 of 1 runs" in said
    assert stock_rows(measured)[0].value == STOCK["rank-exit"].bound_s


def test_a_run_that_does_not_come_to_its_fault_is_a_row_that_is_short() -> None:
    (row,) = rows_of(SPARE, [], [158.0], failed=1)
    assert (row.value, row.goal, row.reached) == (0, 1, False)
    rows = rows_of(SPARE, [judge(SPARE, GOOD)], [158.0], failed=2)
    assert (rows[0].value, rows[0].goal, rows[0].reached) == (1, 3, False)
    assert {row.row for row in rows[1:]} == {row.row for row in rows_of(SPARE, [judge(SPARE, GOOD)], [158.0])}
    assert rows_of(SPARE, [], []) == [], "not asked for"
    assert notes_of(Measured(failed={SPARE.name: ["sbatch: refused"]}))[0].endswith("sbatch: refused")


def test_process_start_and_imports_are_shown_apart() -> None:
    rows = {
        row.row.removeprefix(f"{SPARE.title}: "): row.value for row in rows_of(SPARE, [judge(SPARE, GOOD)], [])
    }
    assert rows["of that, until the first process is started"] == pytest.approx(3.2)
    assert rows["of that, from a process's start until it has imported DeepLink"] == pytest.approx(0.5)
    torch = BY_NAME["node-killed-spare-torch"]
    assert any(row.row.endswith("DeepLink and torch") for row in rows_of(torch, [judge(torch, GOOD)], []))


def action(remedy: str, unix: float = 130.0) -> ActionRecord:
    return ActionRecord(
        key=remedy, incident="n7", remedy=remedy, attempt=None, node=NodeName("n7"), began_unix=unix
    )


LATE = dataclasses.replace(TOLD, by="watchdog", kind="self-in-doubt", node="")
MANY = tuple(line(Attempt(1, 0, number), "step", 110.0 + number, step=41) for number in range(1, 9))
BROKEN: dict[Never, dict[str, Any]] = {
    Never.BAD_NODE: {"lines": (*LINES, line(NEW, "step", 105.0, rank=3, node="n7"))},
    Never.REPEATED: {"lines": (*LINES[:4], line(NEW, "step", 104.0, step=1))},
    Never.GRES: {"gpus_s": math.inf},
    Never.HISTORY: {"incidents": (dataclasses.replace(TOLD, attempt="2.0.0"),)},
    Never.ZOMBIE_SAVES: {"saves": ("step-0000000060.a1",)},
    Never.ZOMBIE_LINES: {"late_lines": 3},
    Never.ZOMBIE_METRICS: {"late_points": 2},
    Never.UNCHECKED: {"drained": {}},
    Never.STACKS: {"incidents": (dataclasses.replace(TOLD, stacks=0),)},
    Never.LOOP: {"lines": MANY},
    Never.HANG: {"lines": LINES[:2]},
    Never.RESTART: {"restarts": 1},
    Never.DRAINED: {"drained": {"n3": "bad"}},
    Never.REQUEUED: {"restarts": 2},
    Never.INCIDENTS: {"incidents": (TOLD, LATE)},
    Never.UNNAMED_LEAF: {"drained": {"n7": "deeplink: 1.0.0-node-dead-n7"}},
    Never.FROM_ZERO: {"lines": (*LINES, line(NEW, "resumed", 103.8, rank=2))},
    Never.TWICE: {"actions": (action("drain-down"), action("drain-down"))},
}
KEPT: dict[Never, dict[str, Any]] = {
    Never.UNCHECKED: {"over_unix": 160.0, "actions": (action("resume", 172.0),)},
    Never.RESTART: {"lines": (*LINES[:2], line(OLD, "step", 120.0, step=60))},
    Never.UNNAMED_LEAF: {"drained": {"n7": "deeplink: 1.0.0-switch-suspect-leaf1"}},
}


@pytest.mark.parametrize("never", Never)
def test_every_promise_can_be_broken_and_kept(never: Never) -> None:
    assert _CHECKS[never](SPARE, dataclasses.replace(GOOD, **BROKEN[never]))
    assert not _CHECKS[never](SPARE, dataclasses.replace(GOOD, **KEPT.get(never, {})))


def test_a_node_is_used_again_only_after_the_watchdogs_own_check() -> None:
    cut = BY_NAME["node-cut"]
    facts = dataclasses.replace(
        GOOD,
        incidents=(dataclasses.replace(TOLD, kind="node-cut-off"),),
        over_unix=160.0,
        drained={"n7": "deeplink: 1.0.0-node-dead-n7"},
    )
    away = judge(cut, facts)
    assert (away.broken, away.back_s) == ({}, None), "not back is not unchecked"
    resumed = dataclasses.replace(facts, drained={}, actions=(action("drain-down"), action("resume", 172.0)))
    back = judge(cut, resumed)
    assert not back.broken
    assert back.back_s == pytest.approx(12.0)
    taken = next(row for row in rows_of(cut, [back, away], []) if "taken back when" in row.row)
    assert (taken.value, taken.reached) == (1, False)
    there = line(NEW, "step", 171.0, rank=3, node="n7")
    for wrong, why in (
        ({"actions": ()}, "no check is on record"),
        ({"actions": (action("resume", 150.0),)}, "taken back -10.0 s after"),
        ({"actions": (action("resume", 163.0),)}, "taken back 3.0 s after"),
        ({"lines": (*LINES, there)}, "ranks of a newer attempt on n7"),
    ):
        figures = judge(cut, dataclasses.replace(resumed, **cast("dict[str, Any]", wrong)))
        assert why in figures.broken[Never.UNCHECKED.value]


def test_a_killed_watchdog_that_nobody_misses_is_a_row_that_is_short() -> None:
    killed = BY_NAME["watchdog-killed"]
    output = "WARNING deeplink.scheduler.launch.event_log: beat: failed to connect\n"
    quiet = dataclasses.replace(GOOD, lines=LINES[:2], incidents=(), output="1.0.0 0 48\n")
    away = dataclasses.replace(GOOD.incidents[0], kind="watchdog-away", node="", attempt="")
    told = dataclasses.replace(quiet, output=output)
    on_record = dataclasses.replace(quiet, incidents=(away,))
    both = dataclasses.replace(told, incidents=(away,))
    for facts, missing in ((quiet, 2), (told, 1), (on_record, 1), (both, 0)):
        figures = judge(killed, facts)
        assert len(figures.missing) == missing
        noticed = int(not missing)
        row = next(row for row in rows_of(killed, [figures], []) if "noticed" in row.row)
        assert (row.value, row.goal, row.reached) == (noticed, 1, bool(noticed))


def test_what_the_job_wrote_before_the_fault_does_not_count() -> None:
    class Written:
        folder = Path("/nowhere")
        job = 1
        lines = staticmethod(lambda: LINES[:2])
        row = staticmethod(lambda: None)
        incidents = nodes = actions = staticmethod(tuple)
        output = staticmethod(lambda: "before\nafter\n")

    stand = cast("Stand", Written())
    killed = BY_NAME["watchdog-killed"]
    facts = _gathered(stand, killed, OLD, began=100.0, over=0.0, victims=(), written=len("before\n"))
    assert facts.output == "after\n"


@pytest.mark.parametrize("name", ["watchdog-killed-midway", "checkpoint-torn"])
def test_a_job_that_never_trains_again_is_a_row_that_is_short(name: str) -> None:
    good = judge(BY_NAME[name], GOOD)
    gone = judge(BY_NAME[name], dataclasses.replace(GOOD, lines=LINES[:2]))
    rows = rows_of(BY_NAME[name], [good, gone], [])
    row = next(row for row in rows if row.row.endswith("trains again, runs of 2"))
    assert (row.value, row.goal, row.reached) == (1, 2, False)
    assert not any("trains again" in row.row for row in rows_of(SPARE, [good], [])), "its seconds have a goal"


def test_a_start_from_zero_is_one_also_where_nobody_says_that_he_resumed() -> None:
    torn = BY_NAME["checkpoint-torn"]
    silent = dataclasses.replace(GOOD, lines=(*LINES[:4], line(NEW, "step", 104.0, step=1)))
    assert judge(torn, silent).broken[Never.FROM_ZERO.value] == "it started from step 0"
    never_so_far = dataclasses.replace(GOOD, lines=LINES[:4])
    assert Never.FROM_ZERO.value not in judge(torn, never_so_far).broken
    unsaid = dataclasses.replace(GOOD, output="a node was skipped")
    assert "does not say" in judge(torn, unsaid).broken[Never.FROM_ZERO.value]


def test_a_broken_promise_is_a_row_that_is_short() -> None:
    good = judge(SPARE, GOOD)
    bad = judge(SPARE, dataclasses.replace(GOOD, **BROKEN[Never.BAD_NODE]))
    rows = {row.row: row for row in rows_of(SPARE, [good, good, bad], [160.0, 150.0, 158.0])}
    row = rows[f"{SPARE.title}: never {Never.BAD_NODE.value}, runs of 3"]
    assert (row.value, row.reached) == (1, False)
    never_came = [row.row for row in rows_of(SPARE, [good], [None, 150.0, 158.0])]
    assert not any("over stock" in row for row in never_came)
    ratio = rows[f"{SPARE.title}: ours over stock Slurm's"]
    assert ratio.value == pytest.approx(4 / 158)
    assert ratio.reached


def test_a_job_that_waits_is_not_held_and_its_incident_says_why() -> None:
    always = BY_NAME["rank-exit-always"]
    why = dataclasses.replace(TOLD, kind="application-failed", node="")
    held = dataclasses.replace(GOOD, state="PENDING", reason="job requeued in held state", incidents=(why,))
    assert not judge(always, held).missing
    for wrong in (
        {"reason": "BeginTime"},
        {"state": "FAILED", "reason": "NonZeroExitCode"},
        {"incidents": (dataclasses.replace(why, kind="rank-failed"),)},
    ):
        assert len(judge(always, dataclasses.replace(held, **wrong)).missing) == 1


def test_a_watchdog_that_never_comes_so_far_is_not_taken_for_killed() -> None:
    class Silent:
        said = staticmethod(str)

    midway = dataclasses.replace(BY_NAME["watchdog-killed-midway"], bound_s=0.0)
    with pytest.raises(StandError, match="requeue job"):
        _kill_watchdog(cast("Stand", Silent()), midway)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenarios_name_faults_and_cases_that_there_are(scenario: Scenario) -> None:
    one = scenario
    assert one.fault in FAULTS
    assert not one.then or one.then in FAULTS
    assert not one.stock or one.stock in STOCK
    assert one.spares < one.nodes <= one.shape.node_count
    assert one.hold_s is not None or one.after is not After.SAME
    assert one.kinds or one.says, "somebody is to notice"
    assert one.resume == (Never.UNCHECKED in one.never)
    assert STOCK.keys() >= {one.stock} - {""}


def test_logs_are_read_and_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    rows = [
        {"what": "step", "unix": 5.0, "step": 7, "node": "n1"},
        {"what": "end", "unix": 6.0, "step": 7, "node": "n1"},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"what": "st'
    (tmp_path / "log" / "17.0.2.rank3.jsonl").write_text(text, encoding="utf-8")
    lines = read_logs(tmp_path)
    assert [(one.attempt, one.rank, one.what) for one in lines] == [
        (Attempt(17, 0, 2), 3, "step"),
        (Attempt(17, 0, 2), 3, "end"),
    ]
    assert newest_step(lines, rank=3) == 7
    assert newest_step(lines) == 0


def test_output_of_a_zombie_is_what_comes_after_the_new_ones_first_line() -> None:
    assert late_output("1.0.0 0 45\n1.0.1 0 41\n1.0.0 3 46\nwarning\n1.0.1 0 42\n", OLD) == 1
    assert late_output("1.0.0 0 45\n1.0.0 3 45\n", OLD) == 0


def test_what_differs_from_slurms_defaults_is_told() -> None:
    assert "SlurmdTimeout=10 (300)" in differing()
