"""What an operator's request would do now: read from Slurm and the journal, changing nothing. Thread-safe."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Severity
from deeplink.core.text import counted, sized
from deeplink.scheduler.journal.operations import OperationLog
from deeplink.scheduler.recovery.evidence import TAG
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.command import CommandError, Process, begun, ended, kill_group
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.slurm.states import LAUNCH_FAILED, JobState
from deeplink.scheduler.watch.operator_requests import (
    OF_DATASETS,
    OF_INCIDENTS,
    OF_JOBS,
    OF_NODES,
    OF_THE_WATCHDOG,
    OperationError,
    OperatorPlan,
    OperatorRequest,
    OperatorVerb,
    commands_of,
    reason_of,
    seen,
)
from deeplink.scheduler.watch.requeue import Requeuer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.journal.operations import OperationRecord
    from deeplink.scheduler.liveness.probe import Prober
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.command import Finished
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow

DRY_RUN_S = 60.0  # bound on what `deeplink prefetch` and `evict` say beforehand: each member is asked
GONE = "unknown to Slurm"
PAUSES = (OperatorVerb.PAUSE, OperatorVerb.UNPAUSE)
ACKNOWLEDGEMENTS = (OperatorVerb.ACKNOWLEDGE, OperatorVerb.REOPEN)


class LongRunner:
    """Runs commands of any length, which `close` ends. Thread-safe."""

    def __init__(self) -> None:
        self._running: set[Process[bytes]] = set()

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float) -> Finished:
        """Return how it ended; raise `CommandTimeoutError` where it did not."""
        process = begun(argv)
        self._running.add(process)
        try:
            return ended(process, argv, timeout_s=timeout_s)
        finally:
            self._running.discard(process)

    def close(self) -> None:
        """Kill what runs."""
        for process in tuple(self._running):
            kill_group(process)


def runnable(argv: Sequence[str]) -> list[str]:
    """Return a command as it is executed: `deeplink` is this release's, whatever PATH says."""
    return [sys.executable, "-m", "deeplink", *argv[1:]] if argv[0] == "deeplink" else list(argv)


