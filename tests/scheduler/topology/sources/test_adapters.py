"""Whose an adapter is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.topology.network import Role
from deeplink.scheduler.topology.sources.gathering import is_name
from deeplink.scheduler.topology.sources.ibnet import family, host_of, most_common, read_ibnetdiscover
from tests.scheduler.topology.fabrics import Plug, ibnetdiscover


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ("gpu-01 HCA-1", Role.COMPUTE),
        ("gpu-01.site.example mlx5_0", Role.COMPUTE),
        ("gpu-01", Role.COMPUTE),
        ("ib01 ibp3s0", Role.COMPUTE),
        ("moss1 HCA-1", Role.COMPUTE),
        ("oss1 HCA-1", Role.STORAGE),
        ("ceph-7", Role.STORAGE),
        ("gpu-01 storage0", Role.STORAGE),
        ("R1-CUFM-02 mlx5_0", Role.MANAGEMENT),
        ("Mellanox Technologies Aggregation Node", Role.AGGREGATION),
        ("MT4129 ConnectX7   Mellanox Technologies", Role.UNNAMED),
        ("mlx5_0", Role.UNNAMED),
        ("ubuntu mlx5_1", Role.UNNAMED),
        ("localhost.localdomain HCA-1", Role.UNNAMED),
        ("(none) HCA-1", Role.UNNAMED),
        ("a host of words", Role.UNNAMED),
        ("", Role.UNNAMED),
    ],
)
def test_whose_an_adapter_is_is_told_by_its_description(said: str, role: Role) -> None:
    assert host_of(said, ()).role is role
    text = ibnetdiscover({"S1": "leaf", "H1": said}, [Plug(("S1", 1), ("H1", 1))])
    network = read_ibnetdiscover(text, "fabric").network
    if role is Role.COMPUTE:
        assert list(network.nodes) == [said.split(maxsplit=1)[0].partition(".")[0]]
        assert network.others == ()
    else:
        assert network.nodes == {}
        assert [other.role for other in network.others] == [role]


def test_a_pattern_makes_an_adapter_storages() -> None:
    assert host_of("gpu-1 mlx5_2", ("* mlx5_2",)).role is Role.STORAGE
    assert host_of("gpu-1 mlx5_1", ("* mlx5_2",)).role is Role.COMPUTE


@given(st.text(max_size=40))
def test_any_description_is_somebodys_or_nobodys(said: str) -> None:
    host = host_of(said, ())
    assert host.role is not Role.COMPUTE or is_name(host.name)


@given(st.lists(st.sampled_from([100.0, 200.0, 400.0]), min_size=1))
def test_the_most_common_rate_wins_and_the_highest_among_equals(rates: list[float]) -> None:
    found = most_common(rates)
    assert all((rates.count(found), found) >= (rates.count(rate), rate) for rate in rates)


def test_hosts_named_alike_are_a_family() -> None:
    assert family("a08-p1-dgx-04-c17") == family("b1-p22-dgx-9-c3").replace("b#", "a#")
    assert family("login1") != family("gpu1")
