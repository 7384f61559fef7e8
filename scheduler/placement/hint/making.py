"""From what a job asks to a decision: survey, weigh, and ask Slurm itself before nodes are named."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from deeplink.core.clock import wait_until
from deeplink.core.descriptors import try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.publish import kept_object, write_unsynced
from deeplink.scheduler.placement.hint import cluster_survey
from deeplink.scheduler.placement.hint.ask import ARGUMENTS, time_text
from deeplink.scheduler.placement.hint.cluster_survey import KnownFabric, Ties
from deeplink.scheduler.placement.hint.decide import (
    MachineSpeeds,
    Surroundings,
    decide,
    nothing,
    other_shapes,
    tried,
    unasked,
)
from deeplink.scheduler.placement.hint.decision import Decision, HintKind, Why
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm.command import CommandTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.hint.cluster_survey import ClusterState
    from deeplink.scheduler.placement.hint.decide import Trial, Weighed
    from deeplink.scheduler.placement.hint.decision import Ask
    from deeplink.scheduler.slurm.command import Runner

ANSWER_S = 3.0
"""How long slurmctld may take to answer here: a hint is not worth more, and sbatch itself waits longer."""
SWITCHES_KEPT_S = 600.0
"""So old may be what Slurm said of its switches; they change when an administrator moves a cable."""
LOCK_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a survey comes from."""

    run: Runner  # runs Slurm's commands
    clock: Clock  # for the age of what is kept
    folder: Path  # where it is kept
    cluster: str  # tells this cluster's files from another one's in the same home (SLURM_CONF, say)
    topology: Path | None  # the site's own description of its fabric; None for Slurm's
    compiled: Callable[[Path], Ties]  # reads that description
    switches: Callable[[], Ties]  # asks Slurm for its switches


def survey(sources: Sources) -> tuple[ClusterState, KnownFabric]:
    """Return the cluster's nodes and its fabric."""
    switches = _Switches(sources)
    switches.renew_if_old()
    now = cluster_survey.parse(sources.run(ARGUMENTS, timeout_s=ANSWER_S))
    slurm, said = switches.result(now)
    notes = [said] if said else []
    ties, trouble = _site(sources, slurm)
    return now, KnownFabric(ties, slurm.fabric, (*notes, *trouble))


def _key(text: str) -> str:
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in text)[-100:]


def _keep(path: Path, document: dict[str, Any]) -> None:
    with suppress(OSError):  # it is asked for again next time
        write_unsynced(path, json.dumps(document).encode())


class _Switches:
    """What Slurm knows of its switches: from the file, asked for beside the survey where that is old."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._path = sources.folder / f"switches-{_key(sources.cluster)}.json"
        self._ties: Ties | None = None
        self._problem = ""
        self._asking: threading.Thread | None = None
        kept = kept_object(self._path)
        age = sources.clock.unix() - kept.get("unix", 0.0) if isinstance(kept.get("unix"), float) else -1.0
        self._old = not 0.0 <= age < SWITCHES_KEPT_S
        with suppress(ValueError, KeyError):
            self._ties = Ties.parse(kept["ties"])

    def renew_if_old(self) -> None:
        if self._old or self._ties is None:
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        try:
            ties = self._sources.switches()
        except DeepLinkError as problem:
            self._problem = f"Slurm's switches are not known: {problem}"
            return
        self._ties = ties
        _keep(self._path, {"unix": self._sources.clock.unix(), "ties": ties.document()})

    def result(self, now: ClusterState) -> tuple[Ties, str]:
        if self._asking is not None:
            self._asking.join(ANSWER_S + 1.0)  # what it waits for is bounded itself
        elif (
            self._ties is not None
            and self._ties.fabric.paths
            and now.nodes.keys() - self._ties.fabric.paths.keys()
        ):
            self._ask()  # there are nodes that were not there then
        return self._ties or Ties(), self._problem


def _site(sources: Sources, slurm: Ties) -> tuple[Ties, list[str]]:
    """Return the ties that placement weighs by, and what went wrong on the way."""
    if sources.topology is None:
        return slurm, []
    try:
        status = sources.topology.stat()
    except OSError as problem:
        return slurm, [f"{sources.topology}: {problem.strerror or problem}; Slurm's switches are used"]
    stamp = [str(sources.topology), status.st_mtime_ns, status.st_size, status.st_ino]
    path = sources.folder / f"topology-{_key(str(sources.topology))}.json"
    kept = kept_object(path)
    if kept.get("stamp") == stamp:
        with suppress(ValueError, KeyError):
            return Ties.parse(kept["ties"]), []
    try:
        ties = sources.compiled(sources.topology)
    except DeepLinkError as problem:
        return slurm, [f"{sources.topology}: {problem}; Slurm's switches are used"]
    if not ties.fabric.paths:
        return slurm, [f"{sources.topology}: no node hangs on a switch there; Slurm's switches are used"]
    _keep(path, {"stamp": stamp, "ties": ties.document()})
    return ties, []


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a decision is made with."""

    sources: Sources  # of the survey
    # asks Slurm what it would do with the job, given these further options of sbatch
    trial: Callable[[tuple[str, ...]], Trial]
    agreed: Callable[[], str]  # why no one would look after a hint by name; empty where somebody agreed to
    # returns the nodes that waiting jobs will get; None where one may be given any of the free ones
    kept: Callable[[Ask, Surroundings], frozenset[NodeName] | None]
    residency: DataResidency = field(default_factory=DataResidency)  # where the job's data lies
    notes: tuple[str, ...] = ()  # what is not known of it
    machines: MachineSpeeds = field(default_factory=MachineSpeeds)  # how fast they are


