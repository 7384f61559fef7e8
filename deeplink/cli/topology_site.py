"""The site's own description of its fabric, the setting `topology`, as launches and moves of shards go by it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.config import Config
    from deeplink.scheduler.launch.site import SiteFabric

log = logging.getLogger(__name__)


def site_of(config: Config) -> SiteFabric | None:
    """Return what the setting `topology` describes; None where it is not set, or cannot be read."""
    if config.topology is None:
        return None
    from deeplink.cli.topology_reading import read_all
    from deeplink.scheduler.launch.site import SiteFabric

    try:
        return SiteFabric.of(read_all([config.topology], None, (), ()).network, str(config.topology))
    except DeepLinkError as problem:
        # Slurm's word is worse, not wrong: no reason for every job of the site not to run.
        log.warning("the setting topology: %s", problem)
        return None
