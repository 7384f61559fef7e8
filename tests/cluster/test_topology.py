"""`deeplink topology` beside a real slurmctld: what is exported, Slurm takes, and then says the same."""

from __future__ import annotations

import json

import pytest

from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.nodeset import fold_for_files
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.sources.document import read_document
from tests.cluster.conftest import Factory
from tests.scheduler.topology.fabrics import Plug, ibnetdiscover

pytestmark = [pytest.mark.cluster]


def said(sandbox: Sandbox, *argv: str, stdin: str = "") -> str:
    done = sandbox.run(CTL, ["deeplink", "topology", *argv], stdin=stdin)
    assert done.code == 0, done
    return done.stdout


def above(sandbox: Sandbox, node: str) -> list[str]:
    """Return the switches above a node, its leaf first, as Slurm itself says."""
    told = sandbox.run(CTL, ["scontrol", "show", "topology", node]).stdout
    if "SwitchName=" not in told:  # later Slurms take a bare word for a topology's name
        told = sandbox.run(CTL, ["scontrol", "show", "topology", f"node={node}"]).stdout
    return [line.split()[0].partition("=")[2] for line in told.splitlines()]


def test_the_fabric_of_a_running_slurm(sandbox: Sandbox) -> None:
    assert said(sandbox, "check").endswith(" cables: 0 problems, 0 notes\n")
    graph = read_document(said(sandbox, "discover", "--json"), "graph").network
    assert fabric_of(graph).paths == {
        NodeName(name): tuple(reversed(above(sandbox, name))) for name in sandbox.nodes
    }
    lines = said(sandbox, "show").splitlines()
    assert "└── n[1,3,5,7] (4 nodes)" in lines[-1]


def test_what_is_exported_slurm_takes_and_says_again(fresh_sandbox: Factory) -> None:
    sandbox = fresh_sandbox(Shape.parse("2x2x1"))
    slurm = Slurm(run=sandbox.runner())
    before = slurm.topology()
    conf = sandbox.layout.etc / "topology.conf"
    exported = said(sandbox, "export")
    conf.write_text(exported)
    assert sandbox.run(CTL, ["scontrol", "reconfigure"], root=True).code == 0
    assert {(row.name, row.level, row.nodes) for row in slurm.topology()} == {
        (row.name, row.level, row.nodes) for row in before
    }
    assert said(sandbox, "export") == exported
    # Two rails and two planes of spines: Slurm gets the tree they come to, and places by it.
    names = {f"S{leaf}": f"leaf-{leaf}-ib" for leaf in range(1, 5)} | {"S5": "spine-1", "S6": "spine-2"}
    names |= {f"H{node}{rail}": f"n{node} mlx5_{rail}" for node in range(4) for rail in (0, 1)}
    plugs = [
        Plug((f"S{1 + 2 * (node % 2) + rail}", 1 + node), (f"H{node}{rail}", 1))
        for node in range(4)
        for rail in (0, 1)
    ]
    plugs += [Plug((f"S{leaf}", 30 + spine), (f"S{spine}", leaf)) for leaf in range(1, 5) for spine in (5, 6)]
    conf.write_text(said(sandbox, "export", "-", stdin=ibnetdiscover(names, plugs)))
    assert sandbox.run(CTL, ["scontrol", "reconfigure"], root=True).code == 0
    leaves = {row.name: row.nodes for row in slurm.topology() if row.level == 0}
    assert leaves == {"leaf-1-ib": ("n0", "n2"), "leaf-3-ib": ("n1", "n3")}
    told = json.loads(said(sandbox, "check", "--json"))
    assert told == {"problems": 0, "findings": []}
    done = sandbox.run(CTL, ["srun", "-N2", "--switches=1", "sh", "-c", "echo $SLURMD_NODENAME"])
    assert sorted(done.stdout.split()) in (["n0", "n2"], ["n1", "n3"])


def test_names_folded_for_files_are_those_scontrol_unfolds(sandbox: Sandbox) -> None:
    names = [
        "n1-ib",
        "n2-ib",
        "r1-n1",
        "r2-n1",
        "r2-n2",
        "1101",
        "1102",
        "n008",
        "n009",
        "n010",
        "n9",
        "n10",
        "leaf",
    ]
    done = sandbox.run(CTL, ["scontrol", "show", "hostnames", fold_for_files(names)])
    assert sorted(done.stdout.split()) == sorted(names)
