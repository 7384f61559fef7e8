"""Times, sizes and counts as Slurm writes them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.placement.hint import ask
from deeplink.scheduler.placement.hint.ask import FOREVER_S, mebibytes, node_count, seconds_of, time_text
from deeplink.scheduler.slurm.states import SlurmValueError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("10:5", 605),
        ("1:0:1", 3601),
        ("2-0", 172800),
        ("1-1:1", 90060),
        ("0-0:0:7", 7),
        ("infinite", FOREVER_S),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@given(st.integers(0, 10**6))
def test_a_time_that_is_written_is_read(seconds: int) -> None:
    assert seconds_of(time_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("seconds_of", "soon"),
        ("seconds_of", "1:2:3:4"),
        ("seconds_of", ""),
        ("mebibytes", "4X"),
        ("mebibytes", "-1"),
        ("node_count", "few"),
        ("node_count", "1-2-3"),
        ("node_count", ""),
        ("node_count", "1,2"),
        ("count_of", "1.5"),
        ("count_of", "²"),
    ],
)
def test_what_is_none_is_said(reader: str, text: str) -> None:
    with pytest.raises(SlurmValueError, match=r"is no"):
        getattr(ask, reader)(text)


@pytest.mark.parametrize("reader", ["seconds_of", "mebibytes", "count_of", "node_count"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=20) | st.text("0123456789-:gpkMG,=", max_size=12))
def test_any_text_is_an_amount_or_an_error(reader: str, text: str) -> None:
    with contextlib.suppress(SlurmValueError):
        getattr(ask, reader)(text)


@pytest.mark.parametrize(
    ("text", "nodes"), [("3", 3), (" 3 ", 3), ("3-3", 3), ("3-", 0), ("2-5", 0), ("1k", 1024), ("2k-2K", 2048)]
)
def test_node_counts(text: str, nodes: int) -> None:
    assert node_count(text) == nodes


def test_memory_is_never_less_than_said() -> None:
    assert [mebibytes(text) for text in ("1", "1K", "1025K", "2G", "1T", "4GB")] == [1, 1, 2, 2048, 1 << 20, 4096]
