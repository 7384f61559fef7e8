"""Generic resources, in each form in which Slurm writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.slurm.states import Gres, SlurmValueError, gpus_asked, gpus_in, gpus_used, parse_gres

# As 22.05.8 wrote them (the first eight), and as slurm.conf(5), gres.conf(5) and sbatch(1) have them.
VALUES = [
    ("gpu:4", [("gpu", "", 4)]),
    ("gpu:4(S:0-7)", [("gpu", "", 4)]),
    ("gpu:0", [("gpu", "", 0)]),
    ("gpu:(null):0(IDX:N/A)", [("gpu", "", 0)]),
    ("gpu:(null):3(IDX:0-2)", [("gpu", "", 3)]),
    ("gpu:3(IDX:0-2)", [("gpu", "", 3)]),
    ("gres:gpu:4", [("gpu", "", 4)]),
    ("(null)", []),
    ("gpu:(null):3(IDX:0,2-3)", [("gpu", "", 3)]),
    ("gpu:a100:4(S:0-1)", [("gpu", "a100", 4)]),
    ("gpu:a100:4(S:0,2)", [("gpu", "a100", 4)]),
    ("gpu:a100:4(S:0-1),gpu:a30:2(S:1)", [("gpu", "a100", 4), ("gpu", "a30", 2)]),
    ("gpu:a100:1(IDX:0),gpu:a30:0(IDX:N/A)", [("gpu", "a100", 1), ("gpu", "a30", 0)]),
    ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", [("gpu", "nvidia_h100_80gb_hbm3", 8)]),
    ("gpu:tesla-v100:2", [("gpu", "tesla-v100", 2)]),
    ("gpu:1g.5gb:7(S:0)", [("gpu", "1g.5gb", 7)]),
    ("gpu:a100_3g.20gb:2(IDX:0-1)", [("gpu", "a100_3g.20gb", 2)]),
    ("gpu:1g.10gb+me:1", [("gpu", "1g.10gb+me", 1)]),
    ("gpu:3g.20gb", [("gpu", "3g.20gb", 1)]),
    ("gpu", [("gpu", "", 1)]),
    ("gpu:h100", [("gpu", "h100", 1)]),
    ("gpu:3090:2", [("gpu", "3090", 2)]),
    ("gpu:2080ti", [("gpu", "2080ti", 1)]),
    ("gpu=2", [("gpu", "", 2)]),
    ("GPU:2", [("gpu", "", 2)]),
    ("gres/gpu:h100:8", [("gpu", "h100", 8)]),
    ("gpu:2,shard:8", [("gpu", "", 2), ("shard", "", 8)]),
    ("shard:a100:16(S:0-1)", [("shard", "a100", 16)]),
    ("gpu:a100:0(IDX:N/A),shard:a100:3(0/8,3/8)", [("gpu", "a100", 0), ("shard", "a100", 3)]),
    ("mps:(null):0", [("mps", "", 0)]),
    ("gpu:2(IDX:0-1),mps:200", [("gpu", "", 2), ("mps", "", 200)]),
    ("craynetwork:4", [("craynetwork", "", 4)]),
    ("bandwidth:lustre:no_consume:4G", [("bandwidth", "lustre", 4 << 30)]),
    ("tmpdisk:100K", [("tmpdisk", "", 100 << 10)]),
    ("tmpdisk:3m,gpu:1", [("tmpdisk", "", 3 << 20), ("gpu", "", 1)]),
    ("", []),
    ("N/A", []),
    ("none", []),
]


@pytest.mark.parametrize(("text", "found"), VALUES)
def test_values(text: str, found: list[tuple[str, str, int]]) -> None:
    assert parse_gres(text) == tuple(Gres(*one) for one in found)


@pytest.mark.parametrize(
    "text",
    [
        "gpu:",
        "gpu::4",
        "gpu:-1",
        "gpu:1.5",
        "gpu:a100:b",
        "gpu:a100:b:c:4",
        "gpu:(null)",
        "gpu:(null):",
        "gpu:(null):3(IDX:0-",  # cut off by a column that is too narrow
        "gpu:4(",
        "gpu:4)",
        "gpu:4,",
        ",gpu:4",
        "gpu:4,,gpu:1",
        "gpu:4 gpu:1",
        "4",
        "gpu:4X:2:1",
        "gpu=",
        "gpu:²",
        "gpu:99999999999999999999",
    ],
)
def test_what_is_none_is_an_error_and_never_no_gpu(text: str) -> None:
    for reader in (parse_gres, gpus_in, gpus_used, gpus_asked):
        with pytest.raises(SlurmValueError, match=r"is no (list|number)"):
            reader(text)


@given(st.text(alphabet="gpu:a1(null)SIDX-,=/0 .", max_size=24))
def test_text_of_any_kind_gives_a_value_or_the_error(text: str) -> None:
    try:
        found = parse_gres(text)
    except SlurmValueError:
        return
    assert all(one.name and one.amount >= 0 for one in found)
    assert found or text.strip().casefold() in {"", "(null)", "n/a", "none"}


def test_gpus_are_counted_in_all_and_by_type() -> None:
    text = "gpu:h100:4(S:0-1),gpu:a30:2(IDX:0,1),gpu:1,nic:9"
    assert (gpus_in(text), gpus_in(text, "A30"), gpus_in(text, "v100")) == (7, 2, 0)
    assert (gpus_used(text), gpus_used(text, "a30")) == (7, 3), "one without a type may be of that type"
    told_twice = "cpu=8,gres/gpu=6,gres/gpu:a100=4,gres/gpu:a30=2"
    assert (gpus_in(told_twice), gpus_in(told_twice, "a100"), gpus_in("gres/gpu:a100=4")) == (6, 4, 4)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:2(IDX:0-1),4k-disk:1", 2),
        ("gpu:2,matlab.r2020:1", 2),
        ("cpu:2,license/matlab:1", 0),
        ("cpu:2,license/matlab:1,gres/gpu:a100:3", 3),
        ("gres/4k-disk=1,gres/gpu=2,mem=4.50G", 2),
        ("matlab.r2020:1(IDX:0,2),GPU:2", 2),
        ("craynetwork", 0),
        ("gpu-memory:80G,gpu:2", 2),
        ("cpu=4,mem=4000M,node=1,billing=4,gres/gpu=4", 4),
        ("cpu=4,mem=4000M,gres/gpu=4,gres/gpu:a100=4", 4),
        ("cpu=1,license/matlab=2,fs/disk=1", 0),
    ],
)
def test_what_is_no_gpu_hides_none(text: str, gpus: int) -> None:
    assert (gpus_in(text), gpus_used(text)) == (gpus, gpus)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:2", ("", 2)),
        ("gres/gpu:h100:8", ("h100", 8)),
        ("gpu:h100", ("h100", 1)),
        ("gpu:0", ("", 0)),
        ("none", ("", 0)),
    ],
)
def test_gpus_asked_for(text: str, gpus: tuple[str, int]) -> None:
    assert gpus_asked(text) == gpus


@pytest.mark.parametrize(
    "text", ["gpu:2,shard:1", "craynetwork:1", "gpu:a100:1,gpu:a30:1", "cpu=4,gpu:1", "gpu:2,4k-disk:1"]
)
def test_several_kinds_asked_for_are_not_weighed(text: str) -> None:
    with pytest.raises(SlurmValueError, match=r"is no (list|number)"):
        gpus_asked(text)
