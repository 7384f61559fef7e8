"""Rules over nodes, partitions, switches and the controller's clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deeplink.core.finding import Severity
from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.parse import parse_nodes, parse_partitions
from deeplink.scheduler.slurm.states import NodeFlag, NodeState
from tests.scheduler.sitecheck.sites import DATA, RECORDED, found, settings, site, worst


def test_slurm_that_does_not_answer_is_an_error_told_once() -> None:
    evidence = site(problems={"nodes": "scontrol: down\nfatal: no controller", "settings": "fatal: no controller"})
    (finding,) = found("slurm-answers", evidence)
    assert finding.severity is Severity.ERROR
    assert finding.text.endswith("fatal: no controller")


@pytest.mark.parametrize(
    ("ahead_s", "severity"), [(0, "ok"), (2, "ok"), (-2.4, "ok"), (5, "warning"), (-5, "warning"), (100, "error")]
)
def test_the_controllers_clock_counts_as_wrong_by_what_is_sure(ahead_s: float, severity: str) -> None:
    told = settings()
    assert told.as_of is not None
    asked = told.as_of.timestamp() + 0.5 - ahead_s
    assert worst("controller-clock", site(asked=(asked, asked + 0.2))).severity.word == severity


def test_a_controller_that_tells_no_time_is_unknown() -> None:
    evidence = site(settings=replace(settings(), as_of=None))
    assert worst("controller-clock", evidence).severity is Severity.UNKNOWN


def test_gpus_that_leaked_in_a_real_slurm_are_found_with_the_cure() -> None:
    nodes = tuple(parse_nodes((RECORDED / "5-leaked-gpus" / "scontrol-d-show-node-o.txt").read_text()))
    (finding,) = found("leaked-gpus", site(nodes=nodes))
    assert (finding.severity, finding.where, finding.remedy) == (
        Severity.ERROR,
        "n[0-1]",
        "scontrol reconfigure",
    )
    assert finding.text.startswith("4 GPUs ")
    assert worst("leaked-gpus", site(nodes=nodes[2:])).severity is Severity.OK
    completing = tuple(replace(row, flags=row.flags | {NodeFlag.COMPLETING}) for row in nodes)
    assert worst("leaked-gpus", site(nodes=completing)).severity is Severity.OK
    assert worst("leaked-gpus", site()).severity is Severity.UNKNOWN, "asked without -d"
    suspended = site(nodes=nodes, suspended=(NodeName("n0"), NodeName("n1")))
    assert worst("leaked-gpus", suspended).severity is Severity.OK, "a suspended job keeps its GPUs"
    some = found("leaked-gpus", site(nodes=(nodes[0], replace(nodes[1], gpus_used=None), *nodes[2:])))
    assert {(one.severity, one.where) for one in some} == {
        (Severity.UNKNOWN, "n1"),
        (Severity.ERROR, "n0"),
    }
    untold = worst("leaked-gpus", site(nodes=nodes, suspended=None))
    assert (untold.severity, untold.where) == (Severity.UNKNOWN, "n[0-1]")


def test_nodes_out_of_service_are_told_with_their_reasons() -> None:
    down = tuple(parse_nodes((RECORDED / "3-nodes-down" / "scontrol-show-node-o.txt").read_text()))
    told = {finding.where: finding.text for finding in found("node-states", site(nodes=down))}
    assert told["n[1,4]"] == "down: Not responding"
    assert told["n7"].startswith("drained: ECC errors")
    text = (DATA / "synthetic" / "24.05-scontrol-d-show-node-o.synthetic.txt").read_text().partition("\n")[2]
    finding = worst("node-states", site(nodes=tuple(parse_nodes(text))))
    assert (finding.severity, finding.where) == (Severity.ERROR, "c4")


def test_a_silent_node_that_slurm_would_not_resume_is_not_to_be_resumed() -> None:
    idle = next(row for row in site().nodes or () if row.state is NodeState.IDLE)
    silent = replace(idle, flags=frozenset({NodeFlag.NOT_RESPONDING}))
    assert "slurmd" in worst("node-states", site(nodes=(silent,))).remedy
    down = replace(silent, state=NodeState.DOWN)
    assert "state=resume" in worst("node-states", site(nodes=(down,))).remedy


def test_slurmd_of_another_version() -> None:
    nodes = site().nodes or ()
    mixed = (replace(nodes[0], version="21.08.8"), *nodes[1:])
    finding = worst("slurm-versions", site(nodes=mixed))
    assert (finding.severity, finding.where) == (Severity.WARNING, "n0")
    assert worst("slurm-versions", site()).severity is Severity.OK


def test_partitions_of_a_sandbox_in_which_much_is_wrong() -> None:
    rows = tuple(parse_partitions((RECORDED / "6-unfit" / "scontrol-a-show-partition-o.txt").read_text()))
    findings = found("partitions", site(partitions=rows, settings=settings("6-unfit")))
    said = " | ".join(finding.text for finding in findings)
    for part in ("MaxNodes=1", "OverSubscribe=FORCE:4", "one: PreemptMode=SUSPEND", "one is DOWN"):
        assert part in said
    assert "main" not in said, "the cluster's own mode is told by preempt-mode"


def test_a_node_on_no_switch_is_told() -> None:
    switches = tuple(row for row in site().switches or () if row.name not in {"leaf3", "spine1", "core"})
    finding = worst("topology", site(switches=switches))
    assert finding.severity is Severity.WARNING
    assert "n[6-7]" in " ".join(one.text for one in found("topology", site(switches=switches)))
    assert worst("topology", site(switches=())).severity is Severity.NOTE
    assert worst("topology", site()).severity is Severity.OK


@pytest.mark.parametrize("check", ["leaked-gpus", "node-states", "slurm-versions", "partitions", "topology"])
def test_what_slurm_did_not_tell_is_unknown(check: str) -> None:
    evidence = site(nodes=None, partitions=None, switches=None, problems={"nodes": "no"})
    assert worst(check, evidence).severity is Severity.UNKNOWN
