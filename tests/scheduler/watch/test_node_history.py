"""What only shows over time, told by rows as Slurm prints them."""

from __future__ import annotations

from deeplink.core.finding import Finding, Severity
from deeplink.core.types import NodeName
from deeplink.scheduler.liveness.heartbeats import AgentReport
from deeplink.scheduler.recovery.evidence import WatchPolicy
from deeplink.scheduler.slurm.parse import NodeRow, parse_nodes
from deeplink.scheduler.watch.memory import (
    BootHistory,
    HealthHistory,
    boot_unix,
)

N1 = NodeName("n1")
POLICY = WatchPolicy()


def row(
    boot: str = "2026-11-22T11:30:01", started: str = "2026-11-22T11:30:05", state: str = "IDLE", used: int = 0
) -> list[NodeRow]:
    return parse_nodes(
        f"NodeName=n1 NodeAddr=n1 NodeHostName=n1 State={state} BootTime={boot} SlurmdStartTime={started} "
        f"Gres=gpu:2 GresUsed=gpu:{used}\n"
    )


def test_a_boot_is_a_later_boot_time_and_a_corrected_clock_is_none() -> None:
    boots = BootHistory()
    boots.note(row(), 10.0)
    assert boots.of(N1, 11.0, 0.0)[:2] == (None, None)
    boots.note(row("2026-11-22T11:30:04"), 12.0)
    boots.note(row("None"), 13.0)  # after a resume, until it registers
    boots.note(row("2026-11-22T11:29:00"), 14.0)
    assert boots.of(N1, 15.0, 0.0).booted_s is None
    boots.note(row("2026-11-22T11:45:00", "2026-11-22T11:45:03"), 20.0)
    assert boots.of(N1, 21.0, 0.0)[:2] == (1.0, 1.0)


def test_a_slurmd_is_as_old_as_its_node_says_unless_that_is_still_to_come() -> None:
    boots, now = BootHistory(), boot_unix("2026-11-22T11:31:05")
    boots.note(row(started="None"), 9.0)
    assert boots.of(N1, 0.0, now).slurmd_age_s is None
    boots.note(row(), 10.0)
    assert boots.of(N1, 0.0, now).slurmd_age_s == 60.0
    assert boots.of(N1, 0.0, now - 3_600.0).slurmd_age_s is None, "its clock is ahead of ours"


def test_a_node_is_well_as_long_as_its_standing_agent_keeps_saying_so() -> None:
    wellness = HealthHistory()
    well = AgentReport((), 1.0, 1.0, "a")
    sick = AgentReport((Finding(check="disk", severity=Severity.WARNING, text="slow"),), 1.0, 1.0, "a")
    wellness.note({N1}, {N1: well}, 10.0, POLICY)
    wellness.note({N1}, {N1: well}, 15.0, POLICY)
    assert wellness.age_s(N1, 20.0) == 10.0
    for word in (
        sick,
        AgentReport((), 60.0, 60.0, "a"),
        AgentReport((), None, 1.0, "a"),
        AgentReport((), 1.0, None, "a"),
    ):
        wellness.note({N1}, {N1: word}, 21.0, POLICY)
        assert wellness.age_s(N1, 30.0) == 0.0
        wellness.note({N1}, {N1: well}, 31.0, POLICY)
        assert wellness.age_s(N1, 31.0) == 0.0, "again"
