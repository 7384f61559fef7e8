"""Nodes hinted by name are taken off jobs that wait for them, by a watchdog that says whose."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deeplink.core.clock import ManualClock
from deeplink.scheduler.jobs.job_view import me
from deeplink.scheduler.liveness.watchdog_client import BINDINGS, bindings_of
from deeplink.scheduler.placement.hint.cluster_survey import WAIT_S
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandMissingError, CommandTimeoutError
from deeplink.scheduler.watch.actor import (
    AGAIN_S,
    LOOK_S,
    MOST_REFUSALS,
    ROUND_S,
    Bindings,
    changes_all_jobs,
)


@dataclass
class Controller:
    """What squeue says of waiting jobs; who SlurmUser is, and what accounting knows of us."""

    queue: str = ""
    silent: bool = False
    refuses: bool = False
    hangs: bool = False
    takes_s: float = 0.0
    clock: ManualClock = field(default_factory=ManualClock)
    slurm_user: str = "slurm(64030)"
    level: str = ""
    accounting: str = "accounting_storage/slurmdbd"
    installed: bool = True
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        self.asked.append(tuple(argv))
        if self.silent:
            raise CommandTimeoutError(argv, timeout_s)
        if argv[0] == "squeue":
            return self.queue.replace("|", argv[-1].removeprefix("%A").partition("%")[0])
        if argv[0] == "sacctmgr":
            if not self.installed:
                raise CommandMissingError("sacctmgr")
            if not self.level:
                raise CommandError(argv, 1, "sacctmgr: error: Sending PersistInit msg: Connection refused")
            return f"{self.level}\n"
        if tuple(argv)[:2] == ("scontrol", "show"):
            said = f"AccountingStorageType   = {self.accounting}\n"
            return f"{said}SlurmUser               = {self.slurm_user}\nSlurmctldPort = 6817\n"
        self.clock.now += self.takes_s
        if self.hangs:
            raise CommandTimeoutError(argv, timeout_s)
        if self.refuses:
            raise CommandError(argv, 1, "Access/permission denied")
        return ""

    @property
    def updates(self) -> list[tuple[str, ...]]:
        return [argv for argv in self.asked if argv[:2] == ("scontrol", "update")]


def waits(
    job: int = 7, *, reason: str = "Resources", comment: str = "deeplink-wish=n[0-1]", user: str = "ada"
) -> str:
    return f"{job}|{job}|PENDING|{reason}|{user}|main|2|5|n[0-1]||(null)|(null)|{comment}|\n"


@dataclass
class Bench:
    controller: Controller = field(default_factory=Controller)
    said: list[str] = field(default_factory=list)
    served: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = self.controller.clock
        self.bindings = Bindings(
            slurm=Slurm(self.controller),
            clock=self.clock,
            say=self.said.append,
            serves=lambda service, well: self.served.append((service, well)),
        )

    def turn(self, rounds: int = 1, pause_s: float = LOOK_S) -> None:
        for _ in range(rounds):
            self.bindings.look()
            self.clock.now += pause_s


@pytest.fixture
def bench() -> Bench:
    return Bench(Controller(level="Operator"))


def test_nodes_that_slurm_did_not_start_a_job_on_are_taken_off_it(bench: Bench) -> None:
    bench.controller.queue = waits()
    bench.turn()
    assert bench.controller.updates == [("scontrol", "update", "jobid=7", "ReqNodeList=", "Comment=")]
    assert bench.served == [(BINDINGS, True)]
    assert len(bench.said) == 1


@pytest.mark.parametrize("reason", ["", "Priority", "BeginTime"])
def test_a_job_that_slurm_has_not_come_to_keeps_its_nodes_for_some_seconds(bench: Bench, reason: str) -> None:
    bench.controller.queue = waits(reason=reason)
    bench.turn()
    assert not bench.controller.updates
    bench.turn(int(WAIT_S / LOOK_S) + 1)
    assert bench.controller.updates


@pytest.mark.parametrize("comment", ["(null)", "mine", "deeplink-wish=n[0-2]"])
def test_nodes_that_a_user_named_stay(bench: Bench, comment: str) -> None:
    bench.controller.queue = waits(comment=comment)
    bench.turn(9)
    assert not bench.controller.updates


def test_a_refusal_is_not_asked_for_for_ever(bench: Bench) -> None:
    bench.controller.queue, bench.controller.refuses = waits(), True
    bench.turn(9)
    assert len(bench.controller.updates) == MOST_REFUSALS


def test_a_command_that_is_not_answered_is_no_refusal_and_ends_the_round(bench: Bench) -> None:
    bench.controller.queue, bench.controller.hangs = waits(7) + waits(8), True
    rounds = MOST_REFUSALS + 1
    bench.turn(rounds, AGAIN_S)
    assert {argv[2] for argv in bench.controller.updates} == {"jobid=7"}
    assert bench.served == [(BINDINGS, False)] * rounds
    bench.controller.hangs = False
    bench.turn()
    assert [argv[2] for argv in bench.controller.updates[-2:]] == ["jobid=7", "jobid=8"]
    assert bench.served[-1] == (BINDINGS, True)


def test_a_slow_controller_holds_a_round_for_no_longer_than_a_bound(bench: Bench) -> None:
    bench.controller.queue = "".join(waits(job) for job in range(7, 27))
    bench.controller.takes_s = ROUND_S / 2
    bench.turn()
    assert len(bench.controller.updates) == 2


def test_a_look_that_failed_is_not_made_again_at_once(bench: Bench) -> None:
    bench.controller.silent = True
    bench.turn(int(AGAIN_S / LOOK_S) + 1)
    assert len(bench.controller.asked) == 2


def test_while_slurm_is_silent_nothing_is_promised(bench: Bench) -> None:
    bench.turn()
    bench.controller.silent = True
    bench.turn()
    bench.bindings.unable()
    assert bench.served == [(BINDINGS, True), (BINDINGS, False), (BINDINGS, False)]


def test_without_an_operators_rights_it_promises_for_its_own_jobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    bench = Bench(Controller(level="None"))
    bench.controller.queue = waits()
    bench.turn()
    assert bench.served == [(bindings_of("4711"), True)]
    assert not bench.controller.updates
    bench.controller.queue = waits(comment="deeplink-wish=n[0-1]", user=me())
    bench.turn()
    assert bench.controller.updates


@pytest.mark.parametrize(
    ("controller", "rights"),
    [
        (Controller(installed=False), False),
        (Controller(accounting="accounting_storage/none"), False),
        (Controller(accounting="(null)"), False),
        (Controller(level="None"), False),
        (Controller(level="Operator"), True),
        (Controller(level="Administrator"), True),
        (Controller(slurm_user="deeplink(4711)"), True),
        (Controller(slurm_user="deeplink(47110)", level="None"), False),
    ],
)
def test_whose_jobs_it_may_change(monkeypatch: pytest.MonkeyPatch, controller: Controller, rights: bool) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert changes_all_jobs(Slurm(controller)) is rights


def test_rights_that_accounting_does_not_tell_yet_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    bench = Bench()
    bench.controller.queue = waits()
    bench.turn(pause_s=AGAIN_S)
    assert (bench.served, bench.controller.updates) == ([], [])
    bench.controller.level = "Operator"
    bench.turn()
    assert bench.served == [(BINDINGS, True)]
    assert len(bench.controller.updates) == 1
