"""The watchdog put together: leader's lock, journal, server, metrics, loop."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry

from deeplink.clock import Clock, SystemClock
from deeplink.metrics import WatchMetrics, serve_metrics
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandMissingError, run
from deeplink.scheduler.watch.actor import Actor
from deeplink.scheduler.watch.authorization import Authorizer
from deeplink.scheduler.watch.bindings import Bindings
from deeplink.scheduler.watch.daemon import Daemon
from deeplink.scheduler.watch.evidence import WatchPolicy
from deeplink.scheduler.watch.heartbeats import HeartbeatTable
from deeplink.scheduler.watch.identity import TokenMint
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.leader_lock import leading
from deeplink.scheduler.watch.notify.deadman import beating
from deeplink.scheduler.watch.notify.notifier import notifying
from deeplink.scheduler.watch.observer import COMMAND_S, Observer
from deeplink.scheduler.watch.probe import TcpProber
from deeplink.scheduler.watch.server import WatchServicer, watch_server
from deeplink.wire import allow_descriptors

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from grpc_health.v1.health import HealthServicer

    from deeplink.scheduler.watch.leader_lock import LeaderLock
    from deeplink.scheduler.watch.notify.channels import Channel
    from deeplink.scheduler.watch.requeue_placement import RequeueHints
    from deeplink.scheduler.watch.resubmit import Resubmitter

STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What one watchdog is told.

    Attributes:
        journal: its file.
        bind: `host:port` where beats come in; port 0 for a free one.
        secret: makes and checks the tokens that callers carry.
        agents: users whose standing agents are believed, besides root and the watchdog's own.
        act: act, or observe only.
        policy: when evidence is enough.
        interval_s: seconds between two looks in calm.
        metrics_bind: `host:port` for Prometheus; empty for none.
        channels: who is told of incidents.
        wishes: says where a job that starts again should run; None: Slurm alone says it.
        heirs: submits jobs anew that cannot be helped otherwise; None: no job is.
    """

    journal: Path
    bind: str
    secret: str
    agents: tuple[int, ...] = ()
    act: bool = False
    policy: WatchPolicy = field(default_factory=WatchPolicy)
    interval_s: float = 1.0
    metrics_bind: str = ""
    channels: tuple[Channel, ...] = ()
    wishes: RequeueHints | None = None
    heirs: Resubmitter | None = None


@contextmanager
def watching(
    settings: WatchSettings, say: Callable[[str], None], alarm: threading.Event, clock: Clock | None = None
) -> Iterator[tuple[Daemon, int]]:
    """Give the loop, to be run, and the port where beats are taken, already, until the end of the block.

    Args:
        settings: what this watchdog is told.
        say: told one line for each decision.
        alarm: set when there is reason not to wait for the next round.
        clock: time; the machine's own when not given.

    Raises:
        LeaderError: another watchdog leads with this journal.
        JournalError: the journal cannot be used.
        ListenError: `bind` cannot be listened on.
        MetricsBindError: `metrics_bind` cannot.
        CommandMissingError: Slurm's commands are not installed here.
    """
    allow_descriptors()  # each job's launcher holds a connection
    clock = clock or SystemClock()
    for program in ("squeue", "scontrol"):
        if shutil.which(program) is None:
            raise CommandMissingError(program)
    with ExitStack() as stack:
        lead = stack.enter_context(leading(settings.journal))
        journal = stack.enter_context(Journal(settings.journal))
        metrics = WatchMetrics(CollectorRegistry())
        stack.enter_context(notifying(settings.channels, journal, clock, metrics, socket.gethostname()))
        stack.enter_context(beating(settings.channels, journal, clock, metrics, socket.gethostname()))
        daemon = _daemon(settings, journal, metrics, say, lead=lead, clock=clock, book=HeartbeatTable(alarm))
        observer = daemon.observer
        authorizer = Authorizer(TokenMint(settings.secret), observer, journal, clock, settings.agents)
        servicer = WatchServicer(journal, observer.book, clock, metrics, authorizer)
        bound = watch_server(settings.bind, servicer)
        if settings.metrics_bind:
            stack.callback(serve_metrics(settings.metrics_bind, metrics.registry))
        if daemon.bindings:
            daemon.bindings.serves = partial(_tell_health, bound.health)
        bound.server.start()
        stack.callback(lambda: bound.server.stop(STOP_GRACE_S).wait(2 * STOP_GRACE_S))
        metrics.leading.set(1)
        metrics.acting.set(settings.act)
        yield daemon, bound.port


def _tell_health(answers: HealthServicer, service: str, well: bool) -> None:  # noqa: FBT001 - of a callable
    status = HealthCheckResponse.SERVING if well else HealthCheckResponse.NOT_SERVING
    answers.set(service, status)


def _daemon(
    settings: WatchSettings,
    journal: Journal,
    metrics: WatchMetrics,
    say: Callable[[str], None],
    *,
    lead: LeaderLock,
    clock: Clock,
    book: HeartbeatTable,
) -> Daemon:
    slurm = Slurm(run=partial(run, timeout_s=COMMAND_S))
    observer = Observer(
        slurm=slurm,
        prober=TcpProber(clock),
        book=book,
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
        wishes=settings.wishes,
        heirs=settings.heirs,
    )
    return Daemon(
        observer=observer,
        actor=actor if settings.act else None,
        journal=journal,
        policy=settings.policy,
        clock=clock,
        metrics=metrics,
        say=say,
        bindings=Bindings(slurm=slurm, clock=clock, say=say) if settings.act else None,
        lead=lead,
        interval_s=settings.interval_s,
    )