@contextmanager
def alone(folder: Path, clock: Clock) -> Iterator[bool]:
    """Be the only submission of this user that decides; tell whether that could be had in time."""
    try:
        private_folder(folder)
        file = (folder / "wishes.lock").open("w", encoding="utf-8")
    except OSError:
        yield False
        return
    with file:
        had = False
        with suppress(OSError):  # storage without locks
            had = wait_until(partial(try_lock, file.fileno()), clock, LOCK_WAIT_S)
        yield had


@dataclass(frozen=True, slots=True)
class HeldDecision:
    """A decision. Where nodes are named, no other submission of this user decides before `release`."""

    decision: Decision
    place: ExitStack = field(default_factory=ExitStack)  # is given up by `release`
    unreachable: bool = False  # whether slurmctld did not answer in time

    def release(self) -> None:
        """Let other submissions decide: the job is in the queue, or will not be."""
        self.place.close()


def options_of(decision: Decision, comment: str = "") -> tuple[str, ...]:
    """Return sbatch's options for a decision about a job with this comment of its user's."""
    if decision.kind is HintKind.NODES:
        # It takes time that most submissions need not spend.
        from deeplink.scheduler.placement.hint.cluster_survey import marked  # noqa: PLC0415

        return (f"--nodelist={','.join(decision.nodes)}", f"--comment={marked(comment, decision.nodes)}")
    if decision.kind is HintKind.SWITCHES:
        return (f"--switches={decision.switches}@{time_text(decision.patience_s)}",)
    return ()


def make(ask: Ask, means: Means, *, dry: bool = False) -> HeldDecision:
    """Decide which hint a job gets. Whatever cannot be had leads to no hint, with the reason."""
    if ask.no_wish:
        return HeldDecision(unasked(Why.NOT_UNDERSTOOD, ask.no_wish, means.notes))
    try:
        now, site = survey(means.sources)
    except DeepLinkError as problem:
        words = f"the cluster's state is not known: {problem}"
        silent = isinstance(problem, CommandTimeoutError)
        return HeldDecision(unasked(Why.UNKNOWN, words, means.notes), unreachable=silent)
    around = Surroundings(now, site, means.residency, frozenset(), means.notes, means.machines)
    weighed = decide(ask, around)
    with ExitStack() as place:
        stands = partial(_standing, ask=ask, around=around, means=means, place=None if dry else place)
        decision = tried(weighed, means.trial, stands)
        if dry:
            decision = replace(decision, notes=(*decision.notes, *other_shapes(ask, weighed, around)))
        kept = place.pop_all() if decision.kind is HintKind.NODES and not dry else ExitStack()
    return HeldDecision(decision, kept)


def _standing(
    weighed: Weighed, *, ask: Ask, around: Surroundings, means: Means, place: ExitStack | None
) -> Weighed:
    """Return the hint where it is looked after, on nodes that no waiting job will get; else none, with why."""
    problem = means.agreed()
    if problem:
        return without(weighed, Why.NOT_LOOKED_AFTER, problem)
    if place is not None and not place.enter_context(alone(means.sources.folder, means.sources.clock)):
        words = "another submission of yours decides now, or the state folder takes no writes"
        return without(weighed, Why.UNKNOWN, words)
    kept = means.kept(ask, around)
    if kept is None:
        return without(weighed, Why.STARTS_LATER, "a job before it may be given any of the free nodes")
    return decide(ask, replace(around, taken=kept)) if kept & {*weighed.decision.nodes} else weighed


def without(weighed: Weighed, why: Why, words: str) -> Weighed:
    """Return what was weighed with no hint, and why."""
    return replace(weighed, decision=nothing(weighed.decision, why, words))
