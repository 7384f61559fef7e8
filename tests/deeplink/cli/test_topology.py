"""`deeplink topology`, on files and on what a scontrol says; with a real one: tests/cluster/test_topology.py."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from deeplink.cli import cli, main
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.sources.document import read_document
from deeplink.scheduler.topology.sources.slurm_topology import read_slurm
from tests.scheduler.topology.fabrics import MATRIX, RAILS_PLUGS, TOPOLOGY_CONF, Plug, rails

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / "1-busy"
Deeplink = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deeplink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Deeplink:
    """Run the command in a folder of files, with no program on PATH but those in `bin` there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)

    def call(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        monkeypatch.setattr(sys, "argv", ["deeplink", "topology", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return call


def scontrol(folder: Path, *, topology: str) -> None:
    """Put a scontrol into a folder that says what a real one said, but for its topology."""
    (folder / "topology").write_text(topology)
    program = folder / "bin" / "scontrol"
    nodes = RECORDED / "scontrol-show-node-o.txt"
    text = f"""#!/bin/sh
case "$*" in
  "show topology") exec /bin/cat {folder}/topology;;
  "show node --oneliner") exec /bin/cat {nodes};;
esac
echo "unexpected: $*" >&2; exit 1
"""
    program.write_text(text)
    program.chmod(0o755)


def written(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def test_check_of_a_whole_file_is_0_and_of_a_broken_one_1(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, whole=TOPOLOGY_CONF, broken=TOPOLOGY_CONF + "\nSwitchName=leaf9 Nodes=n3")
    assert deeplink("check", "whole") == (0, "4 nodes, 2 leaves, 1 spine, 6 cables: 0 problems, 0 notes\n", "")
    code, out, _ = deeplink("check", "broken")
    assert code == 1
    assert out.splitlines() == [
        "problem broken:5: duplicate: n3 of switch leaf9 also on leaf1; only the latter counts here",
        "note    empty: leaf leaf9 has nothing below it",
        "4 nodes, 3 leaves, 1 spine, 6 cables: 1 problem, 1 note",
    ]


def test_check_holds_the_fabric_against_the_nodes_there_should_be(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF)
    assert deeplink("check", "conf", "--nodes", "n[0-3]")[0] == 0
    code, out, _ = deeplink("check", "conf", "--nodes", "n[1-5]", "--json")
    told = json.loads(out)
    assert (code, told["problems"]) == (1, 2)
    assert [(one["kind"], one["text"]) for one in told["findings"]] == [
        ("missing", "2 nodes (n[4-5]) of --nodes not in the topology"),
        ("unknown", "1 node (n0) in the topology, and no node of --nodes"),
    ]
    for wrong in ("n[", "", "n 0"):
        assert deeplink("check", "conf", "--nodes", wrong)[0] == 2
        assert deeplink("check", "--nodes", wrong)[0] == 2
    assert deeplink("check", "conf", "--nodes", "n0", "--slurm")[0] == 2


def test_a_degraded_cable_is_found_in_what_stands_on_standard_input(deeplink: Deeplink) -> None:
    trunk = RAILS_PLUGS[12]
    text = rails(without=[trunk], besides=[Plug(trunk.one, trunk.other, "4xDDR")])
    code, out, _ = deeplink("check", "-", stdin=text)
    assert code == 1
    expected = "problem degraded: leaf-1-1 port 18 - spine-1 port 6: 16 Gb/s, told by both ends; usual here 400"
    assert out.splitlines()[0] == expected
    code, out, err = deeplink("show", "-", stdin=text)
    assert code == 0
    assert "note    standard input: unnamed" in err
    lines = out.splitlines()
    assert lines[1] == "spine-1 (2 spines)"
    assert any(line.endswith("7 x 400 Gb/s + 1 x 16 Gb/s 1 degraded") for line in lines)
    assert any("degraded: leaf-1-1 port 18 - spine-1 port 6: 16 Gb/s" in line for line in lines)
    assert any(line.endswith("gpu-[1-3] (3 nodes)  each 2 x 400 Gb/s ok") for line in lines)


def test_show_draws_a_tree_and_the_inside_of_its_nodes(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF, topo=MATRIX)
    code, out, err = deeplink("show", "conf", "--inside", "n[0-1]=topo")
    inside = "2 GPUs (1 pair NV12); GPU0 nearest to mlx5_0 PXB; GPU1 nearest to mlx5_1 PIX; near to no GPU: mlx5_2"
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "4 nodes, 4 GPUs, 2 leaves, 1 spine, 6 cables",
        "spine (spine)",
        "├── leaf0 (leaf)  up: 1 cable",
        "│   └── n[0-1] (2 nodes)",
        "└── leaf1 (leaf)  up: 1 cable",
        "    └── n[2-3] (2 nodes)",
        f"in n[0-1]: {inside}",
    ]


def test_show_as_json_has_the_tree_and_the_graph(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF)
    told: dict[str, Any] = json.loads(deeplink("show", "conf", "--json")[1])
    branches = told["tree"]["branches"]
    assert [(one["name"], one["tier"], one["above"], one["nodes"]) for one in branches] == [
        ("spine", "spine", None, []),
        ("leaf0", "leaf", "spine", ["n0", "n1"]),
        ("leaf1", "leaf", "spine", ["n2", "n3"]),
    ]
    assert branches[1]["up"] == {"cables": 1, "gbps": None, "health": {"unknown": 1}}
    again = read_document(json.dumps(told["graph"]), "graph")
    assert again.network == read_slurm(TOPOLOGY_CONF, "conf").network


def test_what_discover_writes_is_read_again(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, fabric=rails(), topo=MATRIX)
    code, out, err = deeplink("discover", "fabric", "topo", "-o", "graph.json")
    assert code == 0
    assert out == "6 nodes, 12 GPUs, 5 leaves, 2 spines, 36 cables; written to graph.json\n"
    assert "kept apart" in err
    first = json.loads(deeplink("discover", "fabric", "topo", "--json")[1])
    assert json.loads((tmp_path / "graph.json").read_text()) == first
    assert json.loads(deeplink("discover", "graph.json", "--json")[1]) == first


def test_export_writes_what_slurm_reads_whole_or_not_at_all(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, fabric=rails(), conf="as it was\n")
    text = deeplink("export", "fabric")[1]
    assert read_slurm(text, "out").findings == ()
    assert deeplink("export", "fabric", "-o", "conf")[0] == 0
    assert (tmp_path / "conf").read_text() == text
    (tmp_path / "conf").write_text("as it was\n")
    code, _, err = deeplink("export", "-", "-o", "conf", stdin="n[0-3]")
    assert code == 1
    assert "there is nothing to write" in err
    assert (tmp_path / "conf").read_text() == "as it was\n"
    code, _, err = deeplink("export", "fabric", "-o", "nowhere/conf")
    assert code == 1
    assert "cannot write nowhere/conf: No such file or directory" in err


def test_without_files_slurm_is_asked_and_its_nodes_are_those_there_should_be(
    deeplink: Deeplink, tmp_path: Path
) -> None:
    text = (RECORDED / "scontrol-show-topology.txt").read_text()
    scontrol(tmp_path, topology=text)
    assert deeplink("check") == (0, "8 nodes, 4 leaves, 2 spines, 1 core, 14 cables: 0 problems, 0 notes\n", "")
    assert fabric_of(read_slurm(deeplink("export")[1], "out").network) == fabric_of(read_slurm(text, "in").network)
    for whole, without in (("n[6-7]", "n6"), ("n[4-7]", "n[4-6]"), ("n[0-7]", "n[0-6]")):
        text = text.replace(whole, without)
    scontrol(tmp_path, topology=text)
    code, out, _ = deeplink("check")
    assert (code, out.splitlines()[0]) == (1, "problem missing: 1 node (n7) of Slurm not in the topology")


def test_a_slurm_without_a_topology_has_flat_names(deeplink: Deeplink, tmp_path: Path) -> None:
    scontrol(tmp_path, topology="")
    code, out, err = deeplink("discover")
    assert (code, out) == (0, "8 nodes\n")
    assert "scontrol show node: flat: 8 nodes without a topology: all count as neighbours" in err


def test_slurms_troubles_are_said_with_their_exit_codes(deeplink: Deeplink, tmp_path: Path) -> None:
    code, _, err = deeplink("discover")
    assert code == 127
    assert "scontrol is not on PATH" in err
    program = tmp_path / "bin" / "scontrol"
    program.write_text("#!/bin/sh\necho 'slurm_load_topo error: Unable to contact slurm controller' >&2; exit 1\n")
    program.chmod(0o755)
    code, _, err = deeplink("check")
    assert code == 1
    assert "Unable to contact slurm controller" in err


def test_a_node_alone_is_described_by_its_inside(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, topo=MATRIX)
    assert deeplink("check", "topo") == (0, "1 node, 2 GPUs: 0 problems, 0 notes\n", "")
    uneven = MATRIX.replace("NV12", "NV8", 1)
    written(tmp_path, topo=uneven)
    code, out, _ = deeplink("check", "topo")
    assert code == 1
    assert "problem topo:2: unreadable: GPU0 to GPU1 is NV8, and back NV12 on line 3; the farther counts" in out


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "[]", "vendid=0x2c9\n", "\x00\xff\n", "switches:\n"])
@pytest.mark.parametrize("verb", ["check", "discover", "show"])
def test_where_nothing_is_found_it_is_said_and_fails(deeplink: Deeplink, verb: str, text: str) -> None:
    code, out, err = deeplink(verb, "-", stdin=text)
    assert code == 1
    assert "no topology: no switch and no node was found" in out + err


def test_wrong_usage_is_2_and_says_what_is_wanted(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF)
    assert deeplink("check", "missing")[0] == 2
    assert deeplink("check", str(tmp_path))[0] == 2
    assert deeplink("check", "conf", "--format", "odd")[0] == 2
    for inside in ("conf", "n0=missing", "n[=conf", "n0=conf"):
        code, _, err = deeplink("show", "conf", "--inside", inside)
        assert code == 2
        assert "NODES=FILE" in err


def test_a_format_can_be_forced(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF)
    code, out, _ = deeplink("check", "conf", "--format", "names")
    assert code == 1
    assert "conf:2: unreadable" in out


def test_the_shell_completes_verbs_formats_and_files() -> None:
    def completions(*words: str) -> list[str]:
        *before, last = words
        completer = ShellComplete(cli, {}, "deeplink", "_DEEPLINK_COMPLETE")
        return [item.value for item in completer.get_completions(["topology", *before], last)]

    assert completions("") == ["check", "discover", "export", "show"]
    assert completions("check", "--format", "i") == ["ibnetdiscover"]
    kinds = ShellComplete(cli, {}, "deeplink", "_DEEPLINK_COMPLETE").get_completions(["topology", "check"], "f")
    assert [item.type for item in kinds] == ["file"]


def test_no_heavy_import_is_paid_for() -> None:
    code = (
        "import sys, deeplink.cli.topology; "
        "assert not {'yaml', 'rich', 'grpc', 'pyarrow', 'ClusterShell'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


def test_a_graph_of_nothing_is_written_over_no_good_one(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, graph="as it was\n")
    code, out, err = deeplink("discover", "-", "-o", "graph", stdin="")
    assert code == 1
    assert "written to" not in out
    assert "nothing is written" in err
    assert (tmp_path / "graph").read_text() == "as it was\n"


def test_a_file_that_is_written_again_keeps_its_permissions_and_links(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF, real="as it was\n")
    (tmp_path / "real").chmod(0o604)
    (tmp_path / "link").symlink_to("real")
    text = deeplink("export", "conf")[1]
    assert deeplink("export", "conf", "-o", "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == text
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o604
    assert deeplink("export", "conf", "-o", os.devnull)[0] == 0
    assert Path(os.devnull).is_char_device()


def test_what_cannot_be_read_is_said_beside_json_too(deeplink: Deeplink) -> None:
    for verb in ("show", "discover"):
        code, out, err = deeplink(verb, "-", "--json", stdin="SwitchName=a Nodes=n0\nodd\n")
        assert code == 0
        assert json.loads(out)
        assert "standard input:2: unreadable" in err


def test_a_dash_is_standard_output_and_a_closed_input_is_said(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF)
    assert deeplink("export", "conf", "-o", "-") == deeplink("export", "conf")
    assert deeplink("discover", "conf", "-o", "-") == deeplink("discover", "conf", "--json")
    assert not (tmp_path / "-").exists()
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    closed = [sys.executable, "-m", "deeplink", "topology", "check", "-"]
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *closed],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("deeplink: cannot read -: Bad file descriptor")


def test_the_inside_of_nodes_may_come_through_a_pipe(deeplink: Deeplink, tmp_path: Path) -> None:
    written(tmp_path, conf=TOPOLOGY_CONF)
    reader, writer = os.pipe()
    os.write(writer, MATRIX.encode())
    os.close(writer)
    code, out, _ = deeplink("show", "conf", "--inside", f"n0=/dev/fd/{reader}")
    os.close(reader)
    assert code == 0
    assert "in n0: 2 GPUs" in out
