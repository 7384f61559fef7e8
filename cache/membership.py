"""Who this node is among the members, and who the others are, as the configuration says."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from deeplink.config import Config, ConfigError
from deeplink.tokens import read_token
from deeplink.types import Member, NodeName, parse_members

if TYPE_CHECKING:
    from collections.abc import Sequence


def node_name(config: Config) -> NodeName:
    """Return this node's member name: the configured one, Slurm's, or the host's."""
    return NodeName(config.node or os.environ.get("SLURMD_NODENAME", "") or socket.gethostname())


def configured_members(config: Config) -> tuple[Member, ...]:
    """Return all members, this node among them if it is one.

    Raises:
        ConfigError: the list cannot be read.
    """
    try:
        return parse_members(config.members)
    except ValueError as problem:
        raise ConfigError("configuration", "members", str(problem)) from problem


def other_members(config: Config) -> tuple[Member, ...]:
    """Return the members but this node.

    Raises:
        ConfigError: the list cannot be read.
    """
    own = node_name(config)
    return tuple(member for member in configured_members(config) if member.name != own)


def members_token(config: Config, members: Sequence[Member]) -> str:
    """Return the token that calls to `members` carry; empty where there are none.

    Raises:
        ConfigError: there are members and no token file is named.
        TokenFileError: the file cannot be used.
    """
    if not members:
        return ""
    if config.token_file is None:
        problem = "members are configured, and no file with their token"
        raise ConfigError(
            "configuration", "token_file", problem, "Let DEEPLINK_TOKEN_FILE name the agents' token."
        )
    return read_token(config.token_file)
