"""Health, rate and latency of cables and links, from what both ends tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.topology.network import Cable, DeviceHealth, End, FabricLink, Role, tier
from tests.scheduler.topology.fabrics import cables


@pytest.mark.parametrize(
    ("lower", "upper", "usual", "health"),
    [
        (None, None, None, DeviceHealth.UNKNOWN),
        (400.0, None, None, DeviceHealth.OK),
        (400.0, 400.0, None, DeviceHealth.OK),
        (400.0, 400.0, 400.0, DeviceHealth.OK),
        (400.0, 400.0, 200.0, DeviceHealth.OK),
        (16.0, 16.0, 100.0, DeviceHealth.DEGRADED),
        (400.0, 100.0, None, DeviceHealth.DEGRADED),
        (None, 100.0, 400.0, DeviceHealth.DEGRADED),
        (0.0, 400.0, 400.0, DeviceHealth.DOWN),
    ],
)
def test_a_cable_is_judged_by_what_both_ends_tell(
    lower: float | None, upper: float | None, usual: float | None, health: DeviceHealth
) -> None:
    cable = Cable(lower=End(gbps=lower), upper=End(gbps=upper), usual_gbps=usual)
    assert cable.health is health
    assert cable.gbps == min((rate for rate in (lower, upper) if rate is not None), default=None)


def test_what_the_source_says_of_health_counts() -> None:
    assert Cable(said=DeviceHealth.DOWN, lower=End(gbps=400.0)).health is DeviceHealth.DOWN


@given(st.lists(cables, min_size=1, max_size=4))
def test_a_link_is_as_bad_as_its_worst_cable_and_as_fast_as_all(drawn: list[Cable]) -> None:
    link = FabricLink("leaf", "spine", False, tuple(drawn))
    worst = next(
        health
        for health in (DeviceHealth.DOWN, DeviceHealth.DEGRADED, DeviceHealth.UNKNOWN, DeviceHealth.OK)
        if any(cable.health is health for cable in drawn)
    )
    assert link.health is worst
    told = [cable.gbps for cable in drawn if cable.gbps is not None]
    assert link.gbps == (sum(told) if told else None)
    assert link.latency_us == min(
        (cable.latency_us for cable in drawn if cable.latency_us is not None), default=None
    )
    assert link.compute == any(cable.role is Role.COMPUTE for cable in drawn)


def test_levels_have_names() -> None:
    assert [tier(level) for level in range(4)] == ["leaf", "spine", "core", "core"]
