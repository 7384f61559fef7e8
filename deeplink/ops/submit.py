"""Hints for nodes: `deeplink sbatch` makes one, submits and keeps the record; `deeplink plan` looks after it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click

from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_unsynced
from deeplink.scheduler.placement.hint.decide import MachineSpeeds, Trial, trial_of, tried, unasked
from deeplink.scheduler.placement.hint.decision import Decision, HintKind, Recorded, Why, append, job_folder
from deeplink.scheduler.placement.hint.making import (
    HeldDecision,
    Means,
    Sources,
    make,
    options_of,
    survey,
    without,
)
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.nodeset import fold, unfold
from deeplink.scheduler.slurm.submission import without_outer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.hint.cluster_survey import Ties
    from deeplink.scheduler.placement.hint.decide import Surroundings, Weighed
    from deeplink.scheduler.placement.hint.decision import Ask
    from deeplink.scheduler.placement.hint.reconcile import Mine, SurveyedCluster
    from deeplink.scheduler.slurm.submission import Ours, SbatchLine, Submission

AGREED_S = 60.0  # how long the watchdog's answer is kept
TRIAL_S = 3.0  # how long Slurm may take to say what it would do; without an answer no nodes are hinted by name
_MAY_IMPROVE = frozenset({Why.BUSY, Why.SCATTERED, Why.STARTS_LATER, Why.LATER_WITH_IT})
"""With these reasons to hint nothing, a hint may be made once nodes come free, by the planner."""
_JOB = re.compile(rb"^(?:Submitted batch job )?(\d{1,10})(?:;[^\n]*| on cluster [^\n]*)?\n", re.MULTILINE)
_CLOCK = SystemClock()


def agreed(config: Config) -> str:
    """Return why nothing that outlives this session would look after nodes hinted by name; empty where it does.

    What the watchdog said is kept for a minute: to ask it takes as long as a submission does.
    """
    if not config.watch:
        return "no watchdog would take them off the job again (setting `watch`)"
    path, now = config.state / "wishes" / "agreed.json", _CLOCK.unix()
    host = socket.gethostname()  # hosts share the state, and each has a loopback of its own
    try:
        kept = json.loads(path.read_bytes())
        if (kept["watch"], kept["host"]) == (config.watch, host) and 0.0 <= now - kept["unix"] < AGREED_S:
            return str(kept["problem"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    from deeplink.scheduler.jobs.job_view import me
    from deeplink.scheduler.liveness.watchdog_client import looks_after

    problem = looks_after(config.watch, me())
    problem = problem and f"the watchdog at {config.watch} does not take them off the job again: {problem}"
    said = {"watch": config.watch, "host": host, "unix": now, "problem": problem}
    with contextlib.suppress(OSError):
        write_unsynced(path, json.dumps(said).encode())
    return problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A submission, decided and not yet made."""

    ask: Ask
    made: HeldDecision
    submission: Submission  # with the hint
    config: Config

    @property
    def decision(self) -> Decision:
        """What was decided."""
        return self.made.decision

    @property
    def unasked_controller(self) -> bool:
        """Whether it is not known yet that slurmctld answers."""
        return bool(self.ask.no_wish) or self.made.unreachable


def placed(
    request: SbatchLine, ours: Ours, ask: Ask, bare: Submission, *, script: str, piped: bool, run: command.Runner
) -> Placed:
    """Decide which nodes to ask Slurm for, as a hint; `bare` is the command without it."""
    config = load_config()
    if ask.no_wish:
        made = HeldDecision(unasked(Why.NOT_ASKED if ours.place is False else Why.NOT_UNDERSTOOD, ask.no_wish))
    else:
        trial = _trial(bare, script if piped else "")
        made = make(ask, _means(ask, config, run, trial), dry=request.dry_run)
    if config.resubmit if ours.resubmit is None else ours.resubmit:
        words = "resubmit has no effect any more: a job restarts under its own id alone; leave it out"
        click.echo(f"deeplink: {words}", err=True)
    return Placed(
        ask=ask,
        made=made,
        submission=bare.with_options(options_of(made.decision, ask.comment)),
        config=config,
    )


def submitted(found: Placed) -> int:
    """Submit, keep the record as soon as the job has an id, and return sbatch's exit code."""
    said = bytearray()
    jobs: list[str] = []

    def write(data: bytes) -> None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except OSError:
            # The reader is gone; the job is submitted, and its record is to be kept all the same.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if jobs or len(said) > 1 << 16:
            return
        said.extend(data)
        job = job_in(bytes(said))
        if job:
            jobs.append(job)
            found.made.release()
            _accepted(found, job)

    env = {**without_outer(os.environ), **found.submission.changes}
    try:
        code = command.run_passing_on(found.submission.argv, env=env, write=write)
    finally:
        found.made.release()
    sys.stdout.flush()
    return command.end_as(code)


