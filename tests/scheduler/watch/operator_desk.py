"""A watchdog's actor for operators over a small Slurm, for tests: nothing runs but what a test calls."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.journal.operations import OperationLog, OperationRecord
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from deeplink.scheduler.watch.authorizer import Caller, TokenMint
from deeplink.scheduler.watch.operator_actions import OperatorActor
from deeplink.scheduler.watch.operator_plan import OperatorPlanner
from deeplink.scheduler.watch.operator_requests import OperatorPlan, OperatorRequest
from deeplink.scheduler.watch.server import OperationsServicer, WatchServicer, watch_server
from tests.scheduler.watch.callers import MINT, NEVER, authorizer
from tests.scheduler.watch.slurm_machine import Machine

OPERATORS = MINT.token(Caller(uid=os.getuid(), operator=True), NEVER)
EXPIRED = MINT.token(Caller(uid=os.getuid(), operator=True), 1_000.0)
FORGED = TokenMint("another secret").token(Caller(uid=0, operator=True), NEVER)


@dataclass
class ReasonedMachine(Machine):
    """The small Slurm, with reasons and who gave them; nodes come back into service; a held job is released."""

    reasons: dict[str, str] = field(default_factory=dict)
    by: str = "root"
    silent: bool = False

    @override
    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.silent:
            raise CommandTimeoutError(argv, timeout_s)
        return super().__call__(argv, timeout_s=timeout_s)

    @override
    def _node(self, name: str) -> str:
        if name not in self.states:
            raise CommandError(["scontrol", "show", "node", name], 1, f"Node {name} not found")
        reason = self.reasons.get(name, "")
        return super()._node(name) + (f" Reason={reason} [{self.by}@2026-11-20T17:01:31]" if reason else "")

    @override
    def _obey(self, argv: list[str]) -> str:
        if argv[0] == "scancel":
            self.jobs[int(argv[-1])].state = "CANCELLED"
            return ""
        return super()._obey(argv)

    @override
    def _tell_node(self, argv: list[str]) -> str:
        if not self.rights:
            raise CommandError(argv, 1, "slurm_update error: Invalid user id")
        fields = dict(word.split("=", 1) for word in argv[2:])
        name = fields["nodename"]
        if fields["state"] == "resume":
            self.states[name], self.reasons[name] = "IDLE", ""
        else:
            self.states[name], self.reasons[name] = "IDLE+DRAIN", fields.get("reason", "")
        return ""


@dataclass
class Desk:
    """The actor, and what a person at the console does with it."""

    journal: Journal
    machine: ReasonedMachine = field(default_factory=ReasonedMachine)
    clock: ManualClock = field(default_factory=ManualClock)
    said: list[str] = field(default_factory=list)
    acts: bool = True
    actor: OperatorActor = field(init=False)
    log: OperationLog = field(init=False)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin as after a kill: nothing is remembered but the journal."""
        slurm, self.log = Slurm(self.machine), OperationLog(self.journal)
        planner = OperatorPlanner(
            slurm=slurm,
            journal=self.journal,
            prober=self.machine,
            clock=self.clock,
            acts=self.acts,
        )
        self.actor = OperatorActor(
            planner=planner,
            metrics=WatchMetrics(CollectorRegistry()),
            say=self.said.append,
            wake=lambda: None,
        )

    def plan(
        self, verb: str, target: str, *, force: bool = False, why: str = "fan", person: str = "ada"
    ) -> OperatorPlan:
        return self.actor.planner.plan(OperatorRequest.of(verb, target, why=why, force=force), person)

    def submit(self, plan: OperatorPlan, *, name: str = "", saw: str = "", person: str = "ada") -> str:
        """Agree to a plan; return the request's id."""
        name = name or f"request-{next(self._names)}"
        self.actor.submit(name, plan.request, saw or plan.saw, person, wait_s=0.0)
        return name

    def record(self, name: str) -> OperationRecord:
        found = self.log.of(name)
        assert found is not None
        return found

    def act(
        self, verb: str, target: str, *, force: bool = False, why: str = "fan", person: str = "ada"
    ) -> OperationRecord:
        """Ask, agree, and let the loop come round; return what is on record."""
        name = self.submit(self.plan(verb, target, force=force, why=why, person=person), person=person)
        self.actor.work()
        return self.record(name)


@contextmanager
def listening(desk: Desk) -> Iterator[str]:
    """Serve the desk's watchdog, its loop going round; give its address."""
    allowed = authorizer(desk.journal, desk.clock)
    servicer = WatchServicer(
        desk.journal, HeartbeatTable(), desk.clock, WatchMetrics(CollectorRegistry()), allowed
    )
    bound = watch_server("127.0.0.1:0", servicer, OperationsServicer(desk.actor, allowed))
    bound.server.start()
    over = threading.Event()

    def loop() -> None:
        while not over.wait(0.01):
            desk.actor.work()

    thread = threading.Thread(target=loop)
    thread.start()
    yield f"127.0.0.1:{bound.port}"
    over.set()
    thread.join()
    bound.server.stop(0.5).wait(2.0)
