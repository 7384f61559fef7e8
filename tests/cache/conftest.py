"""A folder of small files, and agents to place them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cache.agents import Agents, config_below, small_files, write_tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.core.config import Config


@pytest.fixture
def files() -> dict[str, bytes]:
    return small_files()


@pytest.fixture
def source(tmp_path: Path, files: dict[str, bytes]) -> Path:
    return write_tree(tmp_path / "source", files)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_below(tmp_path)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    running = Agents(tmp_path)
    for name in ("n0", "n1", "n2"):
        running.start(name)
    yield running
    running.stop_all()