def job_in(said: bytes) -> str:
    r"""Return the id in what sbatch printed, as soon as it is whole; empty before.

    >>> job_in(b"Submitted batch job 12\n"), job_in(b"12;east\n"), job_in(b"Submitted batch job 1")
    ('12', '12', '')
    """
    found = _JOB.search(said)
    return found[1].decode() if found else ""


def _accepted(found: Placed, job: str) -> None:
    # What the user can do something about: a limit that is in the way, data that is not known of.
    if found.decision.why is Why.IMPOSSIBLE:
        click.echo(f"deeplink: {found.decision.words}", err=True)
    for note in found.decision.notes if found.ask.data else ():
        click.echo(f"deeplink: {note}", err=True)
    recorded = Recorded(
        unix=_CLOCK.unix(), by="sbatch", ask=found.ask, decision=found.decision, done=found.submission.argv
    )
    try:
        append(job_folder(found.config.state, job), recorded)
    except OSError as problem:
        where = problem.filename or found.config.state
        words = f"job {job} is submitted; why it was placed so could not be noted: {where}: {problem.strerror}"
        click.echo(f"deeplink: {words}", err=True)
        return
    may_improve = found.decision.why in _MAY_IMPROVE and bool(found.config.watch)
    if found.decision.kind is not HintKind.NOTHING or may_improve:
        from deeplink.scheduler.placement.hint.planner import ensure_planner

        # The job is submitted; without a planner its hint stays as it is.
        with contextlib.suppress(DeepLinkError, OSError):
            ensure_planner(found.config.state)


def _means(ask: Ask, config: Config, run: command.Runner, trial: Callable[[tuple[str, ...]], Trial]) -> Means:
    residency, notes = residency_of(ask.data, config)
    machines = machines_of(config) if ask.profile else MachineSpeeds()
    if ask.profile and machines.constants is not None:
        # It takes a tenth of a second: while Slurm's answer is awaited, and not when it is there.
        import deeplink.scheduler.placement.predicted  # noqa: F401
    return Means(
        sources=sources_of(config, run),
        trial=trial,
        agreed=partial(agreed, config),
        kept=partial(_kept, run),
        residency=residency,
        notes=notes,
        machines=machines,
    )


def _kept(run: command.Runner, ask: Ask, around: Surroundings) -> frozenset[NodeName] | None:
    from deeplink.scheduler.placement.hint.cluster_survey import read_queue
    from deeplink.scheduler.placement.hint.reconcile import SurveyedCluster, kept_before

    cluster = SurveyedCluster(around.now, around.site, lambda _ask, weighed, _kept: weighed.decision)
    queue = read_queue(partial(run, timeout_s=TRIAL_S))
    return kept_before(ask, queue, cluster, ask.partition or around.now.default)


def machines_of(config: Config) -> MachineSpeeds:
    """Return how fast the site's machines are; for who looks after waiting jobs, too."""
    if config.model is None:
        return MachineSpeeds()
    from deeplink.scheduler.placement.model import constants_from

    try:
        return MachineSpeeds(constants_from(config.model.read_text(encoding="utf-8"), str(config.model)))
    except (OSError, UnicodeDecodeError) as problem:
        return MachineSpeeds(problem=f"{config.model}: {getattr(problem, 'strerror', None) or problem}")
    except DeepLinkError as problem:
        return MachineSpeeds(problem=str(problem))


def sources_of(config: Config, run: command.Runner) -> Sources:
    """Return where a survey of the cluster comes from; for who looks after waiting jobs, too."""
    return Sources(
        run=run,
        clock=_CLOCK,
        folder=config.state / "wishes",
        cluster=os.environ.get("SLURM_CONF", ""),
        topology=config.topology,
        compiled=_compiled,
        switches=_switches,
    )


def _trial(submission: Submission, stdin: str) -> Callable[[tuple[str, ...]], Trial]:
    env = {**without_outer(os.environ), **submission.changes, "SLURM_TIME_FORMAT": "standard"}

    def ask(options: tuple[str, ...]) -> Trial:
        argv = submission.with_options(("--test-only", *options)).argv
        done = command.finish(argv, timeout_s=TRIAL_S, stdin=stdin, env=env)
        return trial_of(done.stderr, unfold)

    return ask


