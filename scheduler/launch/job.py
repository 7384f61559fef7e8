"""One run of a job, from its agents' start to their end."""

from __future__ import annotations

import signal
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.private import private_folder
from deeplink.core.publish import BY_FILE, leave_members, standard_output_file
from deeplink.rpc.tokens import new_token, token_of
from deeplink.scheduler.launch.agent_monitor import Unheard
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.agent_restart import AgentRestart
from deeplink.scheduler.launch.backend import LaunchError, NodesLostError, RunContext
from deeplink.scheduler.launch.ending import Ending
from deeplink.scheduler.launch.event_log import EventLog, EventSink, to_journal, to_watchdog
from deeplink.scheduler.launch.launcher_role import run_of
from deeplink.scheduler.launch.rank_output import OutputCollector, kept_folder
from deeplink.scheduler.launch.run_state import Handover
from deeplink.scheduler.launch.shared_network import fabric_below, found_network, with_domains, with_hcas
from deeplink.scheduler.launch.status_reporter import StatusReporter
from deeplink.scheduler.launch.supervise import ENDING, FORWARDED, Supervisor
from deeplink.scheduler.recovery.relaunch import RelaunchPolicy
from deeplink.scheduler.slurm.command import own_files_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from deeplink.core.config import Config
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.scheduler.launch.launcher_process import ParentLink
    from deeplink.scheduler.launch.shared_network import SiteFabric

SITE_VARIABLE = "DEEPLINK_SITE_MEMBERS"


def passed_on(config: Config, env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that every rank finds in its environment, whatever its own configuration files say.

    The configured members are the standing cache; within a rank they are those of the run it belongs to.
    """
    in_rank = "DEEPLINK_ATTEMPT" in env
    settings = {
        "DEEPLINK_CATALOG": config.catalog,
        SITE_VARIABLE: config.site_members if in_rank else config.members,
        "DEEPLINK_SITE_TOKEN_FILE": config.site_token_file if in_rank else config.token_file,
        "DEEPLINK_WATCH": config.watch,
        "DEEPLINK_WATCH_TOKEN_FILE": config.watch_token_file,
    }
    return {name: str(value) for name, value in settings.items() if value}


def _by_file(passed_on: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the same with the standing cache's members in a file: the list may be too long for a variable."""
    listed = passed_on.get(SITE_VARIABLE, "")
    is_by_file = not listed or listed.startswith(BY_FILE)
    return {**passed_on, **({} if is_by_file else {SITE_VARIABLE: leave_members(folder, listed)})}


def run_job(
    backend: Backend,
    spec: LaunchSpec,
    config: Config,
    *,
    clock: Clock | None = None,
    policy: RelaunchPolicy | None = None,
    site: SiteFabric | None = None,
    as_json: bool = False,
    link: ParentLink | None = None,
) -> int:
    """Run the ranks on the allocation and return the exit code. Must be called from the main thread.

    With a `link` to a parent, which starts another launcher when this one dies: goes on where one before it was,
    and an error of ours ends this process and not the ranks.
    """
    clock, policy = clock or SystemClock(), policy or RelaunchPolicy()
    secret = new_token() if link is None else link.greeted().secret
    backend.role.run = run_of(secret)
    signals: deque[signal.Signals] = deque(maxlen=64)
    with ExitStack() as stack:
        # First and last: a signal must not end us alone, neither while agents start nor while they are ended.
        if link is None:
            stack.enter_context(_forwarding(signals))
        else:
            link.forward(signals)
        stack.enter_context(own_files_private())
        events = _event_log(backend, config, clock, as_json=as_json)
        stack.callback(events.close)
        handover = None if link is None else Handover(link, backend, clock)
        if link is not None and link.is_last and (handover is None or handover.attempt is None):
            raise LaunchError(
                f"signal {link.died or 0:d} ended the launcher again and again, before the ranks were started",
                "What else runs on the batch host? `dmesg` there tells whether memory ran out.",
                exit_code=128 + (link.died or 0),
            )
        if handover is None or handover.before is None:
            events.event(
                "job-started",
                job=backend.job,
                restart=backend.restart,
                nodes=backend.nodes,
                backend=backend.name,
                output=standard_output_file(),
            )
        restarts = None  # without Slurm a node is its processes: no machine could live on without its agent
        if backend.can_requeue:
            restarts = AgentRestart(lambda before: backend.start_agents(secret, before), clock)
        step = backend.start_agents(secret) if handover is None else handover.agents(backend)
        agents = AgentPool(
            step,
            partial(token_of, secret),
            clock,
            restarts,
            backend.folder,
            role=backend.role,
            output_gone=link is not None and link.is_elsewhere,
        )
        stack.callback(agents.close)
        if link is not None:
            link.is_under_way = True
        stack.callback(OutputCollector(kept_folder(backend.folder, run_of(secret))).close)
        run = RunContext(backend, agents, events, clock, spec, policy, handover)
        return _supervised(run, config, site, signals, stack)


def _supervised(
    run: RunContext,
    config: Config,
    site: SiteFabric | None,
    signals: deque[signal.Signals],
    stack: ExitStack,
) -> int:
    """Start the ranks once the agents are there, and return the run's exit code; `stack` ends what is left."""
    backend, agents, events, spec = run.backend, run.agents, run.events, run.spec

    def told_to_end() -> bool:
        return bool(ENDING.intersection([*signals]))  # a copy: a thread may add to them

    before = None if run.handover is None else run.handover.attempt
    if before is not None:
        agents.adopt(before.facts)
    else:
        try:
            gathered = agents.gather(
                backend.nodes,
                spec.fewest or spec.count,
                logs=str(backend.folder / "agents.log"),
                told_to_end=told_to_end,
                unheard=Unheard(backend.unheard, run.clock, spec.strand_timeout_s),
            )
        except NodesLostError as lost:
            ending = Ending(run, StatusReporter(run), told_to_end)
            return ending.lose_before_the_start(lost.missing, str(lost))
        if not gathered:
            code = 128 + next(number for number in [*signals] if number in ENDING)
            events.event("ended", "told to end before the ranks were started", code=code)
            return code
        agents.readdress(with_hcas(found_network(agents.facts, config.interface, events), site))
    facts = agents.facts
    addresses = {node: one.topology_address for node, one in facts.items()}
    fabric = fabric_below(addresses, site, backend.fabric)
    agents.readdress(with_domains(facts, fabric))
    passed = _by_file(spec.passed_on, backend.folder)
    spec = replace(spec, fabric=fabric, folder=backend.folder, passed_on=passed)
    supervisor = Supervisor(replace(run, spec=spec), signals)
    stack.callback(supervisor.close)
    if before is None:
        ready = {node: {"address": one.address, "pid": one.pid} for node, one in agents.facts.items()}
        events.event("agents-ready", agents=ready)
    code = supervisor.run()
    if not supervisor.has_lost:
        backend.ended_whole()
    return code


def _event_log(backend: Backend, config: Config, clock: Clock, *, as_json: bool) -> EventLog:
    try:
        private_folder(backend.folder)
    except OSError as problem:
        remedy = "Set DEEPLINK_STATE to a folder that can be written from all nodes."
        raise LaunchError(f"{backend.folder}: {problem}", remedy, exit_code=1) from problem
    sinks = [EventSink(to_journal(backend.folder / "journal.sqlite", clock), "journal", clock)]
    if (deliver := to_watchdog(config)) is not None:
        sinks.append(EventSink(deliver, "beat", clock))
    return EventLog(backend.folder, clock, sinks, as_json=as_json)


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
