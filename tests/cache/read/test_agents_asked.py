"""A job's own agents are asked wherever the standing ones cannot be, and a node's own one is not there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.membership import agents_asked
from deeplink.rpc.tokens import RunTokens, new_token, write_token
from tests.cache.agents import config_below
from tests.cache.keepers import Keepers

if TYPE_CHECKING:
    from deeplink.core.config import Config

OF_JOB = "n0=127.0.0.1:1,n1=127.0.0.1:2,n2=127.0.0.1:3"
STANDING = "n0=127.0.0.1:11,n1=127.0.0.1:12"


def beside(folder: Path, node: str, *, is_there: bool = False, has_token: bool = False) -> Config:
    """Return a rank's configuration at a site whose nodes n0 and n1 have standing agents."""
    token, path = folder / "token", folder / "agent.sock"
    write_token(token, new_token())
    if is_there:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    site = {"site_members": STANDING, "site_token_file": token if has_token else folder / "nowhere"}
    return config_below(folder, node=node, members=OF_JOB, token_file=token, node_socket=path, **site)


@pytest.mark.parametrize(
    ("node", "is_there", "has_token", "names"),
    [
        ("n0", False, False, {"n0", "n1", "n2"}),
        ("n0", True, False, {"n2"}),
        ("n0", False, True, {"n2"}),
        ("n2", False, False, {"n2"}),
    ],
)
def test_whom_a_rank_asks(tmp_path: Path, node: str, is_there: bool, has_token: bool, names: set[str]) -> None:
    asked = agents_asked(beside(tmp_path, node, is_there=is_there, has_token=has_token), None)
    assert set(asked.members.names) == names
    assert asked.is_tended


@pytest.mark.parametrize("is_there", [True, False])
def test_whom_a_jobs_agent_takes_for_members(tmp_path: Path, is_there: bool) -> None:
    config = beside(tmp_path, "n0", is_there=is_there)
    jobs = Keepers(tmp_path / "job")
    site = {"members": STANDING, "token_file": tmp_path / "nowhere", "node_socket": config.node_socket}
    try:
        for name in ("n0", "n1", "n2"):
            jobs.start(name, token=RunTokens(jobs.token), **site)
        jobs.introduce()
        known = {member.name for member in jobs.running["n0"].keeper._fetcher.members}
    finally:
        jobs.stop_all()
    assert known == ({"n2"} if is_there else {"n0", "n1", "n2"})