def residency_of(names: tuple[str, ...], config: Config) -> tuple[DataResidency, tuple[str, ...]]:
    """Return where the job's data lies, all its datasets together, and which are not known."""
    if not names:
        return DataResidency(), ()
    from deeplink.cache.replicate.residency import UnknownHoldingError, held

    total, notes = 0, []
    sizes: dict[NodeName, int] = {}
    for name in names:
        try:
            found = held(config.catalog, name, unix=_CLOCK.unix())
        except UnknownHoldingError as problem:
            notes.append(str(problem))
            continue
        total += found.total
        for node, size in found.bytes.items():
            sizes[node] = sizes.get(node, 0) + size
    return DataResidency(sizes, total), tuple(notes)


def _compiled(path: Path) -> Ties:
    from deeplink.ops.topology_reading import read_all
    from deeplink.scheduler.placement.hint.cluster_survey import Ties
    from deeplink.scheduler.placement.predicted import slow_of
    from deeplink.scheduler.topology.graph import fabric_of

    network = read_all((path,), None, (), ()).network
    slow = slow_of(network)
    return Ties(fabric_of(network), slow.speeds, slow.dead)


def _switches() -> Ties:
    from deeplink.scheduler.placement.hint.cluster_survey import Ties
    from deeplink.scheduler.placement.hint.making import ANSWER_S
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.topology.sources.slurm_topology import fabric_from_switches

    return Ties(fabric_from_switches(Slurm(command.within(ANSWER_S)).topology()))


MOST_AT_ONCE = 4
"""Jobs for which nodes bring data at the same time: each is a process here."""


def surveyed(config: Config, jobs: Sequence[Mine]) -> SurveyedCluster:
    """Return the cluster as it is now, for these jobs; one question to Slurm, and two for each hint by name."""
    from deeplink.scheduler.placement.hint.reconcile import SurveyedCluster

    now, site = survey(sources_of(config, command.run))
    data = {job.ask.data for job in jobs if job.ask.data}
    machines = machines_of(config) if any(job.ask.profile for job in jobs) else MachineSpeeds()
    settle = partial(_settled, config)
    return SurveyedCluster(now, site, settle, {names: residency_of(names, config)[0] for names in data}, machines)


def _settled(config: Config, ask: Ask, weighed: Weighed, kept: frozenset[NodeName]) -> Decision:
    """Hold a hint for a waiting job against what Slurm would do with another one that asks the same."""
    from deeplink.scheduler.placement.hint.ask import options_for

    env = {name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_"))}
    env |= {"SLURM_TIME_FORMAT": "standard"} | {
        name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ
    }

    def trial(options: tuple[str, ...]) -> Trial:
        asked = options_for(ask, kept)
        argv = ("sbatch", "--test-only", *options, *asked, "--output=/dev/null", "--wrap=true")
        return trial_of(command.finish(argv, timeout_s=TRIAL_S, env=env).stderr, unfold)

    def stands(hint: Weighed) -> Weighed:
        problem = agreed(config)
        return without(hint, Why.NOT_LOOKED_AFTER, problem) if problem else hint

    return tried(weighed, trial, stands)


class BackgroundPrefetch:
    """Starts `deeplink prefetch` in the background, when nodes were named for a job with data."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._members, self._say = config.members, say
        self._log = config.state / "plan" / "prefetch.log"
        self._running: list[int] = []

    def __call__(self, job: int, data: tuple[str, ...], nodes: Sequence[NodeName]) -> None:
        """Have nodes bring a job's data."""
        from deeplink.scheduler.placement.hint.planner import MOST_LOG

        if not self._members:
            return
        self._running = [number for number in self._running if not command.has_ended(number)]
        if len(self._running) >= MOST_AT_ONCE:
            self._say(f"job {job}: its nodes are not warmed: {MOST_AT_ONCE} jobs' nodes are at it")
            return
        argv = (sys.executable, "-P", "-m", "deeplink", "prefetch", "--nodes", fold(nodes), "--", *data)
        try:
            if not self._running and self._log.exists() and self._log.stat().st_size > MOST_LOG:
                os.truncate(self._log, 0)
            self._running.append(command.detach(argv, self._log))
        except (DeepLinkError, OSError) as problem:
            self._say(f"job {job}: its nodes are not warmed: {problem}")
            return
        self._say(f"job {job}: {fold(nodes)} bring {', '.join(data)} (process {self._running[-1]}, {self._log})")
