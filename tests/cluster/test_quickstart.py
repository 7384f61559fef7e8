"""docs/quickstart.md, followed literally: every line of every block, by the shell, in its order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.demo.story import has_torch
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
SETUP = "make venv slurm"  # whoever runs this test has done it


def blocks(page: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs" / "quickstart.md").read_text().splitlines()) <= 60


@pytest.mark.cluster
def test_the_quickstart_works_as_it_stands() -> None:
    first, *rest = blocks((ROOT / "docs" / "quickstart.md").read_text())
    assert first.splitlines()[0] == SETUP
    script = first.replace(SETUP, f"[ -x .venv/bin/deeplink ] || PATH={Path(sys.executable).parent}:$PATH")
    script = "set -eux\n" + script + "".join(rest)
    if not has_torch():
        script = script.replace("deeplink.demo.train ", "deeplink.demo.train_light ")
    try:
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=3 * LIMIT_S, check=False, cwd=ROOT
        )
    finally:
        argv = [sys.executable, "-m", "deeplink", "sandbox", "down", "--name", "quick"]
        subprocess.run(argv, capture_output=True, timeout=LIMIT_S, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting the ranks again" in done.stdout, said
    assert '"accuracy": 0.9' in done.stdout, said
    (row,) = [line for line in done.stdout.splitlines() if "node-silent" in line]
    assert "n5" in row
    assert "recovered" in row
