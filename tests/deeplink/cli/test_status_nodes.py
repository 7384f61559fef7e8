"""A job's nodes on the part of the tree they hang on: few lines for many nodes, and trouble always told."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console

from deeplink.cli.status_screen import MOST_LEAVES, drawn, on_leaves
from deeplink.core.types import NodeName
from deeplink.scheduler.jobs.picture import JobNode
from deeplink.scheduler.topology.graph import Fabric


def text(seats: list[JobNode], fabric: Fabric, width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as said:
        console.print(drawn(seats, fabric))
    return [line.rstrip() for line in said.get().splitlines()]


def fabric(nodes: int, per_leaf: int) -> Fabric:
    leaves = {NodeName(f"n{number}"): number // per_leaf for number in range(nodes)}
    return Fabric({name: ("core", f"spine{leaf // 8}", f"leaf{leaf}") for name, leaf in leaves.items()})


def ranked(nodes: int, each: int = 8) -> list[JobNode]:
    return [JobNode(node=f"n{place}", ranks=(place * each, place * each + each - 1)) for place in range(nodes)]


def test_nodes_of_a_leaf_whose_ranks_go_on_share_a_line() -> None:
    assert text(ranked(16), fabric(16, 8)) == [
        "core.spine0",
        "├── leaf0",
        "│   └── n[0-7]  ranks 0-63",
        "└── leaf1",
        "    └── n[8-15]  ranks 64-127",
    ]


def test_a_job_on_one_leaf_is_drawn_from_there() -> None:
    assert text(ranked(2, 1), fabric(8, 8)) == ["core.spine0.leaf0", "└── n0, n1  ranks 0-1"]


def test_trouble_has_a_line_of_its_own_and_parts_the_ranks_beside_it() -> None:
    seats = ranked(4, 1)
    seats[2] = JobNode(node="n2", ranks=(2, 2), trouble="silent for 4 s")
    assert text([*seats, JobNode(node="n4", spare=True)], fabric(8, 8))[1:] == [
        "├── n0, n1  ranks 0-1",
        "├── n2  rank 2  silent for 4 s",
        "├── n3  rank 3",
        "└── n4  spare",
    ]


def test_thousands_of_nodes_are_few_lines_and_trouble_is_reported_among_those_not_drawn() -> None:
    seats = ranked(4096)
    seats[4000] = JobNode(node="n4000", ranks=(32000, 32007), trouble="down by Slurm's word")
    lines = text(seats, fabric(4096, 32))
    assert len(lines) < 4 * MOST_LEAVES
    assert "n4000  ranks 32000-32007  down by Slurm's word" in "\n".join(lines)
    assert any(
        f"{128 - MOST_LEAVES} more leaves with {(128 - MOST_LEAVES) * 32:,} nodes" in line for line in lines
    )


def test_without_a_tree_the_nodes_stand_alone() -> None:
    assert text(ranked(2, 1), Fabric({})) == ["on no known switch", "└── n0, n1  ranks 0-1"]
    assert on_leaves(ranked(2), Fabric({})) == ""
    mixed = text(ranked(3, 1), Fabric({NodeName("n0"): ("leaf0",), NodeName("n1"): ("leaf0",)}))
    assert mixed[0] == "leaf0"
    assert "    └── n2  rank 2" in mixed


def test_narrow_terminals_and_wide_names_lose_nothing_but_room() -> None:
    seats = [JobNode(node="n0", trouble="draining (原因は不明です " * 8)]
    assert max(cell_len(line) for line in text(seats, fabric(1, 1), width=30)) <= 30
