"""`deeplink sbatch`: which nodes are wished for, the submission itself, and its record."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.cli.sbatch_agreement import agreed
from deeplink.clock import SystemClock
from deeplink.config import load_config
from deeplink.errors import DeepLinkError
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.outer import without_outer
from deeplink.scheduler.slurm.passing import end_as, run_passing_on
from deeplink.scheduler.slurm.submitted import Submitted, keep
from deeplink.scheduler.wish.decide import unasked
from deeplink.scheduler.wish.decision import Decision, HintKind, Recorded, Why
from deeplink.scheduler.wish.dry_run_check import Trial, trial_of
from deeplink.scheduler.wish.making import HeldDecision, Means, make, options_of
from deeplink.scheduler.wish.record import append, job_folder
from deeplink.scheduler.wish.scale import MachineSpeeds
from deeplink.scheduler.wish.survey import Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.config import Config
    from deeplink.scheduler.slurm.submission import Ours, SbatchLine, Submission
    from deeplink.scheduler.wish.decide import Surroundings
    from deeplink.scheduler.wish.decision import Ask
    from deeplink.scheduler.wish.site import Ties
    from deeplink.types import NodeName

TRIAL_S = 3.0
"""How long Slurm may take to say what it would do; without an answer no nodes are wished by name."""
_MAY_IMPROVE = frozenset({Why.BUSY, Why.SCATTERED, Why.STARTS_LATER, Why.LATER_WITH_IT})
"""With these reasons to wish nothing, a wish may be made once nodes come free, by whoever looks after the job."""
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A submission, decided and not yet made.

    Attributes:
        ask: what the job asks.
        made: what was decided.
        submission: the command, with the wish.
        config: the settings.
        bare: the command without the wish.
        resubmit: whether the job may be submitted anew.
        again: what is kept for that; None where nothing is.
    """

    ask: Ask
    made: HeldDecision
    submission: Submission
    config: Config
    bare: Submission
    plain: bool = field(default=False)
    resubmit: bool = False
    again: Submitted | None = None

    def kept(self, request: SbatchLine, script: str) -> Placed:
        """Return the same with what is needed to submit it anew, where it may be."""
        if not self.resubmit:
            return self
        wrapped = request.says("wrap")
        if not wrapped and not script:
            click.echo("deeplink: it will not be submitted anew: its script cannot be read", err=True)
            return self
        again = Submitted(
            argv=self.bare.argv,
            script=None if wrapped else script,
            cwd=str(Path.cwd()),
            env={**without_outer(os.environ), **self.bare.changes},
        )
        return replace(self, again=again)

    @property
    def decision(self) -> Decision:
        """What was decided."""
        return self.made.decision

    @property
    def unreachable(self) -> bool:
        """Whether slurmctld did not answer in time."""
        return self.made.unreachable

    @property
    def unasked_controller(self) -> bool:
        """Whether nothing has told yet that slurmctld answers."""
        return self.plain or self.made.unreachable


def placed(
    request: SbatchLine, ours: Ours, ask: Ask, submission: Submission, *, stdin: str, run: command.Runner
) -> Placed:
    """Decide on which nodes a job is wished to run.

    Args:
        request: the command line.
        ours: our options, those of the script among them.
        ask: what the job asks.
        submission: the command without a wish.
        stdin: the script, where it comes from standard input.
        run: runs Slurm's commands.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    config = load_config()
    if ask.no_wish:
        made = HeldDecision(unasked(Why.NOT_ASKED if ours.place is False else Why.NOT_UNDERSTOOD, ask.no_wish))
    else:
        made = make(ask, _means(ask, config, run, _trial(submission, stdin)), dry=request.dry_run)
    return Placed(
        ask=ask,
        made=made,
        submission=submission.with_options(options_of(made.decision, ask.comment)),
        config=config,
        bare=submission,
        plain=bool(ask.no_wish),
        resubmit=config.resubmit if ours.resubmit is None else ours.resubmit,
    )


def submitted(found: Placed) -> int:
    """Submit, keep the record as soon as the job has an id, and return sbatch's exit code."""
    said = bytearray()
    jobs: list[str] = []

    def write(data: bytes) -> None:
        _pass_on(data)
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
        code = run_passing_on(found.submission.argv, env=env, write=write)
    finally:
        found.made.release()
    sys.stdout.flush()
    return end_as(code)


