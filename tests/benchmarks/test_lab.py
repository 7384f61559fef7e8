from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from benchmarks.cache import __main__ as command
from benchmarks.cache import memory
from benchmarks.cache.lab import FULL, QUICK, SIDES, TINY, Lab, Turns, in_turns, write_source
from benchmarks.cache.limits import Limits
from benchmarks.cache.local import WrongBytesError, checked, measure
from benchmarks.cache.packing import measure as measure_packing
from benchmarks.cache.players import Answer, UnmeasuredError
from benchmarks.report import page
from benchmarks.rows import make_row, write_rows

PEERS = [side for side in SIDES if side.startswith("peers.")]


def answer(rate: float) -> Answer:
    return Answer(seconds=1.0, samples=int(rate))


def test_ratios_are_of_one_repeat_and_the_best_peer_may_be_another_in_each() -> None:
    turns = Turns(
        {"ours": [answer(90), answer(100)], "a": [answer(30), answer(10)], "b": [answer(10), answer(50)]}
    )
    assert turns.over("ours", "a") == [3, 10]
    assert turns.over_best("ours", ["a", "b"]) == [3, 2]
    assert turns.faster("a", "b", "gone") == "b"
    turns.leave_out("a")
    assert set(turns.of) == {"ours", "b"}


def test_a_side_that_fails_is_left_out_and_said_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []

    def turn(side: str, way: str, _seed: int) -> Answer:
        if side == "plain.Tar":
            raise UnmeasuredError("it only packs")
        return answer(len(way) + 1)

    with Lab(tmp_path, TINY, said.append, without=["plain.Sqlite"]) as lab:
        turns = in_turns(lab, ["plain.RawFiles#way", "plain.Tar", "plain.Sqlite"], "reads", turn)
        assert {name: len(answers) for name, answers in turns.of.items()} == {"raw files, way": TINY.repeats}
        assert lab.missing == {"reads: GNU tar": "it only packs"}
    assert said == ["not measured: reads: GNU tar: it only packs"]


def test_other_bytes_than_were_written_are_no_figure(tmp_path: Path) -> None:
    with Lab(tmp_path, TINY, print) as lab:
        lab.source(1024)
        with pytest.raises(WrongBytesError):
            checked(lab, 1024, 3, Answer(seconds=1.0, samples=64, digest=1))


def test_what_is_in_memory_is_told_and_files_that_vanish_do_no_harm(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", 3, 10_000)
    files = memory.files_below(source.root)
    assert len(files) == len(source.digests) == 3
    for path in files:
        Path(path).read_bytes()
    gone = str(tmp_path / "gone")
    assert memory.resident([*files, gone]) == 1.0
    memory.evict([*files, gone])
    assert [Path(path).stat().st_size for path in files] == [10_000] * 3


def test_control_groups_are_there_or_are_said_not_to_be(tmp_path: Path) -> None:
    name, root = f"deeplink-test-{os.getpid()}", Path("/sys/fs/cgroup")
    said = ""
    try:
        with Limits(name, tmp_path, memory=64 << 20):
            assert [*root.glob(name), *root.glob(f"*/{name}")]
    except UnmeasuredError as problem:
        said = str(problem)
    assert not said or "control groups" in said
    assert not [*root.glob(name), *root.glob(f"*/{name}")]


def test_the_page_counts_goals_marks_what_is_short_and_keeps_its_tables_whole() -> None:
    rows = [make_row("a | b", [2.0], at_least=1), make_row("c", [0.5], at_least=1), make_row("d", [3.0], "us")]
    text = page(
        {"One": rows},
        missing={"x": "a|b\nc"},
        settings={"raw": "plain"},
        when="2026-01-02",
        scale="tiny",
        load=0.5,
    )
    assert "## Figures to reach: 1 of 2" in text
    assert "| a \\| b | 2 x | 2 .. 2 | 1 | 1 | reached |" in text
    assert "| c | 0.5 x | 0.5 .. 0.5 | 1 | 1 | **short** |" in text
    assert text.count("| d |") == 1
    assert "- x: a\\|b c" in text


def test_finished_subjects_are_kept_when_resumed(tmp_path: Path) -> None:
    noted = [make_row("a", [2.0], at_least=1)]
    path = write_rows("index", noted, folder=tmp_path)
    path.write_text(json.dumps({"rows": json.loads(path.read_text()), "missing": {"b": "why"}}))
    found = command.run(["index"], TINY, tmp_path, print)
    assert found.all_rows == noted
    assert found.missing == {"b": "why"}


def test_an_unknown_subject_is_an_error_that_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "lokal"])
    assert "no such subject: lokal" in capsys.readouterr().err


def test_scales_grow() -> None:
    assert TINY.bytes < QUICK.bytes < FULL.bytes
    assert FULL.repeats >= 5


@pytest.mark.slow
def test_a_small_run_without_peers_has_the_rows_and_goals_of_the_issue(tmp_path: Path) -> None:
    with Lab(tmp_path, dataclasses.replace(TINY, repeats=1), print, without=PEERS) as lab:
        rows = [*measure_packing(lab), *measure(lab)]
        assert lab.missing == {}
    goals = {row.row.partition(" (")[0]: row.goal for row in rows if row.goal is not None}
    assert {row.row.rpartition(": ")[2] for row in rows if row.goal} >= {"raw files", "flat mmap", "one flat file"}
    assert sorted(row.goal for row in rows if row.goal) == [0.7, 0.7, 0.8, 0.9, 1.03, 3, 3, 4, 8, 10]
    assert "local warm random, 4 KiB, views" in goals
    assert all(row.spread[0] <= row.value <= row.spread[1] for row in rows)
