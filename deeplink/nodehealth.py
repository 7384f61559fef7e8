"""What an agent does for its node's health: it runs the checks, and where it stands alone tells the watchdog."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.call_with_timeout import call_with_timeout
from deeplink.config import ConfigError
from deeplink.node_heartbeat import Attendee, Attending, Deliver
from deeplink.scheduler.health.builtin import CheckPaths, boot_id_of, checks_of
from deeplink.scheduler.health.clock import Compared
from deeplink.scheduler.health.switch import read_switch, switch_paths
from deeplink.scheduler.health.watching import HealthWatch
from deeplink.scheduler.watch.messages import finding_to_wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.v1 import common_pb2, node_pb2

log = logging.getLogger(__name__)

_PREPARE_S = 5.0
"""How long the checks may take to be put together: their folder, or one on PATH, may hang."""


class NodeHealth:
    """A node's health as its agent tells it, from `start` to `stop`.

    Attributes:
        boot_id: names this boot of the kernel; empty where unknown.

    Raises:
        ConfigError: the settings of the checks cannot be used; a job's agent goes on without checks instead.
    """

    def __init__(self, config: Config | None, node: str, store: Path, clock: Clock, *, of_job: bool) -> None:
        self._config, self._node, self._clock = config, node, clock
        self._of_job = of_job
        self._attending: Attending | None = None
        self.boot_id = boot_id_of(config) if config is not None else ""
        self._compared = Compared()
        place = CheckPaths(node=node, store=store, of_job=of_job, compared=self._compared)
        self._watch = self._prepared(config, place) if config is not None and config.health else None

    def findings(self) -> list[common_pb2.Finding]:
        """Return what is wrong now, the gravest first; at once."""
        return list(map(finding_to_wire, self._watch.findings())) if self._watch is not None else []

    def start(self, topology_address: str, store_status: Callable[[], node_pb2.StoreStatus]) -> None:
        """Begin to look, and to tell."""
        if self._watch is not None:
            self._watch.start()
        config = self._config
        if self._of_job or config is None or not config.watch:
            return
        who = Attendee(
            node=self._node,
            topology_address=topology_address,
            boot_id=self.boot_id,
            store_status=store_status,
            health=self._watch,
            compared=self._compared,
        )
        deliver = Deliver(config.watch, config.watch_token_file, self._node)
        self._attending = Attending(who, deliver, self._clock, close=deliver.close)
        if self._watch is not None:
            self._watch.changed = self._attending.news
        self._attending.start()

    def stop(self) -> None:
        """End both, within some seconds."""
        if self._attending is not None:
            self._attending.stop()
        if self._watch is not None:
            self._watch.stop()

    def _prepared(self, config: Config, place: CheckPaths) -> HealthWatch | None:
        try:
            checks = call_with_timeout(lambda: checks_of(config, place, self._clock), _PREPARE_S)
        except TimeoutError:
            log.warning("no health checks: a folder of theirs, or one on PATH, does not answer")
            return None
        except ConfigError as problem:
            if not self._of_job:
                raise
            log.warning("no health checks: %s", problem)
            return None
        paths = switch_paths(config)
        return HealthWatch(checks, switch=lambda: read_switch(paths), clock=self._clock, spread=place.node)