_JOB = re.compile(rb"^(?:Submitted batch job )?(\d{1,10})(?:;[^\n]*| on cluster [^\n]*)?\n", re.MULTILINE)


def job_in(said: bytes) -> str:
    r"""Return the id in what sbatch printed, as soon as it is whole; empty before.

    >>> job_in(b"Submitted batch job 12\n"), job_in(b"12;east\n"), job_in(b"Submitted batch job 1")
    ('12', '12', '')
    """
    found = _JOB.search(said)
    return found[1].decode() if found else ""


def _pass_on(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError:
        # Nobody reads any more; the job is submitted, and its record is to be kept all the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _accepted(found: Placed, job: str) -> None:
    _say_problems(found)
    recorded = Recorded(
        unix=_CLOCK.unix(), by="sbatch", ask=found.ask, decision=found.decision, done=found.submission.argv
    )
    try:
        append(job_folder(found.config.state, job), recorded)
        if found.again is not None:
            keep(job_folder(found.config.state, job), found.again)
    except OSError as problem:
        where = problem.filename or found.config.state
        words = f"job {job} is submitted; why it was placed so could not be noted: {where}: {problem.strerror}"
        click.echo(f"deeplink: {words}", err=True)
        return
    may_improve = found.decision.why in _MAY_IMPROVE and bool(found.config.watch)
    if found.decision.kind is not HintKind.NOTHING or may_improve:
        from deeplink.scheduler.planner.background import ensure_planner

        with contextlib.suppress(
            DeepLinkError, OSError
        ):  # the job is submitted; without one its wish stays as it is
            ensure_planner(found.config.state)


def _say_problems(found: Placed) -> None:
    """Say what the user can do something about: a limit that is in the way, data that is not known of."""
    if found.decision.why is Why.IMPOSSIBLE:
        click.echo(f"deeplink: {found.decision.words}", err=True)
    if found.ask.data:
        for note in found.decision.notes:
            click.echo(f"deeplink: {note}", err=True)


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
    from deeplink.scheduler.planner.cluster_state import SurveyedCluster
    from deeplink.scheduler.planner.loop import read_queue
    from deeplink.scheduler.planner.reconcile import kept_before

    ground = SurveyedCluster(around.now, around.site, lambda _ask, weighed, _kept: weighed.decision)
    return kept_before(
        ask, read_queue(partial(run, timeout_s=TRIAL_S)), ground, ask.partition or around.now.default
    )


def machines_of(config: Config) -> MachineSpeeds:
    """Return how fast the site's machines are; for who looks after waiting jobs, too."""
    if config.model is None:
        return MachineSpeeds()
    from deeplink.scheduler.model.stored import constants_from

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
        return trial_of(done.stderr, _unfold)

    return ask


def residency_of(names: tuple[str, ...], config: Config) -> tuple[DataResidency, tuple[str, ...]]:
    """Return where the job's data lies, all its datasets together, and which nobody knows of."""
    if not names:
        return DataResidency(), ()
    from deeplink.cache.holding.summary import UnknownHoldingError, held

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
    from deeplink.cli.topology_reading import read_all
    from deeplink.scheduler.placement.speeds import slow_of
    from deeplink.scheduler.topology.tree import fabric_of
    from deeplink.scheduler.wish.site import Ties

    network = read_all((path,), None, (), ()).network
    slow = slow_of(network)
    return Ties(fabric_of(network), slow.speeds, slow.dead)


def _switches() -> Ties:
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.topology.graph import fabric_from_switches
    from deeplink.scheduler.wish.site import Ties
    from deeplink.scheduler.wish.survey import ANSWER_S

    def run(argv: object, /, *, timeout_s: float = ANSWER_S) -> str:
        return command.run(argv, timeout_s=min(timeout_s, ANSWER_S))  # type: ignore[arg-type]

    return Ties(fabric_from_switches(Slurm(run).topology()))


def _unfold(text: str) -> tuple[NodeName, ...]:
    from deeplink.scheduler.slurm.nodeset import unfold

    return unfold(text)
