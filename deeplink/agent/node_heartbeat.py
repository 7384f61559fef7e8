"""A standing agent's client of rpc Watch.Attend: reports the node's health to the watchdog.

What began and ended while the watchdog was away is kept, within bounds, and reported when it is back.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from deeplink.core import metrics
from deeplink.core.config import ConfigError
from deeplink.core.timeouts import call_with_timeout
from deeplink.scheduler.liveness.heartbeats import MOST_FINDINGS, finding_to_wire
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient
from deeplink.scheduler.node.host_checks import Compared, Comparison
from deeplink.scheduler.node.settings import read_switch, switch_paths
from deeplink.scheduler.node.watching import CheckPaths, HealthWatch, boot_id_of, checks_of
from deeplink.v1 import watch_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.core.finding import Finding
    from deeplink.scheduler.node.watching import Ended, Key
    from deeplink.v1 import common_pb2, node_pb2

log = logging.getLogger(__name__)

ATTEND_S = 5.0
"""Time between two reports to the watchdog, and before the next try after a failure."""
SOONEST_S = 1.0
"""Changes are reported no more often than this."""
CALL_S = 2.0
STOP_S = 0.5
MOST_NOW = 64
_PREPARE_S = 5.0
"""How long the checks may take to be put together: their folder, or one on PATH, may hang."""


@dataclass(slots=True)
class ReportedFindings:
    """The findings the watchdog knows of; of the others, those that are over are still to be reported. Pure."""

    keys: frozenset[Key] = frozenset()  # reported, and not over at that time
    upto: int = 0  # number of the last ended finding that it need not hear of any more

    def missed(self, ended: Sequence[Ended], room: int) -> list[Finding]:
        """Return what began and ended unreported, the oldest first, the newest `room`."""
        found = [one.finding for one in ended if one.number > self.upto and one.key not in self.keys]
        return found[-room:] if room else []

    def delivered(self, found: Mapping[Key, Finding], ended: Sequence[Ended]) -> None:
        """Note that these were reported."""
        self.keys = frozenset(found)
        self.upto = max([self.upto, *(one.number for one in ended)])


@dataclass(slots=True, kw_only=True)
class Attending:
    """Reports a node every `pause_s`, and soon after `news`, from `start` to `stop`; blocks no caller."""

    node: str  # its name
    topology_address: str  # SLURM_TOPOLOGY_ADDR; empty outside of Slurm
    boot_id: str  # of the kernel; empty where unknown
    store_status: Callable[[], node_pb2.StoreStatus]  # returns what the store holds; quick
    health: HealthWatch | None  # its checks; None where it has none
    line: WatchdogClient
    clock: Clock
    compared: Compared = field(
        default_factory=Compared
    )  # where it is left how far this clock is from the watchdog's
    pause_s: float = ATTEND_S
    _told: ReportedFindings = field(default_factory=ReportedFindings)
    _news: threading.Event = field(default_factory=threading.Event)
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _began: float = 0.0
    _trouble: str = ""

    def start(self) -> None:
        """Begin."""
        self._began = self.clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="deeplink-attending", daemon=True)
        self._thread.start()

    def news(self) -> None:
        """Report soon; does not wait."""
        self._news.set()

    def stop(self) -> None:
        """Return once nothing is reported any more; a call under way is given up."""
        self._ending.set()
        self._news.set()
        self.line.close()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._news.clear()
            self._attend()
            if not self._ending.wait(min(SOONEST_S, self.pause_s)):
                self._news.wait(max(0.0, self.pause_s - SOONEST_S))

    def _attend(self) -> None:
        found, ended = self.health.news(self._told.upto) if self.health is not None else ({}, [])
        now = dict(list(found.items())[:MOST_NOW])
        asked_at = self.clock.monotonic()
        try:
            request = self._request(now, self._told.missed(ended, MOST_FINDINGS - len(now)))
            reply = self.line.call(lambda stub: stub.Attend(request, timeout=CALL_S))
        except Exception as problem:  # noqa: BLE001 - whatever is wrong with the far end, or the store, it is tried again
            self._troubled(problem)
            return
        self._compare(reply.unix, asked_at)
        self._told.delivered(found, ended)
        metrics.HEALTH_ATTENDED.set(self.clock.unix())
        trouble = "" if reply.known else f"Slurm knows no node {self.node}: is `--name` or `node` right?"
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        elif self._trouble and not trouble:
            log.warning("this node is reported to the watchdog again")
        self._trouble = trouble

    def _compare(self, their_unix: float, asked_at: float) -> None:
        if not their_unix:
            return  # an older watchdog, or one that does not know this node
        now = self.clock.monotonic()
        half_s = (now - asked_at) / 2
        self.compared.newest = Comparison(ahead_s=self.clock.unix() - half_s - their_unix, within_s=half_s, at=now)

    def _request(self, found: Mapping[Key, Finding], missed: Sequence[Finding]) -> watch_pb2.AttendRequest:
        store = self.store_status()
        return watch_pb2.AttendRequest(
            node=self.node,
            topology_address=self.topology_address,
            boot_id=self.boot_id,
            uptime_s=self.clock.monotonic() - self._began,
            unix=self.clock.unix(),
            health=map(finding_to_wire, found.values()),
            missed=map(finding_to_wire, missed),
            shards=store.shards,
            shard_bytes=store.bytes,
            verified_bytes=store.verified_bytes,
            free_bytes=store.free_bytes,
        )

    def _troubled(self, problem: Exception) -> None:
        if self._ending.is_set():
            return  # we gave the call up
        said = problem.details() if isinstance(problem, grpc.RpcError) else problem
        if not self._trouble:
            log.warning("this node cannot be reported to the watchdog: %s", said)
        self._trouble = str(said) or repr(problem)


class NodeHealth:
    """A node's health as its agent tells it, from `start` to `stop`.

    Attributes:
        boot_id: names this boot of the kernel; empty where unknown.
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
        self._attending = Attending(
            node=self._node,
            topology_address=topology_address,
            boot_id=self.boot_id,
            store_status=store_status,
            health=self._watch,
            line=WatchdogClient(config.watch, config.watch_token_file, self._node),
            clock=self._clock,
            compared=self._compared,
        )
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
