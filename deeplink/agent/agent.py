"""The node agent: one server per node for its shards, its ranks' progress and its heartbeat.

The same program runs in two ways. A job starts one per node, with the run's secret, and it ends with the job
(`deeplink node --job`); or it stands as a service of the node. Either way every call needs the token.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import deeplink
from deeplink.agent import checkpoint_replicas
from deeplink.agent.launcher_watch import LauncherWatch
from deeplink.agent.node_heartbeat import NodeHealth
from deeplink.cache.errors import StoreError
from deeplink.cache.replicate.fill import MOST_CALLS
from deeplink.cache.replicate.keeper import Keeper
from deeplink.cache.serve.server import MOST_READS
from deeplink.cache.store.identity import shared_with, unmark
from deeplink.cache.store.store import Store
from deeplink.core import metrics
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.metrics_server import serve_metrics
from deeplink.core.store_place import shared_store
from deeplink.core.timeouts import CachedProbe
from deeplink.rpc.acceptor import Farewell
from deeplink.rpc.channel import allow_descriptors, attempt_to_wire
from deeplink.rpc.daemon import is_loopback, split_bind
from deeplink.rpc.grpc_server import WORKERS, BoundServer, bound_server
from deeplink.rpc.listeners import ListenError
from deeplink.rpc.resolving import links, primary_address, routes
from deeplink.rpc.tokens import accepted
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.node import servicer as node_service
from deeplink.scheduler.node.rank_slots import RankSlots
from deeplink.scheduler.node.stacks import Stacks
from deeplink.scheduler.slurm import munge
from deeplink.scheduler.slurm.client import Slurm
from deeplink.v1 import common_pb2, keep_pb2, node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import grpc

    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.rpc.plain.local_socket import LocalListener
    from deeplink.rpc.tokens import RunTokens

log = logging.getLogger(__name__)

ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
STOP_GRACE_S = 0.5
"""How long calls in flight may still run once the agent is asked to end."""
_STATUS_SHARE = 20
"""The store is not looked at for so many times as long as the last look took: thousands of shards take a while."""
STATUS_KEPT_S = 0.5
"""The store is looked at no more often than this, however often the agent is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """An agent's settings.

    Only an agent of a job serves and copies checkpoints (`keeps_copies`): the files are its user's.
    """

    node: NodeName  # this node's member name
    bind: str  # `host:port` to listen on; port 0 picks a free one
    token: str | RunTokens  # what every call must carry; of an agent of a run, the run's
    store: Path  # folder of the shards on this node's SSD; made when it is not there
    store_why: str = ""  # what chose it
    metrics_bind: str = ""  # `host:port` to serve Prometheus metrics on; empty for none
    metrics_token: str = ""  # who asks for them must show it; empty: nobody need
    topology_address: str = ""  # SLURM_TOPOLOGY_ADDR of this node; empty outside of Slurm
    config: Config | None = None  # catalog, members, budget, rates; None: it only keeps what it is given
    keeps_copies: bool = False
    of_job: bool = False  # of the health checks it runs the cheap ones, and restarts nothing
    listener: socket.socket | None = None  # at `bind` already, kept open by a process above; None: its own
    pid: int = 0  # of the process to be killed to end it; 0: this one


