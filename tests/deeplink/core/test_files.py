"""Files that a verb writes or is told of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deeplink.core import publish
from deeplink.core.publish import standard_output_file


def test_the_file_that_standard_output_goes_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "slurm-7 ü.out"
    with out.open("w") as file:
        monkeypatch.setattr(publish, "STANDARD_OUTPUT", file.fileno())
        assert standard_output_file() == str(out)
        out.unlink()
        assert standard_output_file() == ""


def test_a_pipe_or_nothing_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(publish, "STANDARD_OUTPUT", writing)
    assert standard_output_file() == ""
    os.close(reading)
    os.close(writing)
    assert standard_output_file() == ""