def standing(log: OperationLog, verbs: tuple[OperatorVerb, OperatorVerb], target: str) -> OperationRecord | None:
    """Return the operation of the first verb that the second has not taken back since; None where none stands."""
    last = log.last_done(verbs, target)
    return last if last is not None and last.verb == verbs[0] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlanner:
    """Reads what requests depend on."""

    slurm: Slurm
    journal: Journal
    prober: Prober
    clock: Clock
    acts: bool  # or it only observes
    run: LongRunner = field(default_factory=LongRunner)

    @property
    def log(self) -> OperationLog:
        """What people asked for."""
        return OperationLog(self.journal)

    def plan(self, request: OperatorRequest, person: str) -> OperatorPlan:
        """Return what would be done now; raises `CommandTimeoutError` where Slurm does not answer."""
        verb = request.verb
        if verb in OF_NODES:
            made = self._node(request, person)
        elif verb in OF_JOBS:
            made = self._job(request, person)
        elif verb in OF_DATASETS:
            made = self._dataset(request, person)
        else:
            made = self._record(request)
        if self.acts or verb in OF_INCIDENTS:
            return made
        refused = made.refused or "this watchdog only observes: it was not started with --act"
        return replace(made, refused=refused, remedy=made.remedy or "Run the command yourself.")

    # Nodes.

    def _node(self, request: OperatorRequest, person: str) -> OperatorPlan:
        row = self._node_row(request.target)
        state = "down" if row.down else "drained" if row.drained else "in service"
        plan = OperatorPlan(
            request=request,
            saw=seen({"state": state, "reason": row.reason}),
            commands=commands_of(request, person),
            remarks=() if row.responding else ("Slurm does not hear from it",),
        )
        if request.verb is OperatorVerb.DRAIN:
            if not row.drained:
                return plan
            whose = "we" if self._is_ours(row) else row.reason_by or "somebody"
            return replace(plan, refused=f"node {row.name} is drained already, {whose} said: {row.reason}")
        if state == "in service":
            return replace(plan, refused=f"node {row.name} is in service")
        return self._resumed(plan, row)

    def _resumed(self, plan: OperatorPlan, row: NodeRow) -> OperatorPlan:
        remedy = "With force it is resumed all the same."
        if not self._is_ours(row):
            problem = f"not we took node {row.name} out of service but {row.reason_by or 'Slurm'}: "
            problem += row.reason or "no reason given"
            remedy = f"Ask {row.reason_by or 'who did'}. {remedy}"
        elif ill := self._findings(row.name):
            problem = f"the checks of node {row.name} still find: {ill}"
        else:
            return plan
        if plan.request.force:
            return replace(plan, remarks=(*plan.remarks, problem))
        return replace(plan, refused=problem, remedy=remedy)

    def _node_row(self, name: str) -> NodeRow:
        try:
            found = self.slurm.nodes([name])
        except CommandError as refused:
            if "not found" not in refused.stderr + str(refused):
                raise
            found = []
        if len(found) != 1:
            raise OperationError(f"Slurm knows no node {name}", remedy="`sinfo -N` lists them.")
        return found[0]

    def _is_ours(self, row: NodeRow) -> bool:
        """Whether we took it out of service: the watchdog by itself, or an operator through it."""
        if row.reason.startswith(TAG):
            return row.name in self.journal.drained()
        last = self.log.last_done((OperatorVerb.DRAIN,), row.name)
        return last is not None and row.reason == reason_of(last.person, last.why)

    def _findings(self, name: NodeName) -> str:
        grave = {Severity.WARNING, Severity.ERROR}
        found = [each for node in self.journal.nodes() if node.name == name for each in node.health]
        return "; ".join(f"{each.check}: {each.text}" for each in found if each.severity in grave)

    # Jobs.

    def _job(self, request: OperatorRequest, person: str) -> OperatorPlan:
        try:
            row = self.slurm.job(JobAddress.of_label(request.target))
        except JobVanishedError as gone:
            unknown = seen({"state": GONE})
            return OperatorPlan(request=request, saw=unknown, refused=str(gone), remedy=gone.remedy)
        held = row.held or row.reason == LAUNCH_FAILED
        facts = {"state": row.state.value, "restarts": str(row.restarts), "held": row.reason if held else ""}
        plan = OperatorPlan(
            request=request,
            saw=seen({**facts, "nodes": fold(row.nodes)}),
            commands=commands_of(request, person),
            remarks=(f"{row.name} of {row.user}, {row.state.value.lower()}",),
        )
        if row.state.final:
            return replace(plan, refused=f"job {row.label} has ended: {row.state.value}")
        if request.verb is OperatorVerb.RELEASE and not held:
            return replace(plan, refused=f"job {row.label} is not held: {row.state.value}, {row.reason}")
        return self._requeued(plan, row) if request.verb is OperatorVerb.REQUEUE else plan

    def _requeued(self, plan: OperatorPlan, row: JobRow) -> OperatorPlan:
        requeuer = Requeuer(slurm=self.slurm, prober=self.prober, clock=self.clock, say=lambda _line: None)
        if row.held or (row.state is JobState.PENDING and row.reason == LAUNCH_FAILED):
            remedy = "Release lets it go."
            return replace(plan, refused=f"job {row.label} waits, and is held", remedy=remedy)
        try:
            requeuer.check(row, ())
        except DeepLinkError as problem:
            return replace(plan, refused=str(problem), remedy=problem.remedy)
        return replace(plan, commands=tuple(map(tuple, requeuer.commands(row, ()))))

    # Datasets: the scheduler does not know the cache. Its commands say what they would do.

    def _dataset(self, request: OperatorRequest, person: str) -> OperatorPlan:
        (argv,) = commands_of(request, person)
        done = self.run(runnable([*argv, "--dry-run", "--json"]), timeout_s=DRY_RUN_S)
        try:
            said = [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
        except ValueError:
            said = []
        plan = OperatorPlan(request=request, saw=seen({"state": "unknown"}), commands=(argv,))
        evicts = request.verb is OperatorVerb.EVICT
        if not said or (done.code and not evicts):
            problem = done.stderr.strip() or f"{shlex.join(argv)} exited {done.code}"
            return replace(plan, refused=problem.removeprefix("deeplink: "), remedy="Is it the name of a dataset?")
        # That one member does not answer hinders no other: it is a remark.
        facts, remarks = _evicted(said[0]) if evicts else _warmed(said)
        if evicts and not said[0]["nodes"]:
            return replace(plan, refused="; ".join(remarks) or "no node answered", remedy="No node answered.")
        return replace(plan, saw=seen(facts), remarks=remarks)

    # What only the journal knows.

    def _record(self, request: OperatorRequest) -> OperatorPlan:
        if request.verb in OF_THE_WATCHDOG:
            stands = standing(self.log, PAUSES, request.target)
            facts = {"watchdog": f"paused by {stands.person}" if stands else "going"}
            wanted, done = OperatorVerb.PAUSE, "paused"
        else:
            incident = self.journal.incident(request.target)
            if incident is None:
                remedy = "`deeplink incidents` lists them."
                raise OperationError(f"no incident {request.target} on record", remedy=remedy)
            request = replace(request, target=incident.id)
            stands = standing(self.log, ACKNOWLEDGEMENTS, incident.id)
            by = f"by {stands.person}" if stands else ""
            facts = {"outcome": incident.outcome.value, "action": incident.action, "acknowledged": by}
            wanted, done = OperatorVerb.ACKNOWLEDGE, "acknowledged"
        plan = OperatorPlan(request=request, saw=seen(facts), remarks=("only the journal is written",))
        if request.verb is wanted and stands:
            return replace(plan, refused=f"{done} already, by {stands.person}: {stands.why or 'no reason given'}")
        if request.verb is not wanted and not stands:
            return replace(plan, refused=f"not {done}")
        return plan


def _warmed(said: Sequence[dict[str, Any]]) -> tuple[dict[str, str], tuple[str, ...]]:
    facts: dict[str, str] = {}
    remarks: list[str] = []
    for each in said:
        name = f"{each['name']}@{str(each['version'])[:12]}"
        bring = {node: int(count) for node, count in dict(each["to_bring"]).items()}
        facts[name] = f"{counted(sum(bring.values()), 'shard')} to bring onto {fold(bring) or 'no node'}"
        remarks.append(f"{name}: {facts[name]}, {sized(each['bytes'])}")
        remarks += [f"{node} has no agent that answers" for node in each["silent"]]
    return facts, tuple(remarks)


def _evicted(said: dict[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    nodes: dict[str, list[dict[str, Any]]] = said["nodes"]
    print_ = hashlib.sha256()
    remarks: list[str] = []
    for node, shards in sorted(nodes.items()):
        gone = [each for each in shards if each["outcome"] == "would go"]
        size = sized(sum(int(each["bytes"]) for each in gone))
        kept = f", {counted(len(shards) - len(gone), 'shard')} stay" if len(shards) > len(gone) else ""
        remarks.append(f"{node}: {counted(len(gone), 'shard')} would go, {size}{kept}")
        print_.update("".join(f"{node}/{each['shard']}/{each['outcome']};" for each in shards).encode())
    return {"shards": print_.hexdigest()[:16], "nodes": fold(nodes)}, (*remarks, *map(str, said["problems"]))
