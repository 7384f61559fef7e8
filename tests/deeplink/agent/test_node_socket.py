"""The Unix socket at which a standing agent serves the users of its node."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from deeplink.agent.agent import Agent, AgentSettings
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.core.config import Config
from deeplink.core.types import NodeName
from deeplink.rpc.listeners import ListenError
from deeplink.rpc.tokens import new_token
from tests.cache.agents import small_files, write_tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run").mkdir(mode=0o755)
    return Config(
        catalog=tmp_path / "catalog",
        store=tmp_path / "store",
        state=tmp_path / "state",
        node_socket=tmp_path / "run" / "agent.sock",
        read_deadline_ms=20_000,
        health=False,
    )


@contextmanager
def standing(config: Config, *, of_job: bool = False) -> Iterator[None]:
    settings = AgentSettings(
        node=NodeName("n0"),
        bind="127.0.0.1:0",
        token=new_token(),
        store=config.store,
        config=config,
        of_job=of_job,
    )
    agent = Agent(settings)
    config.state.mkdir(exist_ok=True)
    agent.start(config.state / "token")
    try:
        yield
    finally:
        agent.stop()


def test_a_reader_without_a_token_is_served_by_the_standing_agent_of_its_node(
    tmp_path: Path, config: Config
) -> None:
    files = small_files(20)
    pack(str(write_tree(tmp_path / "source", files)), "digits", config=config)
    elsewhere = dataclasses.replace(config, store=tmp_path / "own", fill_on_miss=False)
    with standing(config), Reader.open("digits", config=elsewhere) as reader:
        assert [bytes(view) for view in reader.read(range(len(files)))] == [files[key] for key in sorted(files)]
        assert reader.stats().local_samples == len(files)
    assert config.node_socket is not None
    assert not config.node_socket.exists()


def test_a_jobs_agent_leaves_the_socket_alone(config: Config) -> None:
    assert config.node_socket is not None
    with standing(config, of_job=True):
        assert not config.node_socket.exists()


def test_without_its_folder_the_agent_serves_members_alone_and_says_so(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert config.node_socket is not None
    config.node_socket.parent.rmdir()
    with standing(config):
        assert "does not serve at node_socket" in caplog.text


def test_a_folder_that_others_may_write_to_is_refused(config: Config) -> None:
    assert config.node_socket is not None
    config.node_socket.parent.chmod(0o777)
    with pytest.raises(ListenError, match=r"others may write to .* \(mode 0777\)") as refused, standing(config):
        pass
    assert "chmod go-w" in refused.value.remedy
