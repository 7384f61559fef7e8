from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from deeplink.agent import Agent, AgentSettings
from deeplink.types import NodeName

if TYPE_CHECKING:
    from pathlib import Path


def test_an_agent_allows_itself_more_descriptors_than_a_shell_hands_on(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        Agent(AgentSettings(node=NodeName("n0"), bind="127.0.0.1:0", token="secret", store=tmp_path / "store"))  # noqa: S106
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
