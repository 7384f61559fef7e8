"""Homes that can stall take root; without them nothing is mounted, frozen or taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deeplink.scheduler.sandbox import blueprint, scripts, storage
from deeplink.scheduler.sandbox.errors import NotFreezableError, NotRootError
from deeplink.scheduler.sandbox.layout import SandboxLayout
from deeplink.scheduler.sandbox.shape import Shape


def test_homes_of_their_own_take_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotRootError, match="--freezable"):
        blueprint.draw(SandboxLayout.of(tmp_path, "x"), Shape.of(1), blueprint.Options(freezable=True))


def test_what_lies_on_the_hosts_own_file_system_is_never_frozen(tmp_path: Path) -> None:
    layout = SandboxLayout.of(tmp_path, "x")
    layout.homes.mkdir(parents=True)
    (layout.homes / "file").touch()
    with pytest.raises(NotFreezableError) as refused:
        storage.freeze(layout)
    assert "--freezable" in refused.value.remedy
    storage.thaw(layout)
    storage.remove(layout)
    assert (layout.homes / "file").exists()


def test_each_machine_draws_a_boot_id_before_its_daemon_starts(tmp_path: Path) -> None:
    layout, shape = SandboxLayout.of(tmp_path, "x"), Shape.of(2)
    for machine in shape.machines:
        lines = scripts.machine(layout, shape, machine, (), "/bin").splitlines()
        drawn = next(place for place, line in enumerate(lines) if scripts.BOOT_ID in line)
        begun = next(place for place, line in enumerate(lines) if "the daemon did not start" in line)
        run = next(place for place, line in enumerate(lines) if line.endswith("run /run"))
        assert run < drawn < begun, "into the machine's own /run"
