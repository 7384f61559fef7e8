"""Which agents a reader asks, and whether one of them looks after its own node."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.membership import Tier, configured_members, node_name
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.rpc.tokens import Vouch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentsAsked:
    """The agents that answer a reader, in the order in which they are asked: one for each node's data."""

    node: NodeName  # the reader's
    here: Tier  # the standing agent of this node, at its socket
    members: Tier  # of its job, on nodes that have no standing one; or as configured
    standing: Tier  # of the standing cache beside which the job runs its own

    @property
    def is_tended(self) -> bool:
        """Whether an agent brings to this node what is missed."""
        return any(self.node in tier.names for tier in (self.here, self.members, self.standing) if tier.shown)

    @property
    def has_token(self) -> bool:
        """Whether some of them serve this reader whatever the source lets it read."""
        return any(tier.shown and isinstance(tier.shown, str) for tier in (self.members, self.standing))


def agents_asked(config: Config, vouch: Vouch | None) -> AgentsAsked:
    """Return whom a reader with this configuration asks.

    Who may not read a token shows who he is where MUNGE is, else does without those agents. So does a node whose
    own agent is the only one. Raises
    TokenError or ConfigError where it is missing or wrong otherwise.
    """
    node, members = node_name(config), Tier()
    here = Tier.of_node(config, node)
    everyone = configured_members(config)
    try:
        members = Tier.of(everyone, config.token_file, vouch)
    except DeepLinkError as problem:
        is_refused = isinstance(problem.__cause__, PermissionError)
        if not here.members and not is_refused and any(member.name != node for member in everyone):
            raise
        if not here.members:
            log.warning("the members are not asked: %s", problem)
    standing = Tier.of_site(config, listed=config.site_members, token_file=config.site_token_file, vouch=vouch)
    members = members.without(standing.tended(config, node))
    return AgentsAsked(node, here, members, standing.without(here.names))
