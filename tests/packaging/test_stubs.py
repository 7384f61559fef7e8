"""The committed stubs are what proto/ generates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


def proto_check(root: Path) -> subprocess.CompletedProcess[str]:
    """Run `make proto-check` in a copy of the tree's wire parts, with this tree's tools."""
    return subprocess.run(
        ["make", "--no-print-directory", "proto-check", f"BIN={ROOT / '.venv' / 'bin'}"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
def test_stubs_are_fresh_and_a_stale_one_is_seen(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(ROOT / "deeplink" / "v1", tmp_path / "deeplink" / "v1")
    done = proto_check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    wire = tmp_path / "proto" / "deeplink" / "v1" / "common.proto"
    wire.write_text(wire.read_text() + "\nmessage AddedAndNotGenerated {}\n")
    done = proto_check(tmp_path)
    assert done.returncode != 0
    assert "stubs are stale" in done.stderr
