"""Decisions are written as whole lines and come back as they were."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.decision import (
    NAME,
    Ask,
    Decision,
    HintKind,
    NodeChoice,
    Recorded,
    Why,
    append,
    job_folder,
    read,
)

names = st.lists(st.text("nr0123456789-", min_size=1).map(NodeName)).map(tuple)
words = st.text(max_size=30)
asks = st.builds(
    Ask,
    nodes=st.integers(0, 9),
    partition=words,
    features=st.lists(words).map(tuple),
    excluded=names,
    data=st.lists(words).map(tuple),
    patience_s=st.none() | st.integers(0, 99),
    profile=words,
)
options = st.builds(
    NodeChoice,
    nodes=names,
    cost=st.floats(0, 9),
    crossings=st.integers(0, 9),
    leaves=st.integers(1, 9),
    percent_local=st.floats(0, 100),
    step_s=st.none() | st.floats(0, 9),
)
decisions = st.builds(
    Decision,
    kind=st.sampled_from(HintKind),
    why=st.sampled_from(Why),
    words=words,
    nodes=names,
    candidates=st.lists(options, max_size=3).map(tuple),
    expected=names,
    notes=st.lists(words).map(tuple),
    cost=words,
    own=st.none() | options,
    predicted=st.lists(words).map(tuple),
)
records = st.builds(
    Recorded,
    unix=st.floats(0, 1e10),
    by=st.sampled_from(["sbatch", "plan"]),
    ask=asks,
    decision=decisions,
    done=st.lists(words).map(tuple),
)
PLAIN = Recorded(
    unix=1.0, by="sbatch", ask=Ask(nodes=2), decision=Decision(kind=HintKind.NOTHING, why=Why.BUSY, words="x")
)


@given(records)
def test_what_is_written_is_what_is_read(recorded: Recorded) -> None:
    assert Recorded.parse(json.loads(json.dumps(recorded.document()))) == recorded


def test_lines_are_added_and_bad_ones_left_out(tmp_path: Path) -> None:
    folder = job_folder(tmp_path, 7)
    assert read(folder) == []
    append(folder, PLAIN)
    with (folder / NAME).open("a") as file:
        file.write('{"event": "decision", "unix"\n{"unix": 1, "by": "later", "ask": {"colour": 1}}\n[]\n')
    append(folder, PLAIN)
    assert read(folder) == [PLAIN, PLAIN]


def test_a_name_that_is_no_text_is_written(tmp_path: Path) -> None:
    odd = Recorded(
        unix=1.0, by="sbatch", ask=Ask(), decision=PLAIN.decision, done=("sbatch", os.fsdecode(b"\xff"))
    )
    append(tmp_path, odd)
    assert len((tmp_path / NAME).read_bytes().splitlines()) == 1
    assert read(tmp_path) == [odd]


@pytest.mark.parametrize(
    "document", [{}, {"unix": "x"}, {"ask": 1, "decision": 2, "unix": 0, "by": "", "done": []}]
)
def test_what_is_no_decision_is_said(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no decision"):
        Recorded.parse(document)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    for attempt in (read, lambda folder: append(folder, PLAIN)):
        with pytest.raises(OSError, match=r"not a file|No such device"):
            attempt(tmp_path)


def test_a_line_of_endless_depth_is_left_out(tmp_path: Path) -> None:
    append(tmp_path, PLAIN)
    with (tmp_path / NAME).open("a") as file:
        file.write("[" * 1_000_000 + "\n")
    assert read(tmp_path) == [PLAIN]
