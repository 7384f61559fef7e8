"""An agent carries its node's health: real agents, real checks, a disk that really fills up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from deeplink.agent.agent import Agent, AgentSettings
from deeplink.agent.node_heartbeat import NodeHealth
from deeplink.core.clock import SystemClock
from deeplink.core.config import Config, ConfigError
from deeplink.core.types import NodeName
from deeplink.rpc.channel import open_channel
from deeplink.scheduler.node.reading import HighWaterMarks, file_in
from deeplink.scheduler.node.watching import OF_A_JOB, CheckPaths, boot_id_of, checks_of
from deeplink.v1 import node_pb2, node_pb2_grpc
from tests.faults.disks import disk_in_memory
from tests.waiting import LIMIT_S, until

TOKEN = "a token for this test"  # noqa: S105 - opens nothing
QUICK = "interval_s = 0.1\nbad = 2\ngood = 2\n"


def config(root: Path, text: str = "") -> Config:
    (root / "health.toml").write_text(text)
    (root / "boot_id").write_text("b-1\n")
    return Config(
        state=root / "state", store=root / "store", health_file=root / "health.toml", boot_id_file=root / "boot_id"
    )


def status(address: str) -> node_pb2.StatusReply:
    with open_channel(address, TOKEN) as channel:
        return node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_the_disk_that_fills_up_is_in_the_heartbeat_with_the_boot_and_goes_again(tmp_path: Path) -> None:
    text = f"[disk]\n{QUICK}min_free_bytes = 1_000_000\n" + "".join(
        f"[{name}]\noff = true\n" for name in ("memory", "clock", "network", "mount", "processes", "slurmd")
    )
    with disk_in_memory(tmp_path / "ssd", 4 << 20) as disk:
        settings = AgentSettings(
            node=NodeName("n0"),
            bind="127.0.0.1:0",
            token=TOKEN,
            store=disk.path / "store",
            config=config(tmp_path, text),
            of_job=True,
        )
        agent = Agent(settings)
        try:
            address = agent.start(Path("/unused")).address
            first = status(address)
            assert (first.boot_id, list(first.health)) == ("b-1", [])
            assert abs(first.unix - time.time()) < 60
            ballast = disk.fill()
            until(lambda: status(address).health)
            (finding,) = status(address).health
            assert (finding.check, finding.severity) == ("disk", "comment")
            ballast.unlink()
            until(lambda: not status(address).health)
        finally:
            agent.stop()


def test_a_jobs_agent_looks_at_what_is_cheap_and_keeps_nothing(tmp_path: Path) -> None:
    place = CheckPaths(node="n0", store=tmp_path, of_job=True)
    checks = checks_of(config(tmp_path, "[site.x]\ncommand = ['true']\n"), place, SystemClock())
    assert {check.name for check in checks} == OF_A_JOB
    for check in checks:
        if not check.absent:
            check.look()
            check.close()
    assert not (tmp_path / "state").exists()


def test_a_standing_agent_looks_at_everything_and_keeps_what_there_was(tmp_path: Path) -> None:
    place = CheckPaths(node="n0", store=tmp_path, env={})
    checks = checks_of(config(tmp_path, "[site.x]\ncommand = ['true']\n"), place, SystemClock())
    assert {check.name for check in checks} == OF_A_JOB | {"mount", "x"}
    for check in checks:
        if not check.absent:
            check.look()
            check.close()
    assert file_in(tmp_path / "state").exists()


def test_what_another_node_had_that_shares_the_home_or_another_job_is_not_missed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(host: str, **env: str) -> bool:
        monkeypatch.setattr("socket.gethostname", lambda: host)
        place = CheckPaths(node=host, store=tmp_path, once=True, env=env)
        (network,) = (one for one in checks_of(config(tmp_path), place, SystemClock()) if one.name == "network")
        return "fast9" in {complaint.subject for complaint in network.look().complaints}

    assert not gone("n0")
    HighWaterMarks(file_in(tmp_path / "state")).best("up fast9", 1.0)
    assert gone("n0")
    assert not gone("n1")
    assert not gone("n0", SLURM_PROCID="0"), "a job's task sees the job's share alone"


def test_settings_that_cannot_be_used_stop_a_standing_agent_and_not_a_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = config(tmp_path, "[dsik]\n")
    with pytest.raises(ConfigError, match="dsik"):
        NodeHealth(wrong, "n0", tmp_path, SystemClock(), of_job=False)
    health = NodeHealth(wrong, "n0", tmp_path, SystemClock(), of_job=True)
    assert "no such check" in caplog.text
    health.start("", node_pb2.StoreStatus)
    assert health.findings() == []
    health.stop()


def test_health_is_turned_off_by_the_configuration(tmp_path: Path) -> None:
    off = Config(health=False, boot_id_file=tmp_path / "absent")
    health = NodeHealth(off, "n0", tmp_path, SystemClock(), of_job=False)
    assert (health.findings(), health.boot_id) == ([], "")


def test_the_kernel_says_which_boot_it_is() -> None:
    assert len(boot_id_of(Config())) == 36
