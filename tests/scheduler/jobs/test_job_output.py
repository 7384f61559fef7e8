"""Where output is, its end however large it is, and what is appended however it is rotated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.jobs import job_folder
from deeplink.scheduler.jobs.job_folder import Tail, attempts_in, expanded, labelled, named, of_rank, section
from deeplink.scheduler.slurm.command import text_of
from deeplink.scheduler.slurm.parse import JobRow
from tests.effort import examples
from tests.scheduler.jobs.test_job_names import row


def array_task() -> JobRow:
    made = row(15, "12_3")
    return type(made)(
        **{**{f: getattr(made, f) for f in made.__slots__}, "name": "tr ü", "batch_host": NodeName("n7.x")}
    )


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("/o/slurm-%j.out", "/o/slurm-15.out"),
        ("/a/slurm-15.out", "/a/slurm-12_3.out"),
        ("/o/%A_%a-%x-%u-%N.log", "/o/12_3-tr ü-eve-n7.log"),
        ("/o/%6j%%%q", "/o/000015%%q"),
        ("/o/\\%j", "/o/%j"),
        ("/o/%99999999999j", "/o/0000000015"),
    ],
)
def test_patterns_become_what_sbatch_makes_of_them(pattern: str, name: str) -> None:
    assert expanded(pattern, array_task()) == name


def test_a_job_without_an_array_or_a_node_yet() -> None:
    assert expanded("%A-%N", row(15, "15")) == "15-%N"


@given(st.binary(min_size=1, max_size=30).filter(lambda name: not {0, 9, 10, 13, 92} & {*name}))
@example(b"caf\xe9 \x1b[2J")
def test_the_name_of_a_file_comes_back_from_what_slurms_commands_show_of_it(name: bytes) -> None:
    shown = text_of(name)
    if not any("\u0080" <= letter <= "\u00ff" and not letter.isprintable() for letter in os.fsdecode(name)):
        assert os.fsencode(named(shown)) == name


@settings(max_examples=examples(200))
@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"\r")), max_size=40),
    st.booleans(),
    st.integers(0, 50),
    st.integers(1, 9),
)
def test_the_end_is_what_tail_gives(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ended: bool, count: int, block: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "out"
    text = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    path.write_bytes(text)
    whole = [line + b"\n" for line in text.split(b"\n")]
    whole[-1] = whole[-1][:-1]
    wanted = [line for line in whole if line][-count:] if count else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_folder, "BLOCK", block)
        assert Tail(path).last(count) == wanted


def test_of_a_huge_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole of a TiB
        file.seek(0, 2)
        file.write(b"\nlast but one\nlast\n")
    assert Tail(path).last(2) == [b"last but one\n", b"last\n"]


def test_a_line_without_an_end_is_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "MOST_LINE", 100)
    monkeypatch.setattr(job_folder, "BLOCK", 64)
    (tmp_path / "out").write_bytes(b"x" * 1000)
    assert b"".join(Tail(tmp_path / "out").last(1000)) == b"x" * 1000


def test_what_is_appended_comes_and_a_file_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = Tail(path)
    assert tail.more() == []
    path.write_bytes(b"one\n")
    assert tail.more() == [b"one\n"]
    begun_anew = [tail.begun_anew]
    with path.open("ab") as file:
        file.write(b"half")
    assert (tail.more(), tail.more()) == ([b"half"], [])
    path.write_bytes(b"new\n")
    assert tail.more() == [b"new\n"]
    assert [*begun_anew, tail.begun_anew] == [False, True]
    path.rename(tmp_path / "out.1")
    path.write_bytes(b"rotated and longer\n")
    assert tail.more() == [b"rotated and longer\n"]


def test_lines_of_a_rank_come_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b" 3: a\n12: b\nno label\n 3: hal")
    tail = Tail(path, of_rank(3, 3))
    assert tail.last(5) == [b" 3: a\n"]
    with path.open("ab") as file:
        file.write(b"f\n13: c\n 3: d")
    assert tail.more() == [b" 3: half\n"]
    assert tail.rest() == [b" 3: d"]
    assert tail.rest() == []


def test_labels_are_noticed() -> None:
    assert labelled([b"x\n", b"  7: y\n"])
    assert not labelled([b"x: 7\n", b"2026-01-01 07:00: no\n"])


def test_an_attempts_part_is_found(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(
        b"begin\ndeeplink: attempt 7.0.0: 4 ranks\na\ndeeplink: attempt 7.0.0 reports step 1\nb\n"
        b"deeplink: attempt 7.0.1: 4 ranks\nc\n"
    )
    assert attempts_in(path) == ["7.0.0", "7.0.1"]
    found = section(path, "7.0.0")
    assert found is not None
    assert Tail(path).last(2, begin=found[0], end=found[1]) == [
        b"deeplink: attempt 7.0.0 reports step 1\n",
        b"b\n",
    ]
    later = section(path, "7.0.1")
    assert later is not None
    assert Tail(path).last(9, begin=later[0], end=later[1]) == [b"deeplink: attempt 7.0.1: 4 ranks\n", b"c\n"]
    assert section(path, "7.0.2") is None
    (tmp_path / "empty").touch()
    assert (section(tmp_path / "empty", "7.0.0"), attempts_in(tmp_path / "empty")) == (None, [])
