"""`nvidia-smi topo -m`, in the shapes that drivers and copies give it."""

from __future__ import annotations

import re

import pytest

from deeplink.scheduler.topology.network import Gpu, Join, Joined, Nic, TopologyCheck
from deeplink.scheduler.topology.sources.nvidia import is_header, read_matrix
from tests.scheduler.topology.fabrics import INSIDE, MATRIX

# As drivers of 2024 on print it: NICs by number with a legend, one more column, a cell without anything.
LEGEND = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tSYS\tPHB\tSYS\t0-13,28-41\t0\t\tN/A
GPU1\tSYS\t X \tSYS\tNODE\t14-27,42-55\t1\t\tN/A
NIC0\tPHB\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: rocep4s0f0
  NIC1: rocep137s0f1
"""


def test_the_matrix_is_read() -> None:
    reading = read_matrix(MATRIX, "topo")
    assert reading.findings == ()
    assert reading.inside == INSIDE


@pytest.mark.parametrize(
    "text",
    [
        MATRIX.replace("\t X ", "\tX"),
        MATRIX.replace("\t", "   "),
        "\n".join(f"    {line}" for line in MATRIX.splitlines()),
        MATRIX.replace("\n", "\r\n"),
        "$ nvidia-smi topo -m\n" + MATRIX,
    ],
)
def test_copies_are_read_the_same(text: str) -> None:
    reading = read_matrix(text, "topo")
    assert reading.findings == ()
    assert reading.inside == INSIDE


def test_cards_by_number_get_their_devices_from_the_legend() -> None:
    reading = read_matrix(LEGEND, "topo")
    assert reading.findings == ()
    assert reading.inside is not None
    assert reading.inside.nics == (Nic("NIC0", "rocep4s0f0"), Nic("NIC1", "rocep137s0f1"))
    assert reading.inside.gpus == (Gpu("GPU0", "0-13,28-41", 0), Gpu("GPU1", "14-27,42-55", 1))
    assert reading.inside.between("NIC1", "GPU1") == Joined(Join.NODE)


def test_without_affinities_a_gpu_is_all_the_same() -> None:
    text = "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n"
    reading = read_matrix(text, "topo")
    assert reading.inside is not None
    assert reading.inside.gpus == (Gpu("GPU0"), Gpu("GPU1"))
    assert reading.findings == ()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("GPU0\t X \tNV12", "GPU0\t X \tWHAT", [(2, TopologyCheck.UNREADABLE)]),
        ("GPU0\t X \tNV12", "GPU0\t X \tNV8", [(2, TopologyCheck.UNREADABLE)]),
        ("mlx5_1\tSYS\tPIX\tSYS\t X \tSYS", "mlx5_1\tSYS\tPIX", [(5, TopologyCheck.UNREADABLE)]),
        ("GPU1\tNV12\t X \tSYS\tPIX\tSYS\t16-31\t1\n", "", [(1, TopologyCheck.UNREADABLE)]),
        ("mlx5_0\tPXB", "GPU0\tPXB", [(4, TopologyCheck.DUPLICATE)]),
    ],
)
def test_dirt_is_noted_with_its_line(old: str, new: str, expected: list[tuple[int, TopologyCheck]]) -> None:
    assert old in MATRIX
    reading = read_matrix(MATRIX.replace(old, new), "topo")
    assert [(finding.line, finding.check) for finding in reading.findings] == expected
    assert reading.inside is not None


def test_where_the_two_cells_of_a_pair_differ_the_farther_way_counts() -> None:
    for new in ("NV8", "SYS"):
        inside = read_matrix(MATRIX.replace("GPU0\t X \tNV12", f"GPU0\t X \t{new}"), "topo").inside
        assert inside is not None
        assert str(inside.between("GPU0", "GPU1")) == new


@pytest.mark.parametrize("text", ["", "no matrix\n", "GPU0 GPU0\n", "GPU0 NV4 X\n"])
def test_a_text_without_a_matrix_says_so(text: str) -> None:
    reading = read_matrix(text, "topo")
    assert reading.inside is None
    assert [finding.check for finding in reading.findings] == [TopologyCheck.NO_TOPOLOGY]


def test_a_line_of_the_matrix_is_no_head() -> None:
    head, *lines = MATRIX.splitlines()
    assert is_header(head)
    assert not any(is_header(line) for line in lines if re.match("GPU", line))
