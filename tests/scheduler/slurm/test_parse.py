"""The parsers against recordings of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.scheduler.slurm.parse import parse_jobs, parse_nodes, parse_switch, parse_topology
from deeplink.scheduler.slurm.states import JobState, NodeFlag, NodeState, SlurmTextError, parse_node_state

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8"
MOMENTS = ["1-busy", "2-not-responding", "3-nodes-down"]


def test_node_states_of_a_busy_cluster() -> None:
    rows = parse_nodes((RECORDED / "1-busy" / "scontrol-show-node-o.txt").read_text())
    assert [row.name for row in rows] == [f"n{number}" for number in range(8)]
    assert [row.state for row in rows] == [NodeState.ALLOCATED] * 6 + [NodeState.MIXED, NodeState.IDLE]
    assert all(row.responding and not row.drained and not row.down for row in rows)
    assert rows[3].address == "10.78.0.13"
    assert rows[3].port is None
    assert rows[3].boot_time == "2026-11-20T17:48:21"
    assert [row.gpus for row in rows] == [2] * 8


def test_nodes_that_do_not_respond_and_a_drained_one() -> None:
    rows = {
        str(row.name): row
        for row in parse_nodes((RECORDED / "2-not-responding" / "scontrol-show-node-o.txt").read_text())
    }
    assert {name for name, row in rows.items() if not row.responding} == {"n1", "n4"}
    assert {name for name, row in rows.items() if row.drained} == {"n7"}
    assert rows["n7"].reason == 'ECC errors: GPU 0 | dbe=2, "row remap'
    assert rows["n7"].reason_by == "root"
    assert rows["n1"].reason == ""


def test_nodes_that_slurm_gave_up() -> None:
    rows = {
        str(row.name): row
        for row in parse_nodes((RECORDED / "3-nodes-down" / "scontrol-show-node-o.txt").read_text())
    }
    assert {name for name, row in rows.items() if row.down} == {"n1", "n4"}
    assert rows["n4"].reason == "Not responding"
    assert NodeFlag.PLANNED in rows["n0"].flags


@pytest.mark.parametrize("moment", MOMENTS)
def test_sinfo_and_scontrol_agree_on_the_flags(moment: str) -> None:
    by_name = {
        str(row.name): row for row in parse_nodes((RECORDED / moment / "scontrol-show-node-o.txt").read_text())
    }
    for line in (RECORDED / moment / "sinfo-pipe.txt").read_text().splitlines():
        name, word, *_ = line.split("|")
        state, flags = parse_node_state(word)
        row = next(row for key, row in by_name.items() if key == name)
        assert state is row.state
        ours = {NodeFlag.NOT_RESPONDING, NodeFlag.DRAIN}
        assert flags & ours == row.flags & ours


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_recorded_job_state_has_a_name(moment: str) -> None:
    for line in (RECORDED / moment / "squeue-all-states.txt").read_text().splitlines():
        assert JobState.parse(line.split("|")[1]).value == line.split("|")[1]


def test_a_reason_cannot_pose_as_a_state() -> None:
    facts = "NodeName=n0 NodeAddr=a NodeHostName=h State=IDLE+DRAIN BootTime=None"
    line = f"{facts} Reason=x State=DOWN NodeAddr=evil [root@t]\n"
    (row,) = parse_nodes(line)
    assert (row.state, row.address, row.reason, row.boot_time) == (
        NodeState.IDLE,
        "a",
        "x State=DOWN NodeAddr=evil",
        "",
    )


def test_a_reason_of_two_lines_stays_one_record() -> None:
    rows = parse_nodes("NodeName=n0 State=DOWN Reason=one\ntwo [root@t]\nNodeName=n1 State=IDLE\n")
    assert [row.name for row in rows] == ["n0", "n1"]
    assert rows[0].reason == "one\\ntwo"


def test_own_ports_of_many_slurmd_on_one_host() -> None:
    (row,) = parse_nodes("NodeName=a0 NodeAddr=127.0.0.1 NodeHostName=box Port=17000 State=IDLE\n")
    assert (row.address, row.port, row.host) == ("127.0.0.1", 17000, "box")


def test_jobs_with_hostile_names() -> None:
    rows = parse_jobs((RECORDED / "4-names" / "squeue-O.txt").read_text(), "@@@")
    by_name = {str(row.name): row for row in rows}
    assert by_name["we|ird\\nname UserId=x"].nodes == ("n0", "n2")
    assert by_name["we|ird\\nname UserId=x"].batch_host == "n0"
    failed = by_name["a|b JobState=FAILED"]
    assert failed.state is JobState.FAILED
    assert failed.state.final
    assert not failed.requeueable
    tasks = [row for row in rows if row.name == "swe"]
    assert {row.label.partition("_")[2] for row in tasks} == {"1", "2", "3", "4"}


@pytest.mark.parametrize("text", ["1@@2@@", "x@@1@@RUNNING@@None@@0@@1@@u@@n0@@n0@@name@@\n", "words"])
def test_a_text_that_is_no_squeue_output_is_refused(text: str) -> None:
    with pytest.raises(SlurmTextError):
        parse_jobs(text, "@@")


def test_no_jobs_at_all() -> None:
    assert parse_jobs("", "@@") == []


def test_what_is_no_state_is_an_error_with_the_text() -> None:
    with pytest.raises(SlurmTextError, match="frobnicated"):
        JobState.parse("frobnicated")
    with pytest.raises(SlurmTextError, match=r"IDLE\+7"):
        parse_node_state("IDLE+7")


@pytest.mark.parametrize(
    ("text", "state", "flags"),
    [
        ("idle", NodeState.IDLE, set()),
        ("down*", NodeState.DOWN, {NodeFlag.NOT_RESPONDING}),
        ("drained*", NodeState.IDLE, {NodeFlag.DRAIN, NodeFlag.NOT_RESPONDING}),
        ("draining", NodeState.ALLOCATED, {NodeFlag.DRAIN}),
        ("allocated+", NodeState.ALLOCATED, {NodeFlag.COMPLETING}),
        ("DOWN*+DRAIN", NodeState.DOWN, {NodeFlag.NOT_RESPONDING, NodeFlag.DRAIN}),
        ("inval", NodeState.IDLE, {NodeFlag.INVALID_REG}),
        ("unknown*", NodeState.UNKNOWN, {NodeFlag.NOT_RESPONDING}),
        ("mixed-", NodeState.MIXED, {NodeFlag.PLANNED}),
    ],
)
def test_node_state_words(text: str, state: NodeState, flags: set[NodeFlag]) -> None:
    assert parse_node_state(text) == (state, frozenset(flags))


def test_the_switch_tree() -> None:
    rows = parse_topology((RECORDED / "1-busy" / "scontrol-show-topology.txt").read_text())
    assert [row.name for row in rows if row.level == 0] == ["leaf0", "leaf1", "leaf2", "leaf3"]
    assert rows[0].nodes == ("n0", "n1")
    assert rows[-1].switches == ("spine0", "spine1")


def test_a_topology_line_that_is_none_is_refused() -> None:
    with pytest.raises(SlurmTextError):
        parse_topology("SwitchName=leaf0 Nodes=n0\n")


def test_a_line_of_topology_conf_has_the_level_that_is_given() -> None:
    row = parse_switch("switchname=leaf0  NODES=n[0-1] LinkSpeed=100", level=0)
    assert (row.name, row.level, row.nodes, row.switches, row.link_speed) == ("leaf0", 0, ("n0", "n1"), (), 100)
    with pytest.raises(SlurmTextError) as caught:
        parse_switch("SwitchName=leaf0 LinkSpeed=fast", level=0)
    assert "`topology.conf`" in str(caught.value)


COMMENTED = (
    "NodeName=n7 NodeAddr=10.77.0.17 NodeHostName=n7 Version=22.05.8 State=IDLE+DRAIN BootTime=2026-11-22T11:29:02"
)


@pytest.mark.parametrize(
    ("rest", "reason", "comment"),
    [
        ("", "", ""),
        (" Comment=hello there", "", "hello there"),
        (" Comment=hello there Extra=deeplink: why not", "", "hello there"),
        (
            " Comment=State=DOWN Reason=none [root@2026-11-22T11:29:52]",
            "",
            "State=DOWN Reason=none [root@2026-11-22T11:29:52]",
        ),
        (" Reason=two words [root@2026-11-22T11:29:52] Comment=c w", "two words", "c w"),
    ],
)
def test_a_nodes_comment_is_told_apart_from_its_reason(rest: str, reason: str, comment: str) -> None:
    (row,) = parse_nodes(COMMENTED + rest + "\n")
    assert (row.state, row.reason, row.comment, row.port) == (NodeState.IDLE, reason, comment, None)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("IDLE", ""),
        ("MIXED+PLANNED", ""),
        ("IDLE+NOT_RESPONDING", ""),
        ("IDLE+DRAIN", "x"),
        ("DOWN*", "x"),
        ("IDLE+FAIL", "x"),
    ],
)
def test_a_node_in_service_has_no_reason(state: str, reason: str) -> None:
    """As 24.11 leaves it to a node that was resumed."""
    (row,) = parse_nodes(f"NodeName=n0 State={state} Reason=x [root@2026-11-22T11:29:52]\n")
    assert row.reason == reason


@pytest.mark.parametrize(
    ("gres", "used", "expected"),
    [
        ("gpu:4(S:0-7)", "gpu:(null):3(IDX:0-2)", (4, 3)),  # as 22.05 writes them where gres.conf tells Cores=
        ("gpu:4(S:0-7)", "gpu:(null):0(IDX:N/A)", (4, 0)),
        ("gpu:4", "gpu:4(IDX:", (4, None)),
        ("gpu:(4", "gpu:0", (None, 0)),
        ("(null)", "gpu:0", (0, 0)),
    ],
)
def test_gpus_of_a_node_and_those_used(gres: str, used: str, expected: tuple[int | None, int | None]) -> None:
    (row,) = parse_nodes(f"NodeName=n0 Gres={gres} GresDrain=N/A GresUsed={used} State=IDLE\n")
    assert (row.gpus, row.gpus_used) == expected
