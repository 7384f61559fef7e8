"""Agents for a benchmark: real ones, gone with it, and one that does not come up is said at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.agents import agents
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow


def test_each_node_has_an_agent_for_so_long(tmp_path: Path) -> None:
    with agents(tmp_path, ["n0", "n1"]) as env:
        members = dict(member.split("=") for member in env["DEEPLINK_MEMBERS"].split(","))
        assert members.keys() == {"n0", "n1"}
        assert env["DEEPLINK_AGENT"] == members["n0"]
        assert Path(env["DEEPLINK_TOKEN_FILE"]).exists()
        where = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in members.values())]
        for one in where:
            socket.create_connection(one, timeout=LIMIT_S).close()
    for one in where:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(one, timeout=LIMIT_S)


def test_one_that_does_not_come_up_is_named(tmp_path: Path) -> None:
    (tmp_path / "n0").write_text("no folder", encoding="utf-8")
    with pytest.raises(RuntimeError, match="n0"), agents(tmp_path, ["n0"]):
        pytest.fail("it came up")