class Agent:
    """Serves a node's shards, progress and heartbeat from `start` to `stop`.

    Attributes:
        verified: set once every shard that was in the store at the start has been verified or set aside.
    """

    def __init__(self, settings: AgentSettings, clock: Clock | None = None) -> None:
        allow_descriptors()  # before anything is bounded by what is allowed
        self.settings = settings
        self._clock = clock or SystemClock()
        self._server: BoundServer | None = None
        self._local: LocalListener | None = None
        self._stop_metrics: Callable[[], None] = lambda: None
        self._close_node_service: Callable[[], None] = lambda: None
        self._launcher_watch: LauncherWatch | None = None
        self._slots = RankSlots(self._clock) if settings.of_job else None
        self._store_trouble = ""
        self.store_status = CachedProbe(
            self._looked_at_store,
            node_pb2.StoreStatus(problem="its folder has not answered yet"),
            self._clock,
            kept_s=STATUS_KEPT_S,
            share=_STATUS_SHARE,
        )
        """What the store holds, as seen last, and what was served so far; a disk that hangs blocks no caller."""
        store = self._store = Store(settings.store)
        self._keeper = Keeper(
            settings.node, store, settings.token, settings.config, clock=self._clock, vouch=munge.vouch
        )
        self.verified = self._keeper.verified
        self._health = NodeHealth(
            settings.config, settings.node, settings.store, self._clock, of_job=settings.of_job
        )

    def start(self, token_file: Path) -> NodeFacts:
        """Return, once every call is served, how this agent is reached; `token_file` is where its token lies."""
        shares = self._shares_store()
        if shares and not self.settings.of_job:
            raise shared_store(str(self.settings.store), f"{self.settings.node} and {shares}")
        host, _ = split_bind(self.settings.bind)
        self._server = bound_server(
            self.settings.listener or self.settings.bind,
            accepted(self.settings.token),
            self._register,
            workers=MOST_READS + MOST_CALLS + WORKERS,
            farewell=farewell_of(self.settings.token),
            plain=self._keeper.plain_clients(None if self.settings.of_job else _user_of(munge.MungeSocket())),
        )
        try:
            if self.settings.metrics_bind:
                bind, token = self.settings.metrics_bind, self.settings.metrics_token
                self._stop_metrics = serve_metrics(bind, metrics.AGENT.registry, token)
            self._local = self._local_listener()
        except DeepLinkError:
            self.stop()
            raise
        self._feed_metrics()
        if self._slots is not None:
            self._slots.listen(token_file.parent)
        self._server.server.start()
        if self._local is not None:
            self._local.start()
        self._keeper.start()
        if self._launcher_watch is not None:
            self._launcher_watch.start()
        self._health.start(self.settings.topology_address, self.store_status)
        address, interface = _reached_at(host, self._server.port)
        is_everywhere = host in ANYWHERE
        return NodeFacts(
            node=self.settings.node,
            address=address,
            topology_address=self.settings.topology_address,
            token_file=str(token_file),
            store=str(self.settings.store),
            store_why=self.settings.store_why,
            shares_store=shares,
            interface=interface,
            pid=self.settings.pid or os.getpid(),
            weight=self._keeper.weight(),
            links=links() if is_everywhere else (),
            routes=routes() if is_everywhere else (),
        )

    def stop(self) -> None:
        """Return once nothing is served any more; calls in flight get `STOP_GRACE_S`."""
        if self._launcher_watch is not None:
            self._launcher_watch.stop()
        self._health.stop()
        self._keeper.stop()
        if self._local is not None:
            self._local.close()
        if self._server is not None:
            self._server.health.enter_graceful_shutdown()
            self._server.server.stop(STOP_GRACE_S).wait(2 * STOP_GRACE_S)
        self._close_node_service()
        if self._slots is not None:
            self._slots.close()
        self._stop_metrics()
        unmark(self._store, socket.gethostname())

    def _local_listener(self) -> LocalListener | None:
        """Return the socket for this node's users: the standing agent's alone, of whose user its folder is."""
        path = self.settings.config.node_socket if self.settings.config else None
        if path is None or self.settings.of_job:
            return None
        try:
            found = path.parent.stat()
        except OSError as problem:
            log.warning("this agent does not serve at node_socket: %s", problem)
            return None
        if found.st_uid != os.geteuid():
            log.info("%s is another user's: this agent does not serve at node_socket", path.parent)
            return None
        if found.st_mode & 0o022:
            said = f"others may write to {path.parent} (mode {stat.S_IMODE(found.st_mode):04o})"
            raise ListenError(f"unix:{path}", said, f"`chmod go-w {path.parent}`, or name another folder.")
        return self._keeper.local_listener(path)

    def _shares_store(self) -> str:
        try:
            return shared_with(self._store, socket.gethostname())
        except OSError as problem:  # of a disk that takes nothing more is said elsewhere
            log.warning("whether store %s is this node's own is not known: %s", self._store.root, problem)
            return ""

    def _register(self, server: grpc.Server) -> list[str]:
        servicer = node_service.NodeServicer(
            self.settings.node,
            self.settings.topology_address,
            self.store_status,
            clock=self._clock,
            told_members=self._keeper.use_member_list,
            stacks=Stacks(self.settings.node),
            health=self._health.findings,
            boot_id=self._health.boot_id,
            slots=self._slots,
        )
        self._close_node_service = servicer.close
        tokens = self.settings.token
        is_step = os.environ.get("SLURM_JOB_ID", "").isdigit() and os.environ.get("SLURM_NODEID", "").isdigit()
        is_of_job = self.settings.of_job and is_step
        if is_of_job and self.settings.config is not None and not isinstance(tokens, str):
            self._launcher_watch = LauncherWatch(
                os.environ,
                servicer.unasked_s,
                servicer.bulletin.newest,
                node=self.settings.node,
                secret=tokens.secret,
                token=tokens.current,
                slurm=Slurm(),
                clock=self._clock,
                state=self.settings.config.state,
            )
        services = [node_service.add_to(server, servicer), *self._keeper.register(server)]
        if self.settings.keeps_copies:
            learn = servicer.bulletin.learn
            services.append(checkpoint_replicas.served(self.settings, server, learn, self._clock))
        return services

    def _looked_at_store(self) -> node_pb2.StoreStatus:
        try:
            status = self._keeper.status()
        except (StoreError, OSError) as problem:
            # The heartbeat goes on: the node is alive, its store is not.
            said = str(problem)
            if said != self._store_trouble:  # once, not at each look
                log.warning("%s", said)
            self._store_trouble = said
            return node_pb2.StoreStatus(problem=said)
        self._shares_store()  # renews the mark of this machine
        self._store_trouble = ""
        return status

    def _feed_metrics(self) -> None:
        metrics.NODE_INFO.info({"node": self.settings.node, "version": deeplink.__version__})
        metrics.STORE_SHARDS.set_function(lambda: self.store_status().shards)
        metrics.STORE_BYTES.set_function(lambda: self.store_status().bytes)
        metrics.STORE_FREE_BYTES.set_function(lambda: self.store_status().free_bytes)
        metrics.STORE_VERIFIED_SHARDS.set_function(lambda: self.store_status().verified_shards)
        metrics.STORE_VERIFIED_BYTES.set_function(lambda: self.store_status().verified_bytes)
        metrics.STORE_BUDGET_BYTES.set_function(lambda: self.store_status().budget_bytes)


def farewell_of(token: str | RunTokens) -> Farewell:
    """Return what a rank of an ended attempt still hears: that it has ended, and which is the newest."""
    if isinstance(token, str):
        return Farewell()

    def newest() -> common_pb2.Attempt | None:
        return attempt_to_wire(token.newest) if token.newest else None

    return Farewell(
        token.has_ended,
        {
            node_service.REPORT: lambda: node_pb2.ReportReply(fenced=True, newest=newest()).SerializeToString(),
            checkpoint_replicas.HOLD: lambda: keep_pb2.HoldReply(newest=newest()).SerializeToString(),
        },
    )


def _user_of(place: munge.MungeSocket) -> Callable[[str], tuple[int, str]]:
    def user_of(credential: str) -> tuple[int, str]:
        found = munge.decoded(credential, place.path())
        return found.uid, found.statement

    return user_of


def _reached_at(host: str, port: int) -> tuple[str, str]:
    """Return `ip:port` for others to use, and the interface that carries it."""
    if host in ANYWHERE:
        local = primary_address()
        return f"{local.ip}:{port}", local.interface
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port}", "lo" if is_loopback(host) else primary_address().interface
