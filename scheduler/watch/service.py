"""The watchdog put together: leader's lock, journal, server, metrics, loop."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.metrics import WatchMetrics
from deeplink.core.metrics_server import serve_metrics
from deeplink.rpc.channel import allow_descriptors
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.journal.standby import emergency_of
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.liveness.probe import TcpProber
from deeplink.scheduler.recovery.evidence import WatchPolicy
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandMissingError, run
from deeplink.scheduler.watch.actor import Actor, Bindings
from deeplink.scheduler.watch.authorizer import Authorizer, TokenMint
from deeplink.scheduler.watch.notify.notifier import notifying
from deeplink.scheduler.watch.observer import COMMAND_S, Observer
from deeplink.scheduler.watch.operator_actions import OperatorActor
from deeplink.scheduler.watch.operator_plan import OperatorPlanner
from deeplink.scheduler.watch.server import OperationsServicer, WatchServicer, watch_server
from deeplink.scheduler.watch.watchdog import Daemon, leading

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.scheduler.watch.notify.channels import Channel

STOP_GRACE_S = 1.0
NAME_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What one watchdog is told."""

    journal: Path  # its file
    bind: str  # `host:port` where heartbeats come in; port 0 for a free one
    secret: str  # makes and checks the tokens that callers carry
    agents: tuple[int, ...] = ()  # users whose standing agents are believed, besides root and the watchdog's own
    operators: tuple[int, ...] = ()  # users that MUNGE may name as operators, besides the same two
    act: bool = False  # act, or observe only
    policy: WatchPolicy = field(default_factory=WatchPolicy)  # when evidence is enough
    interval_s: float = 1.0  # seconds between two looks in calm
    metrics_bind: str = ""  # `host:port` for Prometheus; empty for none
    metrics_token: str = ""  # who asks for metrics must show it; empty: nobody need
    channels: tuple[Channel, ...] = ()  # who is told about incidents


def _emergency(journal: Path, say: Callable[[str], None]) -> Path | None:
    """Return where the journal goes on should its disk take no writes; None where no such place can be had."""
    try:
        return emergency_of(journal)
    except (DeepLinkError, OSError) as problem:
        say(f"no emergency file for the journal: {problem}")
        return None


def _cluster_name() -> Callable[[], str]:
    """Return what asks Slurm for the cluster's name, for messages, until it has said it once."""
    slurm, known = Slurm(run=partial(run, timeout_s=NAME_S)), list[str]()

    def name() -> str:
        if not known:
            with suppress(DeepLinkError):
                known.append(slurm.cluster_name())
        return known[0] if known else ""

    return name


@contextmanager
def watching(
    settings: WatchSettings, say: Callable[[str], None], alarm: threading.Event, clock: Clock | None = None
) -> Iterator[tuple[Daemon, int]]:
    """Give the loop, to be run, and the port where heartbeats are taken, already, until the end of the block."""
    allow_descriptors()  # each job's launcher holds a connection
    clock = clock or SystemClock()
    for program in ("squeue", "scontrol"):
        if shutil.which(program) is None:
            raise CommandMissingError(program)
    with ExitStack() as stack:
        lock = stack.enter_context(leading(settings.journal))
        journal = stack.enter_context(Journal(settings.journal, emergency=_emergency(settings.journal, say)))
        metrics = WatchMetrics(CollectorRegistry())
        host = socket.gethostname()
        stack.enter_context(notifying(settings.channels, journal, clock, metrics, host, _cluster_name()))
        slurm, heartbeats = Slurm(run=partial(run, timeout_s=COMMAND_S)), HeartbeatTable(alarm)
        observer = Observer(
            slurm=slurm,
            prober=TcpProber(clock),
            heartbeats=heartbeats,
            journal=journal,
            clock=clock,
            policy=settings.policy,
        )
        actor = Actor(
            slurm=slurm,
            journal=journal,
            observer=observer,
            clock=clock,
            metrics=metrics,
            say=say,
        )
        mint = TokenMint(settings.secret)
        authorizer = Authorizer(mint, observer, journal, clock, settings.agents, settings.operators)
        planner = OperatorPlanner(
            slurm=slurm, journal=journal, prober=TcpProber(clock), clock=clock, acts=settings.act
        )
        operators = OperatorActor(planner=planner, metrics=metrics, say=say, wake=alarm.set)
        stack.callback(operators.close)
        servicer = WatchServicer(journal, heartbeats, clock, metrics, authorizer)
        bound = watch_server(settings.bind, servicer, OperationsServicer(operators, authorizer))

        def tell_health(service: str, well: bool) -> None:  # noqa: FBT001 - of a callable
            status = HealthCheckResponse.SERVING if well else HealthCheckResponse.NOT_SERVING
            bound.health.set(service, status)

        if settings.metrics_bind:
            stack.callback(serve_metrics(settings.metrics_bind, metrics.registry, settings.metrics_token))
        bound.server.start()
        stack.callback(lambda: bound.server.stop(STOP_GRACE_S).wait(2 * STOP_GRACE_S))
        metrics.leading.set(1)
        metrics.acting.set(settings.act)
        yield (
            Daemon(
                observer=observer,
                actor=actor if settings.act else None,
                operators=operators,
                journal=journal,
                policy=settings.policy,
                clock=clock,
                metrics=metrics,
                say=say,
                bindings=Bindings(slurm=slurm, clock=clock, say=say, serves=tell_health) if settings.act else None,
                lock=lock,
                interval_s=settings.interval_s,
            ),
            bound.port,
        )
