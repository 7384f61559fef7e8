"""One run of a job, from its agents' start to their end."""

from __future__ import annotations

import signal
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deeplink.clock import Clock, SystemClock
from deeplink.errors import DeepLinkError
from deeplink.files import standard_output_file
from deeplink.private import private_folder
from deeplink.runtokens import token_of
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.agent_restart import AgentRestart
from deeplink.scheduler.launch.backend import NodesLostError
from deeplink.scheduler.launch.ending import Ending
from deeplink.scheduler.launch.event_log import EventLog, EventSink, to_journal, to_watchdog
from deeplink.scheduler.launch.network_discovery import found_network, on_fabric
from deeplink.scheduler.launch.site import with_domains, with_hcas
from deeplink.scheduler.launch.status_reporter import StatusReporter
from deeplink.scheduler.launch.supervise import ENDING, FORWARDED, Supervisor
from deeplink.scheduler.launch.unheard import Unheard
from deeplink.scheduler.launch.verdict import RelaunchPolicy
from deeplink.scheduler.slurm.command import own_files_private
from deeplink.tokens import new_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.config import Config
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.scheduler.launch.site import SiteFabric


class StateFolderError(DeepLinkError):
    """The folder for what a job leaves behind cannot be made."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(
            f"{folder}: {problem}", remedy="Set DEEPLINK_STATE to a folder that can be written from all nodes."
        )
        self.folder, self.problem = folder, problem


def passed_on(config: Config) -> dict[str, str]:
    """Return the settings that every rank finds in its environment, whatever its own configuration files say."""
    settings = {"DEEPLINK_CATALOG": str(config.catalog)}
    if config.watch:
        settings["DEEPLINK_WATCH"] = config.watch
    if config.watch_token_file is not None:
        settings["DEEPLINK_WATCH_TOKEN_FILE"] = str(config.watch_token_file)
    return settings


def run_job(
    backend: Backend,
    order: LaunchSpec,
    config: Config,
    *,
    clock: Clock | None = None,
    policy: RelaunchPolicy | None = None,
    site: SiteFabric | None = None,
    as_json: bool = False,
) -> int:
    """Run the order on the allocation and return the exit code. Must be called from the main thread.

    Raises:
        AgentsFailedError: too few agents came up.
        NoInterfaceError: a node lacks the interface that was asked for.
        StateFolderError: the job's state folder cannot be made.
    """
    clock = clock or SystemClock()
    secret = new_token()
    signals: deque[signal.Signals] = deque(maxlen=64)
    with ExitStack() as stack:
        # First and last: a signal must not end us alone, neither while agents start nor while they are ended.
        stack.enter_context(_forwarding(signals))
        stack.enter_context(own_files_private())
        _make(backend.folder)
        chronicle = EventLog(backend.folder, clock, _couriers(backend, config, clock), as_json=as_json)
        stack.callback(chronicle.close)
        chronicle.event(
            "job-started",
            job=backend.job,
            restart=backend.restart,
            nodes=backend.nodes,
            backend=backend.name,
            output=standard_output_file(),
        )
        # Without Slurm a node is its processes: there is no machine that could live on without its agent.
        revival = (
            AgentRestart(lambda before: backend.start_agents(secret, before), clock)
            if backend.can_requeue
            else None
        )
        fleet = AgentPool(backend.start_agents(secret), partial(token_of, secret), clock, revival)
        stack.callback(fleet.close)
        logs = str(backend.folder / "agents.log")
        need = order.fewest or order.count

        def told_to_end() -> bool:
            return bool(ENDING & {*signals})

        try:
            gathered = fleet.gather(
                backend.nodes,
                need,
                logs=logs,
                told_to_end=told_to_end,
                unheard=Unheard(backend.unheard, clock, order.strand_timeout_s),
            )
        except NodesLostError as lost:
            limits = (policy or RelaunchPolicy()).limits
            account = StatusReporter(backend, fleet, chronicle, clock)
            ends = Ending(
                backend, account, chronicle, clock=clock, hold=order.hold, limits=limits, told_to_end=told_to_end
            )
            return ends.lose_before_the_start(lost.missing, str(lost))
        if not gathered:
            code = 128 + next(number for number in signals if number in ENDING)
            chronicle.event("ended", "told to end before the ranks were started", code=code)
            return code
        facts = with_hcas(found_network(fleet.facts, config.interface, chronicle), site)
        order = on_fabric(order, backend, site, {node: one.topology_address for node, one in facts.items()})
        fleet.readdress(with_domains(facts, order.fabric) if order.fabric else facts)
        order = replace(order, folder=backend.folder)
        supervisor = Supervisor(backend, fleet, order, chronicle, signals=signals, clock=clock, policy=policy)
        stack.callback(supervisor.close)
        agents = {node: {"address": facts.address, "pid": facts.pid} for node, facts in fleet.facts.items()}
        chronicle.event("agents-ready", agents=agents)
        code = supervisor.run()
        if not supervisor.has_lost:
            backend.ended_whole()
        return code


def _make(folder: Path) -> None:
    try:
        private_folder(folder)
    except OSError as problem:
        raise StateFolderError(folder, str(problem)) from problem


def _couriers(backend: Backend, config: Config, clock: Clock) -> list[EventSink]:
    couriers = [EventSink(to_journal(backend.folder / "journal.sqlite", clock), "journal", clock)]
    deliver = to_watchdog(config)
    if deliver is not None:
        couriers.append(EventSink(deliver, "beat", clock))
    return couriers


@contextmanager
def _forwarding(signals: deque[signal.Signals]) -> Iterator[None]:
    def note(number: int, _frame: object) -> None:
        signals.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
