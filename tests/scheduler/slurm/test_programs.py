"""The stand-ins, and what is behind them."""

from __future__ import annotations

import os
from pathlib import Path

from deeplink.scheduler.slurm.command import make_stand_ins, real_program


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_real_program_is_found_behind_any_number_of_stand_ins(tmp_path: Path) -> None:
    make_stand_ins(tmp_path / "one")
    make_stand_ins(tmp_path / "two")
    real = program(tmp_path / "bin", "srun")
    path = os.pathsep.join(str(tmp_path / name) for name in ("one", "two", "nowhere", "bin"))
    assert real_program("srun", path) == str(real)
    assert real_program("torchrun", path) is None


def test_stand_ins_are_executable_and_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "shim"
    make_stand_ins(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(before) == {"srun", "torchrun"}
    assert all(os.access(path, os.X_OK) for path in folder.iterdir())
    make_stand_ins(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_older_stand_in_is_replaced(tmp_path: Path) -> None:
    old = program(tmp_path, "srun", "#!/bin/sh\nexec /gone/python -P -m deeplink shim srun\n")
    make_stand_ins(tmp_path)
    assert "/gone" not in old.read_text()
