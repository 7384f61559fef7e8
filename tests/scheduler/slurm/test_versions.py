"""The parsers against recordings of a real Slurm, and texts of later versions written by us."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.parse import JOB_FIELDS, parse_jobs, parse_nodes, parse_partitions, parse_topology
from deeplink.scheduler.slurm.settings import SlurmSettings, parse_settings
from deeplink.scheduler.slurm.states import JobState, NodeFlag, NodeState, SlurmTextError, parse_node_state
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.sources.slurm_topology import fabric_from_switches, read_slurm, read_switches

DATA = Path(__file__).parents[2] / "data" / "slurm"
RECORDED = DATA / "22.05.8"
SYNTHETIC = DATA / "synthetic"
LATER = ("24.11.5", "26.05.5")


def synthetic(name: str) -> str:
    head, _, text = (SYNTHETIC / f"{name}.synthetic.txt").read_text().partition("\n")
    assert head.startswith("# synthetic: ")
    return text


def test_what_is_synthetic_says_so_in_name_and_first_line() -> None:
    for path in SYNTHETIC.iterdir():
        assert re.fullmatch(r"\d\d\.\d\d-[\w-]+\.synthetic\.txt", path.name)
        assert path.read_text().startswith("# synthetic: written from ")


def test_settings_of_a_real_slurmctld() -> None:
    told = parse_settings((RECORDED / "5-leaked-gpus" / "scontrol-show-config.txt").read_text())
    assert told.version == "22.05.8"
    assert told.as_of is not None
    assert told.as_of.isoformat().startswith("2026-11-21T22:25:33")
    assert (told.number("KillWait"), told.number("minjobage"), told.number("SuspendTime")) == (3, 300, None)
    assert (told.text("Prolog"), told.text("NoSuchSetting"), told.text("TaskPluginParam")) == (
        "",
        None,
        "(null type)",
    )
    assert told.item("SchedulerParameters", "bf_interval") == "2"
    assert told.item("SchedulerParameters", "defer") is None
    assert told.listed("Epilog") == ()


def test_settings_of_a_later_slurmctld() -> None:
    told = parse_settings(synthetic("24.11-scontrol-show-config"))
    assert told.listed("Epilog") == ("/etc/slurm/epilog.d/10-clean.sh", "/etc/slurm/epilog.d/20-gpu.sh")
    assert told.item("SlurmctldParameters", "rl_enable") == ""
    assert told.words("PrivateData") == ("usage", "users")


def test_a_switch_may_be_told_in_words() -> None:
    assert [SlurmSettings({"x": word}).number("X") for word in ("Yes", "No", "1", "maybe")] == [1, 0, 1, None]


def test_a_time_in_a_form_of_the_sites_own_is_no_time() -> None:
    assert parse_settings("Configuration data as of Sat\nKillWait = 3 sec\n").as_of is None


def test_partitions() -> None:
    main, one = parse_partitions((RECORDED / "6-unfit" / "scontrol-a-show-partition-o.txt").read_text())
    assert (main.name, main.state, main.most_nodes, main.node_count) == ("main", "UP", None, 2)
    assert (one.most_nodes, one.oversubscribe, one.preempt_mode, one.state) == (1, "FORCE:4", "SUSPEND", "DOWN")
    (gpu,) = parse_partitions(synthetic("23.11-scontrol-show-partition-o"))
    assert (gpu.name, gpu.oversubscribe, gpu.node_count) == ("gpu", "EXCLUSIVE", 5)
    assert parse_partitions("No partitions in the system\n") == []


@pytest.mark.parametrize("version", LATER)
def test_all_that_a_slurm_of_today_says_is_read(version: str) -> None:
    busy, down = DATA / version / "1-busy", DATA / version / "2-nodes-down"
    told = parse_settings((busy / "scontrol-show-config.txt").read_text())
    assert (told.version, told.listed("Prolog"), told.listed("TaskEpilog")) == (version, (), ())
    (main,) = parse_partitions((busy / "scontrol-a-show-partition-o.txt").read_text())
    assert (main.name, main.node_count, main.state) == ("main", 4, "UP")
    graph = read_switches(parse_topology((busy / "scontrol-show-topology.txt").read_text()), "live")
    assert {path[-1] for path in fabric_of(graph.network).paths.values()} == {"leaf0", "leaf1"}
    rows = parse_nodes((busy / "scontrol-d-show-node-o.txt").read_text())
    assert [(row.gpus, row.gpus_used, row.version) for row in rows] == [
        (2, used, version) for used in (0, 0, 1, 1)
    ]
    drained = rows[3]
    assert (drained.reason, drained.reason_by) == ("deeplink: 17.0.2-node-dead-n3 x=y", "root")
    assert (drained.comment, drained.flags) == ("deeplink: c d=e", frozenset({NodeFlag.DRAIN}))
    away = parse_nodes((down / "scontrol-d-show-node-o-away.txt").read_text())
    assert [row.responding for row in away] == [True, True, False, True]
    given_up = parse_nodes((down / "scontrol-d-show-node-o-down.txt").read_text())
    assert [(row.name, row.reason) for row in given_up if row.down] == [("n2", "Not responding")]
    jobs = parse_jobs((busy / "squeue-fields.txt").read_text(), SEPARATOR)
    assert {row.label: row.state.value for row in jobs if row.label.startswith("4_")} == {
        "4_0": "RUNNING",
        "4_1": "RUNNING",
        "4_2": "PENDING",
        "4_3": "PENDING",
    }
    (again,) = [row for row in parse_jobs((down / "squeue-fields.txt").read_text(), SEPARATOR) if row.restarts]
    assert (again.state, again.reason) == (JobState.PENDING, "BeginTime")


def test_used_gpus_are_told_only_where_they_were_asked_for() -> None:
    leaked = parse_nodes((RECORDED / "5-leaked-gpus" / "scontrol-d-show-node-o.txt").read_text())
    assert [(row.state, row.gpus, row.gpus_used) for row in leaked] == [
        (NodeState.IDLE, 2, 2),
        (NodeState.IDLE, 2, 2),
        (NodeState.IDLE, 2, 0),
        (NodeState.DOWN, 2, 0),
    ]
    plain = parse_nodes((RECORDED / "1-busy" / "scontrol-show-node-o.txt").read_text())
    assert {row.gpus_used for row in plain} == {None}
    assert {row.version for row in plain} == {"22.05.8"}


def test_nodes_of_24_05() -> None:
    rows = parse_nodes(synthetic("24.05-scontrol-d-show-node-o"))
    assert [(row.gpus, row.gpus_used) for row in rows] == [(8, 0), (8, 4), (8, 0), (8, 0), (8, 0)]
    assert rows[0].flags == {NodeFlag.BLOCKED}
    assert (rows[1].state, rows[1].port) == (NodeState.MIXED, 17001)
    assert rows[1].flags == {NodeFlag.PLANNED}
    assert rows[2].flags == {NodeFlag.CLOUD, NodeFlag.POWERED_DOWN}
    assert (rows[2].version, rows[2].boot_time) == ("", "")
    assert (rows[3].reason, rows[3].reason_by, rows[3].state) == ("ResumeTimeout reached", "slurm", NodeState.DOWN)
    assert {NodeFlag.DYNAMIC_NORM, NodeFlag.INVALID_REG} <= rows[4].flags


def test_nodes_of_25_05() -> None:
    rows = parse_nodes(synthetic("25.05-scontrol-show-node-o"))
    assert [row.gpus for row in rows] == [4, 4, 0]
    assert rows[0].flags == {NodeFlag.MAINTENANCE, NodeFlag.RESERVED}
    assert (rows[1].reason, rows[1].reason_by) == ("kernel update", "root")
    assert rows[2].flags == {NodeFlag.EXTERNAL}


def test_blocks_are_leaves_below_what_joins_them() -> None:
    rows = parse_topology(synthetic("23.11-scontrol-show-topology-block"))
    assert [row.name for row in rows if row.level == 0] == ["b0", "b1", "b2", "b3"]
    joined = {row.name: (row.level, row.switches) for row in rows if row.level}
    assert joined == {
        "b[0-1]": (1, ("b0", "b1")),
        "b[2-3]": (1, ("b2", "b3")),
        "b[0-3]": (2, ("b[0-1]", "b[2-3]")),
    }
    graph = read_switches(rows, "scontrol show topology")
    assert graph.findings == ()
    assert fabric_of(graph.network).paths[unfold("n12")[0]] == ("b[0-3]", "b[2-3]", "b3")
    paths = fabric_from_switches(rows).paths
    assert paths[unfold("n0")[0]][-1] == "b0"
    assert paths[unfold("n0")[0]][-2] == paths[unfold("n5")[0]][-2]
    assert len(paths) == 16


def test_a_saved_answer_with_blocks_is_read_like_a_live_one() -> None:
    text = synthetic("23.11-scontrol-show-topology-block")
    live, saved = read_switches(parse_topology(text), "live"), read_slurm(text, "saved")
    assert fabric_of(saved.network).paths == fabric_of(live.network).paths
    assert {finding.check for finding in saved.findings} == {"taken as"}


def test_a_tree_of_25_05() -> None:
    rows = parse_topology(synthetic("25.05-scontrol-show-topology-tree"))
    assert [(row.name, row.level) for row in rows] == [("leaf0", 0), ("leaf1", 0), ("spine0", 1)]


def test_slurm_says_that_it_knows_no_topology_in_words_or_not_at_all() -> None:
    assert parse_topology("") == parse_topology("No topology information available\n") == []


@pytest.mark.parametrize(
    ("word", "state", "flag"),
    [
        ("idle~", NodeState.IDLE, NodeFlag.POWERED_DOWN),
        ("idle#", NodeState.IDLE, NodeFlag.POWERING_UP),
        ("idle!", NodeState.IDLE, NodeFlag.POWER_DOWN),
        ("idle%", NodeState.IDLE, NodeFlag.POWERING_DOWN),
        ("allocated$", NodeState.ALLOCATED, NodeFlag.MAINTENANCE),
        ("mixed@", NodeState.MIXED, NodeFlag.REBOOT_REQUESTED),
        ("down^", NodeState.DOWN, NodeFlag.REBOOT_ISSUED),
        ("mixed-", NodeState.MIXED, NodeFlag.PLANNED),
        ("idle+", NodeState.IDLE, NodeFlag.COMPLETING),
        ("blocked", NodeState.IDLE, NodeFlag.BLOCKED),
        ("planned", NodeState.IDLE, NodeFlag.PLANNED),
        ("powered_down", NodeState.IDLE, NodeFlag.POWERED_DOWN),
        ("inval", NodeState.IDLE, NodeFlag.INVALID_REG),
        ("external", NodeState.IDLE, NodeFlag.EXTERNAL),
    ],
)
def test_marks_and_words_of_sinfo(word: str, state: NodeState, flag: NodeFlag) -> None:
    assert parse_node_state(word) == (state, frozenset({flag}))


def test_each_flag_of_scontrols_stands_behind_each_base() -> None:
    for base in NodeState:
        for flag in NodeFlag:
            assert parse_node_state(f"{base.value}+{flag.value}") == (base, frozenset({flag}))


@pytest.mark.parametrize(
    ("word", "state"),
    [("IDLE+POWER", NodeState.IDLE), ("reboot*", NodeState.UNKNOWN), ("X_Y+DRAIN", NodeState.UNKNOWN)],
)
def test_a_state_of_a_newer_slurm_hides_no_other_node_and_takes_no_job(word: str, state: NodeState) -> None:
    base, flags = parse_node_state(word)
    assert (base, NodeFlag.OTHER in flags) == (state, True)
    text = (RECORDED / "1-busy" / "scontrol-show-node-o.txt").read_text()
    changed = re.sub(r"State=\S+", f"State={word}", text, count=1)
    assert len(parse_nodes(changed)) == len(parse_nodes(text))


def test_a_job_in_a_state_of_a_newer_slurm_hides_no_other() -> None:
    text = (DATA / LATER[0] / "1-busy" / "squeue-fields.txt").read_text()
    before, after = parse_jobs(text, SEPARATOR), parse_jobs(text.replace("PENDING", "SLEEPING", 1), SEPARATOR)
    assert [row.state for row in after] == [JobState.OTHER, *(row.state for row in before[1:])]
    assert not JobState.OTHER.final


@pytest.mark.parametrize("word", ["", "+", "*", "1", "IDLE DRAIN", "²"])
def test_what_is_no_word_is_no_state(word: str) -> None:
    with pytest.raises(SlurmTextError, match=r"Slurm reported") as caught:
        parse_node_state(word)
    assert caught.value.text == word


SEPARATOR = "@@@"
PARSERS: list[Callable[[str], Any]] = [
    lambda text: parse_jobs(text, SEPARATOR),
    parse_nodes,
    parse_topology,
    parse_partitions,
    parse_settings,
    parse_node_state,
    JobState.parse,
]
WORDS = st.sampled_from(
    [
        *("NodeName=", "State=", "IDLE", "+", "DRAIN", "*", " Reason=", "[root@", "]", "Port=", "²", "9" * 5000),
        *(
            "Gres=gpu:",
            "GresUsed=",
            "SwitchName=",
            "Level=",
            "LinkSpeed=",
            "Nodes=",
            "n[0-",
            "99999999999]",
            "\n",
            " ",
        ),
        *(
            "BlockName=",
            "AggregatedBlock=",
            "PartitionName=",
            "TotalNodes=",
            "MaxNodes=",
            "Epilog[0] = ",
            "KillWait=",
        ),
        *("Configuration data as of ", "9999-12-31T23:59:59", "0001-01-01T00:00:00", SEPARATOR, "RUNNING", "\x00"),
        *("1", "-5", "n[1-2]", "n[", "@", "\udcff"),
    ]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(WORDS, st.text(max_size=3)), max_size=40).map("".join))


@given(TEXTS)
def test_no_text_makes_a_parser_fail_with_anything_but_its_own_error(text: str) -> None:
    for parse in PARSERS:
        with suppress(SlurmTextError, SlurmTextError):
            parse(text)


@given(st.data())
def test_no_damage_to_a_real_text_makes_a_parser_fail_with_anything_but_its_own_error(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(p for p in DATA.rglob("*.txt") if p.stat().st_size < 20_000)))
    text = path.read_text()
    place = data.draw(st.integers(0, len(text)))
    text = text[:place] + data.draw(TEXTS) + text[place + data.draw(st.integers(0, 50)) :]
    for parse in PARSERS:
        with suppress(SlurmTextError, SlurmTextError):
            parse(text)


def test_a_list_of_more_nodes_than_slurm_can_have_costs_no_memory() -> None:
    with pytest.raises(SlurmTextError):
        parse_topology("SwitchName=s Level=0 Nodes=n[0-999999999]")
    row = ["1", "1", "RUNNING", "None", "0", "1", "u", "n[0-99999999]", "n0", "name"]
    assert len(row) == len(JOB_FIELDS)
    with pytest.raises(SlurmTextError):
        parse_jobs("".join(field + SEPARATOR for field in row), SEPARATOR)
