"""`deeplink simulate`, from its options to its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deeplink.cli import cli, study
from deeplink.core.errors import DeepLinkError
from tests.waiting import LIMIT_S

ROWS = "\n".join(f"{60 * row},{100 + row},{[1, 2, 8, 16][row % 4]}" for row in range(200))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(f"submit,duration,gpus\n{ROWS}\n", encoding="utf-8")
    return path


def simulated(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, words)])


def test_all_policies_are_compared_and_the_page_written(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = simulated(
        trace, "--nodes", "12", "--gpus-per-node", "4", "--leaf-size", "4", "--seeds", "2", "--html", page
    )
    assert done.exit_code == 0, done.output
    for policy in ("slurm-tree", "pack", "random", "deeplink"):
        assert policy in done.stdout
    assert "12 nodes of 4 GPUs on 3 leaves of 4" in done.stdout
    assert "### deeplink minus slurm-tree" in done.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_was_found_is_printed_though_the_page_cannot_be_written(trace: Path, tmp_path: Path) -> None:
    asked = (trace, "--nodes", "12", "--policy", "pack", "--html", tmp_path / "nowhere" / "page.html")
    done = simulated(*asked, "--json")
    assert isinstance(done.exception, DeepLinkError)
    assert "cannot write" in str(done.exception)
    assert [run["policy"] for run in json.loads(done.stdout)["runs"]] == ["pack"]
    assert "### Queueing delay" in simulated(*asked).stdout


def test_a_topology_file_is_the_cluster(trace: Path, tmp_path: Path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=a Nodes=x[0-3]\nSwitchName=b Nodes=x[4-7]\nSwitchName=c Switches=a,b\n")
    done = simulated(trace, "--topology", conf, "--policy", "deeplink", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["site"] == "8 nodes of topology.conf on 2 leaves, 64 GPUs"
    assert [run["policy"] for run in found["runs"]] == ["deeplink"]


def test_rows_left_out_are_said_and_too_many_are_an_error(trace: Path) -> None:
    with trace.open("a", encoding="utf-8") as file:
        file.write("never,1,1\n")
    done = simulated(trace, "--nodes", "8", "--policy", "pack", "--jobs", "5")
    assert done.exit_code == 0
    assert "left out: line 202: 'never' is no time of submission" in done.stderr
    refused = simulated(trace, "--nodes", "8", "--skip", "0")
    assert isinstance(refused.exception, DeepLinkError)
    assert refused.exception.exit_code == 2


def test_either_a_topology_or_a_number_of_nodes(trace: Path) -> None:
    for words in ((), ("--nodes", "8", "--topology", trace)):
        done = simulated(trace, *words)
        assert done.exit_code == 2
        assert "Give either --topology or --nodes." in done.output


def test_slower_uplinks_lengthen_the_predicted_step(trace: Path) -> None:
    def step(*words: str) -> float:
        asked = ("--nodes", "12", "--gpus-per-node", "4", "--leaf-size", "2", "--policy", "random", "--json")
        figures = json.loads(simulated(trace, *asked, *words).stdout)["runs"][0]["figures"]
        return next(float(one["value"]) for one in figures if one["what"] == "predicted step")

    assert step("--oversubscribed", "8") > 1.5 * step()


@pytest.mark.slow
def test_an_interrupt_ends_it_and_leaves_nothing(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    rows = "\n".join(f"{row},100,{1 + row % 16}" for row in range(60_000))
    trace.write_text(f"submit,duration,gpus\n{rows}\n", encoding="utf-8")
    argv = [sys.executable, "-u", "-m", "deeplink", "simulate", str(trace), "--nodes", "64", "--html", str(page)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "jobs" in process.stderr.readline()
        process.send_signal(2)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("verb", ["simulate", "calibrate"])
def test_an_installed_package_says_where_the_study_is(verb: str, tmp_path: Path) -> None:
    nowhere = study(verb, tmp_path)
    done = CliRunner().invoke(nowhere, ["philly.csv", "--nodes", "176"])
    assert isinstance(done.exception, DeepLinkError)
    assert done.exception.exit_code == 2
    assert "checkout" in done.exception.remedy
    assert CliRunner().invoke(nowhere, ["--help"]).exit_code == 0
