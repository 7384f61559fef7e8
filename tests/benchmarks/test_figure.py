"""The README's plot is that of the figures beside it."""

from __future__ import annotations

import pytest

from benchmarks.figure import PAGE, PLOT, NoRowError, plot, row


def test_the_plot_is_drawn_from_the_page() -> None:
    assert PLOT.read_text() == plot(PAGE.read_text()) + "\n", "python -m benchmarks.figure"


def test_a_row_that_is_not_there_is_an_error() -> None:
    assert row("| a: b | 3.2 s | 3.0 .. 3.4 | 5 |", "a: b").value == 3.2
    with pytest.raises(NoRowError):
        row("| a: b | 3.2 s | 3.0 .. 3.4 | 5 |", "a: c")
