"""Which agents a reader asks, and whether one of them looks after its own node."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.membership import configured_members, members_token, node_name, site_members
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Member
from deeplink.rpc.plain.local_socket import UNIX
from deeplink.rpc.tokens import read_token

if TYPE_CHECKING:
    from deeplink.core.config import Config
    from deeplink.core.types import NodeName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentsAsked:
    """The agents that answer a reader, by what it shows them."""

    node: NodeName  # the reader's
    members: tuple[Member, ...]  # of its job, or as configured
    token: str  # theirs
    standing: tuple[Member, ...]  # of the standing cache beside which the job runs its own
    standing_token: str
    here: Member | None  # the standing agent of this node, at its socket

    @property
    def is_tended(self) -> bool:
        """Whether an agent brings to this node what is missed."""
        return self.here is not None or any(one.name == self.node for one in (*self.members, *self.standing))


def agents_asked(config: Config) -> AgentsAsked:
    """Return whom a reader with this configuration asks.

    Who may not read a token does without those agents, and so does a node whose own agent is the only one. Raises
    TokenError or ConfigError where it is missing or wrong otherwise.
    """
    node = node_name(config)
    here = _node_agent(config, node)
    everyone = configured_members(config)
    members, token = everyone, ""
    try:
        token = members_token(config, everyone)
    except DeepLinkError as problem:
        is_refused = isinstance(problem.__cause__, PermissionError)
        if here is None and not is_refused and any(member.name != node for member in everyone):
            raise
        if here is None:
            log.warning("the members are not asked: %s", problem)
        members = ()
    standing, standing_token = _standing(config, has_agent=here is not None)
    return AgentsAsked(node, members, token, standing, standing_token, here)


def _node_agent(config: Config, node: NodeName) -> Member | None:
    """Return the standing agent of this node, which answers every user at its socket; None where none does."""
    path = config.node_socket
    try:
        return Member(node, f"{UNIX}{path}") if path is not None and path.is_socket() else None
    except OSError:
        return None


def _standing(config: Config, *, has_agent: bool) -> tuple[tuple[Member, ...], str]:
    """Return the members of the standing cache and their token; a job goes on without them."""
    file = config.site_token_file
    try:
        members = site_members(config)
        return (members, read_token(file)) if members and file is not None else ((), "")
    except DeepLinkError as problem:
        (log.info if has_agent else log.warning)("the standing cache is not asked: %s", problem)
        return (), ""
