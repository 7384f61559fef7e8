"""How the devices of a node are joined."""

from __future__ import annotations

from deeplink.scheduler.topology.network import Gpu, Inside, Join, Joined, Nic
from tests.scheduler.topology.fabrics import INSIDE


def test_a_pair_is_found_whichever_is_named_first() -> None:
    assert INSIDE.between("GPU1", "GPU0") == INSIDE.between("GPU0", "GPU1") == Joined(Join.NVLINK, 12)
    assert INSIDE.between("GPU0", "GPU7") is None


def test_a_gpu_uses_the_nearest_card_and_the_far_ones_are_for_others() -> None:
    assert [nic.name for nic in INSIDE.nearest_nics("GPU0")] == ["mlx5_0"]
    assert [nic.name for nic in INSIDE.nearest_nics("GPU1")] == ["mlx5_1"]
    assert [nic.name for nic in INSIDE.far_nics()] == ["mlx5_2"]


def test_where_all_cards_are_equally_far_all_are_for_the_gpus() -> None:
    cards = (Nic("a", "a"), Nic("b", "b"))
    inside = Inside((Gpu("GPU0"),), cards, {("GPU0", "a"): Joined(Join.SYS), ("GPU0", "b"): Joined(Join.SYS)})
    assert inside.nearest_nics("GPU0") == cards
    assert inside.far_nics() == ()


def test_without_gpus_or_without_a_word_no_card_is_far() -> None:
    cards = (Nic("a", "a"),)
    assert Inside((), cards, {}).far_nics() == ()
    assert Inside((Gpu("GPU0"),), cards, {}).nearest_nics("GPU0") == ()
    assert Inside((Gpu("GPU0"),), cards, {}).far_nics() == ()


def test_nvlinks_are_counted_over_all_peers() -> None:
    assert INSIDE.nvlinks("GPU0") == 12


def test_ways_are_ordered_from_near_to_far() -> None:
    assert [way.value for way in sorted(Join, key=lambda way: way.distance)] == [
        "NV", "PIX", "PXB", "PHB", "NODE", "SYS",
    ]  # fmt: skip
    assert str(Joined(Join.NVLINK, 4)) == "NV4"
    assert str(Joined(Join.PHB)) == "PHB"
