"""`deeplink health` as people, Slurm and Nagios run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.cli.health import exit_code, nagios_line
from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.node.reading import file_in
from tests.waiting import LIMIT_S

QUIET = "".join(f"[{name}]\noff = true\n" for name in ("memory", "clock", "mount", "network", "gpu", "processes"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site whose one check of its own does what the file `answer` says."""
    folder = tmp_path / "checks"
    folder.mkdir()
    (folder / "fan.sh").write_text(f"#!/bin/sh\n. {tmp_path}/answer\n")
    (folder / "fan.sh").chmod(0o755)
    (tmp_path / "answer").write_text("exit 0\n")
    (tmp_path / "health.toml").write_text(QUIET)
    (tmp_path / "config.toml").write_text(
        f'state = "{tmp_path}/state"\nstore = "{tmp_path}"\nhealth_file = "{tmp_path}/health.toml"\n'
        f'health_folder = "{folder}"\nnode = "n7"\n'
    )
    return tmp_path


def health(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The environment that slurmd gives a HealthCheckProgram: none.
    return subprocess.run(
        [sys.executable, "-m", "deeplink", "health", *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={"DEEPLINK_CONFIG": str(site / "config.toml")},
        cwd="/",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code", "nagios_code", "line"),
    [
        ("exit 0", 0, 0, "OK: all checks are well"),
        ("echo warm; exit 1", 1, 1, "WARNING: fan: warm"),
        ("echo 'hot|t=99'; exit 2", 1, 2, "CRITICAL: fan: hot"),
        ("echo what; exit 3", 0, 3, "UNKNOWN: fan: what"),
    ],
)
def test_its_exit_code_and_line_are_those_of_what_was_found(
    site: Path, answer: str, code: int, nagios_code: int, line: str
) -> None:
    (site / "answer").write_text(f"{answer}\n")
    done = health(site, "--once")
    assert done.returncode == code, done.stderr
    plugin = health(site, "--once", "--nagios")
    assert (plugin.returncode, plugin.stdout, plugin.stderr) == (nagios_code, f"{line}\n", "")


@pytest.mark.slow
def test_it_says_what_is_wrong_in_lines_and_as_json(site: Path) -> None:
    (site / "answer").write_text("echo hot; exit 2\n")
    said = health(site).stdout.splitlines()
    assert any(line.startswith("fan") and "drain" in line for line in said)
    assert any(line.strip() == "drain: hot" for line in said)
    assert any(line.startswith("memory") and "off (configuration)" in line for line in said)
    facts = json.loads(health(site, "--json", "--check", "fan").stdout)
    assert facts["worst"] == "drain"
    assert facts["findings"] == [{"check": "fan", "severity": "drain", "problem": "hot"}]
    assert [one["check"] for one in facts["checks"]] == ["fan"]


@pytest.mark.slow
def test_it_ends_by_its_deadline_whatever_hangs(site: Path) -> None:
    (site / "answer").write_text(f"echo $$ >{site}/pid; sleep 1000\n")
    done = health(site, "--deadline", "2", "--nagios", "--check", "fan")
    assert done.returncode == 3
    assert done.stdout.startswith("UNKNOWN: fan: the check has not ended for")
    assert not Path(f"/proc/{int((site / 'pid').read_text())}").exists()


@pytest.mark.slow
def test_the_switch_and_the_list(site: Path) -> None:
    (site / "state").mkdir()
    (site / "state" / "health-off").write_text("fan\n")
    (site / "answer").write_text("exit 2\n")
    done = health(site, "--once")
    assert done.returncode == 0
    assert "off (health-off)" in done.stdout
    rows = {row["check"]: row for row in json.loads(health(site, "--list", "--json").stdout)["checks"]}
    assert rows["fan"]["off"] is True
    assert rows["disk"]["off"] is False
    assert "fan" in health(site, "--list").stdout


@pytest.mark.slow
def test_what_there_was_can_be_forgotten(site: Path) -> None:
    seen = file_in(site / "state")
    assert health(site, "--once", "--check", "disk").returncode == 0
    assert seen.exists()
    done = health(site, "--forget")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"forgotten: what this node had at its best, in {seen};")
    assert not seen.exists()


def test_nothing_to_forget_is_said_with_the_path_and_what_cannot_be_dropped_is_an_error(site: Path) -> None:
    seen = file_in(site / "state")
    done = health(site, "--forget")
    assert done.returncode == 0
    assert done.stdout.startswith(f"nothing to forget: there is no {seen} ")
    seen.mkdir(parents=True)  # root, too, unlinks no folder
    done = health(site, "--forget")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"deeplink: {seen}: ")


@pytest.mark.slow
def test_a_configuration_that_cannot_be_used_is_an_error_and_unknown_to_nagios(site: Path) -> None:
    (site / "health.toml").write_text("[dsik]\n")
    done = health(site)
    assert done.returncode == 2
    assert "dsik: no such check" in done.stderr
    plugin = health(site, "--nagios")
    assert plugin.returncode == 3
    assert plugin.stdout.startswith("UNKNOWN: ")


def test_a_check_that_is_not_there_is_wrong_usage(site: Path) -> None:
    done = health(site, "--check", "fanny")
    assert done.returncode == 2
    assert "there are disk, memory" in done.stderr


@pytest.mark.parametrize("wrong", [("--check", "fanny"), ("--deadline", "soon"), ("--chekc",), ("disk",)])
def test_wrong_usage_of_the_plugin_is_unknown_and_drains_no_node(site: Path, wrong: tuple[str, ...]) -> None:
    done = health(site, "--once", "--nagios", *wrong)
    assert done.returncode == 3
    assert done.stdout.startswith("UNKNOWN: ")
    assert done.stdout.count("\n") == 1


def test_a_store_that_never_was_is_nothing_to_look_at_and_one_that_is_gone_is(site: Path) -> None:
    config = (site / "config.toml").read_text()
    (site / "config.toml").write_text(config.replace(f'store = "{site}"', f'store = "{site}/store"'))
    done = health(site, "--once", "--check", "disk")
    assert (done.returncode, done.stdout) == (0, f"disk  -  there is no {site}/store yet\n")
    plugin = health(site, "--once", "--check", "disk", "--nagios")
    assert (plugin.returncode, plugin.stdout) == (0, "OK: no check is on, or has anything to look at\n")
    (site / "store").mkdir()
    assert health(site, "--once", "--check", "disk").stdout.startswith("disk  ok")
    (site / "store").rmdir()
    gone = health(site, "--once", "--check", "disk", "--nagios")
    assert (gone.returncode, gone.stdout) == (2, f"CRITICAL: disk: {site}/store is gone: is its disk mounted?\n")


def found(*severities: Severity) -> list[Finding]:
    return [Finding(check=f"c{n}", severity=severity, text="x|y") for n, severity in enumerate(severities)]


def test_what_is_only_observed_is_well() -> None:
    assert nagios_line(found(Severity.NOTE)) == ("OK: c0: x/y", 0)
    assert nagios_line(found(Severity.NOTE, Severity.UNKNOWN))[1] == 3
    assert nagios_line(found(Severity.WARNING, Severity.UNKNOWN))[1] == 1
    assert nagios_line(found(*[Severity.ERROR] * 5))[0].endswith("(and 2 more)")
    assert exit_code(found(Severity.NOTE, Severity.UNKNOWN)) == 0
    assert exit_code(found(Severity.WARNING)) == 1
