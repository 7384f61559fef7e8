"""A standing agent's client of rpc Watch.Attend: reports the node's health to the watchdog.

What began and ended while the watchdog was away is kept, within bounds, and told when it is back.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from deeplink import metrics
from deeplink.scheduler.health.clock import Compared, Comparison
from deeplink.scheduler.watch.messages import MOST_FINDINGS, finding_to_wire
from deeplink.scheduler.watch.watchdog_client import WatchdogClient
from deeplink.v1 import watch_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.health.watching import Ended, HealthWatch, Key
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.v1 import node_pb2

log = logging.getLogger(__name__)

ATTEND_S = 5.0
"""How often the watchdog is told, and how long it is before it is tried again."""
SOONEST_S = 1.0
"""Changes are told no more often than this."""
CALL_S = 2.0
STOP_S = 0.5
MOST_NOW = 64


class Deliver:
    """Reports a node to a watchdog, as `WatchdogClient` does.

    Raises:
        grpc.RpcError: the watchdog was not reached, or refused.
        DeepLinkError: it cannot be proved who reports.
    """

    def __init__(self, address: str, token_file: Path | None, node: str) -> None:
        self._line = WatchdogClient(address, token_file, node)

    def __call__(self, request: watch_pb2.AttendRequest) -> watch_pb2.AttendReply:
        """Return its answer."""
        reply: watch_pb2.AttendReply = self._line.call(lambda stub: stub.Attend(request, timeout=CALL_S))
        return reply

    def close(self) -> None:
        """Connect no more until the next call."""
        self._line.close()


@dataclass(slots=True)
class ReportedFindings:
    """What the watchdog has heard of: of the rest, what is over is still to be told. Pure.

    Attributes:
        keys: the findings that it was told of and that lasted when it was.
        upto: number of the last ended finding that it need not hear of any more.
    """

    keys: frozenset[Key] = frozenset()
    upto: int = 0

    def missed(self, ended: Sequence[Ended], room: int) -> list[HealthFinding]:
        """Return what began and ended without its hearing of it, the oldest first, the newest `room`."""
        found = [one.finding for one in ended if one.number > self.upto and one.key not in self.keys]
        return found[-room:] if room else []

    def delivered(self, found: Mapping[Key, HealthFinding], ended: Sequence[Ended]) -> None:
        """Take note that it was told of these."""
        self.keys = frozenset(found)
        self.upto = max([self.upto, *(one.number for one in ended)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendee:
    """Who attends.

    Attributes:
        node: this node's name.
        topology_address: SLURM_TOPOLOGY_ADDR; empty outside of Slurm.
        boot_id: of the kernel; empty where unknown.
        store_status: returns what the store holds; quick.
        health: its checks; None where it has none.
        compared: where it is left how far this clock is from the watchdog's.
    """

    node: str
    topology_address: str
    boot_id: str
    store_status: Callable[[], node_pb2.StoreStatus]
    health: HealthWatch | None
    compared: Compared = field(default_factory=Compared)


@dataclass(slots=True)
class Attending:
    """Tells the watchdog every `ATTEND_S`, and soon after `news`, from `start` to `stop`; holds up nobody.

    Attributes:
        deliver: tells it, in bounded time; raises what it likes. What it holds is given up by `close`.
        pause_s: how often.
    """

    who: Attendee
    deliver: Callable[[watch_pb2.AttendRequest], watch_pb2.AttendReply]
    clock: Clock
    pause_s: float = ATTEND_S
    close: Callable[[], None] = lambda: None
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
        """Tell it soon; does not wait."""
        self._news.set()

    def stop(self) -> None:
        """Return once it is told no more; a call under way is given up."""
        self._ending.set()
        self._news.set()
        self.close()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._news.clear()
            self._attend()
            if not self._ending.wait(min(SOONEST_S, self.pause_s)):
                self._news.wait(max(0.0, self.pause_s - SOONEST_S))

    def _attend(self) -> None:
        health = self.who.health
        found, ended = health.news(self._told.upto) if health is not None else ({}, [])
        now = dict(list(found.items())[:MOST_NOW])
        asked_at = self.clock.monotonic()
        try:
            reply = self.deliver(self._request(now, self._told.missed(ended, MOST_FINDINGS - len(now))))
        except Exception as problem:  # noqa: BLE001 - whatever is wrong with the far end, or the store, it is tried again
            self._troubled(problem)
            return
        self._compare(reply.unix, asked_at)
        self._told.delivered(found, ended)
        metrics.HEALTH_ATTENDED.set(self.clock.unix())
        trouble = "" if reply.known else f"Slurm knows no node {self.who.node}: is `--name` or `node` right?"
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        elif self._trouble and not trouble:
            log.warning("the watchdog hears this node again")
        self._trouble = trouble

    def _compare(self, their_unix: float, asked_at: float) -> None:
        if not their_unix:
            return  # an older watchdog, or one that does not know this node
        now = self.clock.monotonic()
        half_s = (now - asked_at) / 2
        self.who.compared.newest = Comparison(
            ahead_s=self.clock.unix() - half_s - their_unix, within_s=half_s, at=now
        )

    def _request(
        self, found: Mapping[Key, HealthFinding], missed: Sequence[HealthFinding]
    ) -> watch_pb2.AttendRequest:
        store = self.who.store_status()
        return watch_pb2.AttendRequest(
            node=self.who.node,
            topology_address=self.who.topology_address,
            boot_id=self.who.boot_id,
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
            log.warning("the watchdog is not told of this node: %s", said)
        self._trouble = str(said) or repr(problem)
