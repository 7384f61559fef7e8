"""Homes that can stall take root; without them nothing is mounted, frozen or taken away."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.scheduler.testbed import lifecycle, namespaced, state
from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.shape import Shape
from deeplink.scheduler.testbed.state import SandboxLayout


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: names of sockets below it are bounded."""
    with tempfile.TemporaryDirectory(prefix="dl-") as made:
        yield Path(made)


def test_homes_of_their_own_take_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxError, match="--freezable"):
        lifecycle.draw(SandboxLayout.of(folder, "x"), Shape.of(1), lifecycle.Options(freezable=True))


def test_what_lies_on_the_hosts_own_file_system_is_never_frozen(folder: Path) -> None:
    layout = SandboxLayout.of(folder, "x")
    layout.homes.mkdir(parents=True)
    (layout.homes / "file").touch()
    with pytest.raises(SandboxError, match=r"nobody may freeze") as refused:
        state.freeze(layout)
    assert "--freezable" in refused.value.remedy
    state.thaw(layout)
    state.remove_storage(layout)
    assert (layout.homes / "file").exists()


def test_each_machine_draws_a_boot_id_before_its_daemon_starts(folder: Path) -> None:
    layout, shape = SandboxLayout.of(folder, "x"), Shape.of(2)
    for machine in shape.machines:
        lines = namespaced.machine_script(layout, shape, machine, (), "/bin").splitlines()
        drawn = next(place for place, line in enumerate(lines) if namespaced.BOOT_ID in line)
        begun = next(place for place, line in enumerate(lines) if "the daemon did not start" in line)
        run = next(place for place, line in enumerate(lines) if line.endswith("run /run"))
        assert run < drawn < begun, "into the machine's own /run"
