"""Which fabric a launch goes by."""

from __future__ import annotations

import pytest

from deeplink.core.types import NodeName, format_members
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.shared_network import SiteFabric, fabric_below, near_hcas, with_domains, with_hcas
from deeplink.scheduler.topology.graph import Fabric
from deeplink.scheduler.topology.network import Gpu, Inside, Join, Joined, Nic
from deeplink.scheduler.topology.sources.slurm_topology import read_slurm

N0, N1 = NodeName("n0"), NodeName("n1")
TOLD = {N0: "core.leaf0.n0", N1: "core.leaf1.n1"}


def site(text: str) -> SiteFabric:
    return SiteFabric.of(read_slurm(text, "site.conf").network, "site.conf")


def never() -> Fabric:
    raise AssertionError("slurmctld is not asked")


def test_the_sites_own_word_comes_before_slurms() -> None:
    fabric = fabric_below(TOLD, site("SwitchName=rack Nodes=n[0-1]"), never)
    assert fabric.leaf(N0) == fabric.leaf(N1) != ()


def test_without_one_it_is_what_slurm_told_the_nodes() -> None:
    assert fabric_below(TOLD, None, never).path(N1) == ("core", "leaf1")


def test_where_nobody_told_the_nodes_slurm_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    asked = Fabric({N0: ("leaf",)})
    assert fabric_below(dict.fromkeys(TOLD, ""), None, lambda: asked) is asked
    assert "scontrol show topology lacks 1 node of the job (n1)" in caplog.text


def test_a_description_of_other_nodes_does_not_count_and_one_that_lacks_some_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert fabric_below(TOLD, site("SwitchName=rack Nodes=m[0-1]"), never).path(N1) == ("core", "leaf1")
    assert "site.conf has none of the job's nodes" in caplog.text
    assert fabric_below(TOLD, site("SwitchName=rack Nodes=n1"), never).path(N0) == ()
    assert "site.conf lacks 1 node of the job (n0)" in caplog.text


def inside(*nics: tuple[str, Join]) -> Inside:
    pairs = {("GPU0", f"NIC{place}"): Joined(join) for place, (_, join) in enumerate(nics)}
    cards = tuple(Nic(f"NIC{place}", device) for place, (device, _) in enumerate(nics))
    return Inside((Gpu("GPU0"),), cards, pairs)


def test_the_cards_of_the_storage_are_left_to_it() -> None:
    assert near_hcas(inside(("mlx5_0", Join.PIX), ("mlx5_1", Join.SYS), ("mlx5_2", Join.PIX))) == "=mlx5_0,mlx5_2"


def test_where_all_cards_are_alike_or_none_is_infiniband_nccl_is_told_nothing() -> None:
    assert near_hcas(inside(("mlx5_0", Join.PIX), ("mlx5_1", Join.PIX))) == ""
    assert near_hcas(inside(("bnxt_re0", Join.PIX), ("bnxt_re1", Join.SYS))) == ""
    assert near_hcas(inside()) == ""


def test_only_nodes_the_site_knows_from_inside_have_cards() -> None:
    facts = {name: NodeFacts(node=name, address="h:1") for name in (N0, N1)}
    known = SiteFabric("site", Fabric({}), {N0: "=mlx5_0"})
    assert [one.hcas for one in with_hcas(facts, known).values()] == ["=mlx5_0", ""]
    assert with_hcas(facts, None) == facts


def test_nodes_on_several_leaves_say_so_as_members_and_those_on_one_say_nothing() -> None:
    facts = {node: NodeFacts(node=node, address=f"{node}:1", weight=4) for node in (N0, N1)}
    apart = with_domains(facts, Fabric({N0: ("core", "leaf0"), N1: ("core", "leaf1")}))
    members = tuple(one.member for one in apart.values())
    assert format_members(members) == "n0=n0:1*4@leaf0,n1=n1:1*4@leaf1"
    assert with_domains(facts, Fabric({})) == facts
