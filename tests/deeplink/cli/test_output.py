"""What commands print: progress on a terminal and elsewhere, tables."""

from __future__ import annotations

import io
import sys

import pytest
from typing_extensions import override

from deeplink.cli import output
from deeplink.cli.output import ShownProgress, moment, print_table


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ShownProgress("copying", "samples", 2) as progress:
        progress.add(1, 1024)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(output, "_EVERY_S", 0.0)
        progress.add(1, 1024)
    said = capsys.readouterr().err
    assert said.startswith("copying 2 of 2 samples (")
    assert ", 2.0 KiB (" in said


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with ShownProgress("warming", "copies of shards") as progress:
        progress.at(1, 2, 10, 20)
        progress.at(2, 2, 20, 20)
    shown = terminal.getvalue()
    assert "warming" in shown
    assert "2 of 2 copies of shards" in shown


def test_columns_are_as_wide_as_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("node", "shards", ""), ("n0", "7", "a"), ("node-12", "12", "")], right=(1,))
    assert capsys.readouterr().out == "node     shards\nn0            7  a\nnode-12      12\n"


def test_no_moment_is_a_dash() -> None:
    assert (moment(0.0), moment(None, "never")) == ("-", "never")
