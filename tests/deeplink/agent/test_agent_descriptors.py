"""Daemons allow themselves more descriptors than a shell hands on: their bounds are shares of them."""

from __future__ import annotations

import resource
import threading
from typing import TYPE_CHECKING

import pytest

from deeplink.agent.agent import Agent, AgentSettings
from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.command import CommandMissingError
from deeplink.scheduler.watch.service import WatchSettings, watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def allowed() -> Iterator[tuple[int, int]]:
    """What a daemon that was started from a shell is to allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield min(hard, 65_536), hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_agent_allows_itself_more(tmp_path: Path, allowed: tuple[int, int]) -> None:
    Agent(AgentSettings(node=NodeName("n0"), bind="127.0.0.1:0", token="secret", store=tmp_path / "store"))  # noqa: S106
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == allowed


def test_a_watchdog_allows_itself_more(
    tmp_path: Path, allowed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm it ends at once
    settings = WatchSettings(journal=tmp_path / "journal", bind="127.0.0.1:0", secret="secret")  # noqa: S106
    with pytest.raises(CommandMissingError), watching(settings, print, threading.Event()):
        pass
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == allowed
