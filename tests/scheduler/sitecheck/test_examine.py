"""An examination: what is asked of whom, and a watchdog that is really asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.config import Config
from deeplink.core.finding import Severity
from deeplink.core.metrics import WatchMetrics
from deeplink.rpc.tokens import new_token
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.liveness.watchdog_client import asked_watchdog
from deeplink.scheduler.sitecheck import examine, part
from deeplink.scheduler.sitecheck import part as here
from deeplink.scheduler.sitecheck.examine import DoctorRequest, Examination, nodes_to_look_at
from deeplink.scheduler.sitecheck.site_evidence import SiteEvidence
from deeplink.scheduler.slurm.command import CommandError, CommandMissingError
from deeplink.scheduler.slurm.states import NodeFlag, NodeState
from deeplink.scheduler.watch.server import WatchServicer, watch_server
from tests.scheduler.sitecheck.sites import RECORDED, found, site, worst
from tests.scheduler.watch.callers import TOKEN, authorizer
from tests.waiting import LIMIT_S

ANSWERS = {
    "config": "6-unfit/scontrol-show-config.txt",
    "node": "1-busy/scontrol-show-node-o.txt",
    "partition": "6-unfit/scontrol-a-show-partition-o.txt",
    "topology": "1-busy/scontrol-show-topology.txt",
}


def slurm(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
    """Answer as a real slurmctld once did."""
    if argv[0] == "squeue":
        return "n[1-2]\nn2\n"
    return next((RECORDED / file).read_text() for word, file in ANSWERS.items() if word in argv)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(store=tmp_path / "store", state=tmp_path, catalog=tmp_path)


def examined(config: Config, wish: DoctorRequest, env: dict[str, str] | None = None) -> SiteEvidence:
    told = Examination(config, wish, slurm, SystemClock(), lambda _: None, env or {}).evidence()
    assert told.problems.keys() <= {"hosts"}
    return told


def test_a_quick_one_asks_slurm_and_no_node(config: Config) -> None:
    told = examined(config, DoctorRequest(quick=True))
    assert not told.reports
    assert told.settings is not None
    assert told.settings.version == "22.05.8"
    assert [len(rows or ()) for rows in (told.nodes, told.partitions, told.switches)] == [8, 2, 7]
    assert told.suspended == ("n1", "n2", "n2")
    assert worst("versions-alike", told).text == "no node was looked at (--quick)"


def test_of_this_host_the_scripts_of_the_site_are_looked_at_too(config: Config) -> None:
    told = examined(config, DoctorRequest(here=True, disk_bytes=1 << 20))
    (report,) = told.reports.values()
    assert report.measured is not None
    assert report.measured.unread == ("/etc/slurm/epilog.sh",)  # of the recorded settings
    assert report.measured.disk is not None
    assert report.offset is None
    assert "deeplink doctor --nodes 2" in worst("store-private", told).text


def test_an_allocation_that_is_too_small_is_told(config: Config) -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}
    told = examined(config, DoctorRequest(nodes=3), inside)
    assert told.problems["hosts"] == "this allocation has 2 nodes, not 3"


def test_one_question_that_is_refused_leaves_the_other_answers(config: Config) -> None:
    def refusing(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if "node" in argv:
            raise CommandError(argv, 1, "slurm_load_node error: Access/permission denied")
        return slurm(argv, timeout_s=timeout_s)

    told = Examination(config, DoctorRequest(quick=True), refusing, SystemClock(), lambda _: None, {}).evidence()
    assert told.settings is not None
    assert told.nodes is None
    assert "permission denied" in worst("slurm-answers", told).text


def test_without_slurm_no_node_is_said_to_be_busy(config: Config) -> None:
    def missing(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        raise CommandMissingError(argv[0])

    told = Examination(config, DoctorRequest(), missing, SystemClock(), lambda _: None, {}).evidence()
    assert told.problems["hosts"] == "Slurm did not tell its nodes (see slurm-answers)"
    (finding, squeue) = sorted(found("slurm-answers", told), key=lambda one: one.text)
    assert finding.text.startswith("Slurm was asked for its nodes, partitions, settings, topology: scontrol ")
    assert "squeue" in squeue.text


def test_nodes_of_a_cloud_that_are_up_are_looked_at_too() -> None:
    idle = (site().nodes or ())[0]
    flags = [set(), {NodeFlag.CLOUD}, {NodeFlag.DYNAMIC_NORM}, {NodeFlag.CLOUD, NodeFlag.POWERED_DOWN}]
    rows = tuple(replace(idle, state=NodeState.IDLE, flags=frozenset(each)) for each in flags)
    assert nodes_to_look_at(site(nodes=rows)) == 3


def test_a_mount_that_hangs_here_is_told_and_holds_nobody_up(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(part, "looked_at", lambda _path: never.wait(60))
    monkeypatch.setattr(here, "looked_at", lambda _path: never.wait(60))
    monkeypatch.setattr(examine, "HERE_S", 0.2)
    monkeypatch.setattr(examine, "SWEEP_S", 0.2)
    told = Examination(config, DoctorRequest(here=True), slurm, SystemClock(), lambda _: None, {}).evidence()
    never.set()
    assert "is a mount dead?" in told.problems["hosts"]
    assert worst("store-usable", told).severity is Severity.UNKNOWN


@pytest.mark.usefixtures("config")
def test_a_watchdog_is_asked_with_the_token(tmp_path: Path) -> None:
    clock = ManualClock()
    with Journal(tmp_path / "watch.sqlite") as journal:
        servicer = WatchServicer(
            journal, HeartbeatTable(), clock, WatchMetrics(CollectorRegistry()), authorizer(journal, clock)
        )
        bound = watch_server("127.0.0.1:0", servicer)
        bound.server.start()
        try:
            address = f"127.0.0.1:{bound.port}"
            assert asked_watchdog(address, TOKEN) == asked_watchdog(address, "") == ""
            assert "refuses our token" in asked_watchdog(address, new_token())
        finally:
            bound.server.stop(0).wait(LIMIT_S)
    assert asked_watchdog(address, "").startswith("unavailable: ")


def test_a_watchdog_whose_token_cannot_be_read_is_not_asked(config: Config, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o644)
    told = examined(replace(config, watch="head:1", watch_token_file=token), DoctorRequest(quick=True))
    assert told.watch_answer is None
    assert os.access(token, os.R_OK)
