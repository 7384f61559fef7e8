"""The Ansible roles: clean, runnable in check mode, and really applied into folders of their own."""

from __future__ import annotations

import configparser
import contextlib
import grp
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from deeplink.cli import cli
from deeplink.core.config import load_config
from deeplink.scheduler.node.settings import load_settings
from deeplink.scheduler.watch.notify.channels import Webhook, load_channels
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "ansible"
ROLES = ("package", "node", "watch", "console")
DAEMONS = ("node", "watch", "console")
SPOKEN_TO = ("node", "watch")
"""Daemons with a command of their name."""
IS_ROOT = os.geteuid() == 0
BIN = Path(sys.executable).parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run(*argv: str | Path, cwd: Path = ANSIBLE, path: str | Path = BIN) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="ansible-") as own:  # nothing of the user's home is read or written
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE", "PYTHON"))},
            "PATH": f"{path}:{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "NO_COLOR": "1",
            "ANSIBLE_HOME": own,
            "ANSIBLE_REMOTE_TEMP": f"{own}/tmp",
        }
        return subprocess.run(
            list(map(str, argv)),
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=3 * LIMIT_S,
            check=False,
        )


@dataclass(frozen=True, slots=True)
class Site:
    """Where the roles put things instead of the machine's own folders."""

    root: Path
    wheel: Path
    inventory: Path

    def variables(self) -> dict[str, Any]:
        me = pwd.getpwuid(os.geteuid()).pw_name
        return {
            "deeplink_become": False,
            "package_wheel": str(self.wheel),
            "package_prefix": str(self.root / "opt"),
            "package_config_folder": str(self.root / "etc"),
            "package_unit_folder": str(self.root / "units"),
            "package_command_folder": str(self.root / "sbin"),
            "package_python": sys.executable,
            "package_pip_arguments": "--no-deps --no-index",
            "package_system_packages": [],
            "package_make_user": False,
            "package_start_services": False,
            "package_user": me,
            "package_group": grp.getgrgid(os.getegid()).gr_name,
            "watch_user": me,
            "watch_make_operator": False,
            "console_user": me,
            "node_bind": "127.0.0.1:0",
            "node_metrics_bind": "",
            "node_store": str(self.root / "ssd"),
            "node_polkit_folder": str(self.root / "polkit"),
            "console_token": "a-token-for-the-console",
        }

    def play(
        self, *options: str, more: Mapping[str, Any] | None = None, path: Path = BIN
    ) -> dict[str, dict[str, int]]:
        """Apply site.yml, with programs of `path` first, and return its recap: host -> what -> how many."""
        extra = json.dumps({**self.variables(), **(more or {})})
        done = run("ansible-playbook", "-i", self.inventory, "site.yml", "-e", extra, *options, path=path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr
        recap = done.stdout.partition("PLAY RECAP")[2].splitlines()[1:]
        return {
            line.split()[0]: {word.partition("=")[0]: int(word.partition("=")[2]) for word in line.split()[2:]}
            for line in recap
            if ":" in line
        }

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put back what a play wrote, for the other tests. To play once more takes ten seconds of a core."""
        written = ("etc", "units", "sbin", "polkit")
        with tempfile.TemporaryDirectory(prefix="site-") as folder:
            for name in written:
                shutil.copytree(self.root / name, Path(folder) / name, symlinks=True)
            try:
                yield
            finally:
                for name in written:
                    shutil.rmtree(self.root / name)
                    shutil.copytree(Path(folder) / name, self.root / name, symlinks=True)

    def unit(self, daemon: str) -> configparser.ConfigParser:
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
        unit.read(self.root / "units" / f"deeplink-{daemon}.service")
        return unit

    def command_line(self, daemon: str) -> list[str]:
        return shlex.split(self.unit(daemon)["Service"]["ExecStart"])

    def environment(self, daemon: str) -> dict[str, str]:
        """Return what the unit sets."""
        lines = (self.root / "units" / f"deeplink-{daemon}.service").read_text().splitlines()
        said = [line.partition("=")[2] for line in lines if line.startswith("Environment=")]
        return dict(one.strip('"').split("=", 1) for one in said)

    def spoken_to(self, daemon: str) -> str:
        """Return the command of a daemon's name; without its `runuser` where that would be refused."""
        written = (self.root / "sbin" / f"deeplink-{daemon}").read_text()
        user = self.unit(daemon)["Service"]["User"]
        assert written.count(f"exec runuser -u {user} -- env -i ") == 1
        return written if IS_ROOT else written.replace(f"runuser -u {user} -- ", "")

    def says(self, daemon: str, *argv: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command of a daemon's name, from a shell with settings of its own.

        Args:
            daemon: which.
            argv: what to tell it.
            state: the folder that stands for the unit's, below this machine's /var/lib; None: that itself.
        """
        command = self.root / "sbin" / f"deeplink-{daemon}"
        text = self.spoken_to(daemon)
        if state:
            assert text.count(f"DEEPLINK_STATE=/var/lib/deeplink-{daemon} ") == 1
            text = text.replace(f"/var/lib/deeplink-{daemon} ", f"{state} ")
        env = {"PATH": "/usr/bin:/bin", "HOME": "/root", "DEEPLINK_STATE": "/elsewhere", "TERM": "dumb"}
        return subprocess.run(
            [command, *argv] if IS_ROOT and not state else ["/bin/sh", "-c", text, command, *argv],
            env=env,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=3 * LIMIT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tree = Path(shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_OUT))
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=tree)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def new_site(root: Path, wheel: Path) -> Site:
    for folder in ("units", "sbin"):
        (root / folder).mkdir()
    inventory = Path(shutil.copytree(ANSIBLE / "inventory.example", root / "inventory"))
    return Site(root, wheel, inventory)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site with everything applied once."""
    site = new_site(tmp_path_factory.mktemp("site"), wheel)
    recap = site.play()
    assert all(host["changed"] > 0 and host["failed"] == 0 for host in recap.values())
    # Its dependencies are those of this environment, not downloaded again.
    (packages,) = (site.root / "opt").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


def test_ansible_lint_has_nothing_to_say() -> None:
    done = run("ansible-lint", "--offline", "--profile", "production", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


def test_check_mode_runs_on_the_example_and_changes_nothing(wheel: Path, tmp_path: Path) -> None:
    site = new_site(tmp_path, wheel)
    recap = site.play("--check")
    assert set(recap) == {"node0", "head"}
    assert all(host["failed"] == 0 for host in recap.values())
    assert not (tmp_path / "opt").exists()
    assert not any((tmp_path / "units").iterdir())
    assert not any((tmp_path / "sbin").iterdir())


def test_a_second_run_changes_nothing(site: Site) -> None:
    assert {host: done["changed"] for host, done in site.play().items()} == {"node0": 0, "head": 0}


def test_the_configuration_is_one_that_deeplink_reads(site: Site) -> None:
    path = site.root / "etc" / "config.toml"
    config = load_config({"DEEPLINK_CONFIG": str(path)})
    written = tomllib.loads(path.read_text())
    assert written
    for key, value in written.items():
        assert str(getattr(config, key)) == str(value)


def test_a_key_deeplink_does_not_know_is_refused_and_the_old_file_stays(site: Site) -> None:
    path = site.root / "etc" / "config.toml"
    before = path.read_text()
    with pytest.raises(AssertionError, match="unknown key"):
        site.play("--limit", "node0", more={"package_config": {"storre": "/x"}})
    assert path.read_text() == before


def test_tokens_are_for_one_user_alone_and_one_for_all_members(site: Site) -> None:
    for daemon in ("node", "console"):  # the watchdog makes its secret itself
        path = site.root / "etc" / f"{daemon}.token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = (site.inventory / ".tokens" / "node").read_text().split()[0]
    assert (site.root / "etc" / "node.token").read_text().strip() == made
    assert len(made) == 43


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_unit_is_one_that_systemd_understands(site: Site, daemon: str) -> None:
    done = run("systemd-analyze", "verify", "--man=no", site.root / "units" / f"deeplink-{daemon}.service")
    about_ours = [line for line in (done.stdout + done.stderr).splitlines() if f"deeplink-{daemon}" in line]
    assert not about_ours
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_unit_is_hardened(site: Site, daemon: str, tmp_path: Path) -> None:
    unit = tmp_path / f"deeplink-{daemon}.service"
    written = (site.root / "units" / unit.name).read_text()
    # Here it is who runs the tests, perhaps root; on a site it is a user of its own.
    unit.write_text(re.sub(r"^User=.*$", "User=deeplink", written, flags=re.MULTILINE))
    done = run("systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", unit)
    assert done.returncode == 0, done.stdout[-800:] + done.stderr


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_unit_starts_a_command_with_options_it_has(site: Site, daemon: str) -> None:
    program, verb, *options = site.command_line(daemon)
    assert program == str(site.root / "opt" / "bin" / "deeplink")
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    command.make_context(verb, options)  # raises UsageError on an option that is not there


def test_the_node_agent_starts_as_its_unit_says_and_ends_when_told(site: Site) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "DEEPLINK_CONFIG": str(site.root / "etc" / "config.toml"),
        "HOME": "/nonexistent",
    }
    env["DEEPLINK_STATE"] = str(site.root / "state")
    with subprocess.Popen(site.command_line("node"), env=env, stdout=subprocess.PIPE, text=True, cwd="/") as agent:
        try:
            assert agent.stdout is not None
            announced = json.loads(agent.stdout.readline())
            assert announced["node"] == "node0"
            assert announced["token_file"] == str(site.root / "etc" / "node.token")
        finally:
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(LIMIT_S) == 0


@pytest.mark.parametrize("daemon", SPOKEN_TO)
def test_the_command_of_a_daemons_name_has_its_units_user_and_settings_and_no_others(
    site: Site, daemon: str, tmp_path: Path
) -> None:
    written = site.spoken_to(daemon)
    program = str(site.root / "opt" / "bin" / "deeplink")
    assert written.count(program) == 1
    bare = tmp_path / "bare"
    bare.write_text(written.replace(program, "/bin/sh -c 'umask; env -0' sh"))
    done = subprocess.run(
        ["/bin/sh", bare], env={"DEEPLINK_STATE": "/x", "FOO": "1"}, capture_output=True, text=True, check=True
    )
    umask, _, rest = done.stdout.partition("\n")
    found = dict(line.split("=", 1) for line in rest.split("\0") if line)
    assert umask == ("0027" if daemon == "watch" else "0077")
    assert {name: value for name, value in found.items() if name not in {"PATH", "PWD"}} == site.environment(
        daemon
    )


def test_people_ask_the_daemons_themselves_by_the_commands_of_their_names(site: Site, tmp_path: Path) -> None:
    seen = tmp_path / f"health-seen-{socket.gethostname()}.json"
    seen.write_text("{}")
    forgot = site.says("node", "health", "--forget", state=tmp_path)
    assert (forgot.returncode, forgot.stderr) == (0, "")
    assert str(seen) in forgot.stdout
    assert not seen.exists()
    listed = site.says("node", "health", "--list", "--json")
    (disk,) = [row for row in json.loads(listed.stdout)["checks"] if row["check"] == "disk"]
    assert str(site.root / "ssd") in json.dumps(disk)
    journal = site.says("watch", "incidents")
    assert (journal.returncode, journal.stdout) == (1, "")
    assert "/var/lib/deeplink-watch/watch.sqlite" in journal.stderr
    nobody = site.says("watch", "watch", "--notify-test")
    assert "notify_file" in nobody.stderr
    console = json.loads(site.says("watch", "console", "--no-slurm", "--json").stdout)
    assert "/var/lib/deeplink-watch/watch.sqlite" in json.dumps(console)
    assert "no check 'no such'" in site.says("node", "health", "--check", "no such").stderr


def test_a_new_configuration_makes_a_new_unit(site: Site) -> None:
    before = (site.root / "units" / "deeplink-node.service").read_text()
    config = {**tomllib.loads((site.root / "etc" / "config.toml").read_text()), "replicas": 3}
    with site.kept():
        done = site.play("--limit", "node0", more={"package_config": config})
        assert done["node0"]["changed"] == 2  # the configuration and the unit, which is what a restart hangs on
        assert (site.root / "units" / "deeplink-node.service").read_text() != before
        site.play("--limit", "node0")
        assert (site.root / "units" / "deeplink-node.service").read_text() == before


def test_who_is_told_of_incidents_is_for_the_watchdog_alone_to_read(site: Site) -> None:
    rules = site.root / "rules"
    rules.mkdir()
    url_file = site.root / "etc" / "chat.url"
    notify = f'[[notify]]\nkind = "webhook"\nurl_file = "{url_file}"\n'
    more = {
        "watch_notify": notify,
        "watch_secrets": {"chat.url": "https://chat.example/hush"},
        "watch_alert_rules_folder": str(rules),
    }
    with site.kept():
        site.play("--limit", "head", more=more)
        assert site.play("--limit", "head", more=more)["head"]["changed"] == 0
        path = site.root / "etc" / "notify.toml"
        assert {stat.S_IMODE(each.stat().st_mode) for each in (path, url_file)} == {0o600}
        (channel,) = load_channels(path)
        assert channel.way == Webhook(url_file=url_file)
        assert url_file.read_text() == "https://chat.example/hush\n"
        unit = (site.root / "units" / "deeplink-watch.service").read_text()
        assert f"Environment=DEEPLINK_NOTIFY_FILE={path}\n" in unit
        assert f"DEEPLINK_NOTIFY_FILE={path}" in (site.root / "sbin" / "deeplink-watch").read_text()
        assert (rules / "deeplink-alerts.yml").read_text() == (
            ANSIBLE / "roles" / "watch" / "files" / "deeplink-alerts.yml"
        ).read_text()


@pytest.mark.parametrize("token", ["", "hush"])
def test_prometheus_is_told_whom_to_ask_and_agents_are_open_to_who_shows_the_token(site: Site, token: str) -> None:
    folder, boards = site.root / "etc" / "scrape", site.root / "etc" / "boards"
    more = {
        "package_metrics_token": token,
        "node_metrics_bind": "{{ '0.0.0.0' if package_metrics_token else '127.0.0.1' }}:9411",
        "watch_scrape_folder": str(folder),
        "watch_grafana_folder": str(boards),
        "watch_prometheus_user": site.variables()["watch_user"],
    }
    with site.kept():
        folder.mkdir()
        boards.mkdir()
        site.play("--limit", "head,node0", more=more)
        scrape = yaml.safe_load((folder / "deeplink-scrape.yml").read_text())["scrape_configs"]
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": scrape}))
        if shutil.which("promtool"):  # which only the whole test run installs
            checked = run("promtool", "check", "config", folder / "prometheus.yml")
            assert checked.returncode == 0, checked.stdout + checked.stderr
        jobs = {job["job_name"]: job for job in scrape}
        unit = (site.root / "units" / "deeplink-node.service").read_text()
        assert ("deeplink-node" in jobs) is bool(token)
        assert ("--metrics-token-file" in unit) is bool(token)
        assert jobs["deeplink-console"]["authorization"]["credentials_file"] == f"{folder}/deeplink-console.token"
        assert {each.stem for each in boards.iterdir()} == {"deeplink-cluster", "deeplink-jobs", "deeplink-cache"}
        if token:
            assert (folder / "deeplink-metrics.token").read_text() == "hush\n"
            assert stat.S_IMODE((folder / "deeplink-metrics.token").stat().st_mode) == 0o600
            assert jobs["deeplink-node"]["http_sd_configs"][0]["url"].endswith("/api/v1/targets")


def test_the_node_agent_may_start_slurmd_anew_and_looks_after_its_node_as_it_is_told(site: Site) -> None:
    rule = (site.root / "polkit" / "50-deeplink-slurmd.rules").read_text()
    assert 'action.lookup("unit") == "slurmd.service"' in rule
    unit = (site.root / "units" / "deeplink-node.service").read_text()
    command = "sh -c 'systemctl is-failed --quiet slurmd.service && systemctl restart slurmd.service'"
    assert f'Environment="DEEPLINK_SLURMD_RESTART={command}"\n' in unit
    health = {
        "mount": {"most": "drain", "paths": ["/home"]},
        "site": {"burn": {"command": ["/bin/true"], "bad": 1}},
    }
    with site.kept():
        site.play("--limit", "node0", more={"node_health": health, "node_slurmd_restart": ""})
        settings = load_settings(site.root / "etc" / "health.toml")
        assert (settings.mount.most.action, settings.mount.paths) == ("drain", ("/home",))
        assert settings.site["burn"].command == ("/bin/true",)
        assert "SLURMD_RESTART" not in (site.root / "units" / "deeplink-node.service").read_text()
        with pytest.raises(AssertionError, match="no such check"):
            site.play("--limit", "node0", more={"node_health": {"dsik": {}}})


def test_slurmd_may_have_another_unit(site: Site) -> None:
    with site.kept():
        site.play("--limit", "node0", more={"node_slurmd_unit": "slurmd@ib.service"})
        command = site.environment("node")["DEEPLINK_SLURMD_RESTART"]
        assert command == (
            "sh -c 'systemctl is-failed --quiet slurmd@ib.service && systemctl restart slurmd@ib.service'"
        )
        rule = (site.root / "polkit" / "50-deeplink-slurmd.rules").read_text()
        assert 'action.lookup("unit") == "slurmd@ib.service"' in rule


def test_the_watchdogs_secret_stays_on_its_host_and_it_believes_the_node_agents_user(site: Site) -> None:
    line = site.command_line("watch")
    assert line[line.index("--token-file") + 1] == "/var/lib/deeplink-watch/watch.token"
    assert line[line.index("--agents") + 1] == site.variables()["package_user"]
    laid = [path.name for path in (site.root / "etc").iterdir()]
    assert not [name for name in laid if "watch" in name], laid
    assert "DEEPLINK_WATCH_TOKEN_FILE" not in site.environment("node")


def test_watchdog_and_console_have_users_of_their_own_and_neither_is_slurms() -> None:
    import yaml

    defaults = {
        role: yaml.safe_load((ANSIBLE / "roles" / role / "defaults" / "main.yml").read_text())
        for role in ("package", "watch", "console")
    }
    users = [
        defaults["package"]["package_user"],
        defaults["watch"]["watch_user"],
        defaults["console"]["console_user"],
    ]
    assert users == ["deeplink", "deeplink-watch", "deeplink-console"]


def test_the_console_reads_the_journal_as_a_member_of_the_watchdogs_group(site: Site) -> None:
    watch, console = site.unit("watch")["Service"], site.unit("console")["Service"]
    assert (watch["StateDirectoryMode"], watch["UMask"]) == ("0750", "0027")
    assert (console["StateDirectoryMode"], console["UMask"]) == ("0700", "0077")
    assert "ReadWritePaths" not in console


SACCTMGR = """#!/bin/sh
echo "$*" >> {folder}/asked
case "$*" in
*show*) cat {folder}/level;;
*modify*) echo Operator > {folder}/level;;
esac
"""


def test_an_acting_watchdog_is_made_a_slurm_operator_once(site: Site, tmp_path: Path) -> None:
    (tmp_path / "level").write_text("")
    program = tmp_path / "sacctmgr"
    program.write_text(SACCTMGR.format(folder=tmp_path))
    program.chmod(0o755)
    more = {"watch_act": True, "watch_make_operator": True}
    with site.kept():
        assert site.play("--limit", "head", more=more, path=tmp_path)["head"]["changed"] > 0
        asked = (tmp_path / "asked").read_text()
        me = site.variables()["watch_user"]
        assert f"--immediate add user {me} account=root\n" in asked
        assert f"--immediate modify user {me} set adminlevel=Operator\n" in asked
        assert site.play("--limit", "head", more=more, path=tmp_path)["head"]["changed"] == 0


@pytest.mark.parametrize("role", ROLES)
def test_a_role_names_its_variables_in_defaults_specification_and_readme(role: str) -> None:
    import yaml

    folder = ANSIBLE / "roles" / role
    defaults = yaml.safe_load((folder / "defaults" / "main.yml").read_text())
    options = yaml.safe_load((folder / "meta" / "argument_specs.yml").read_text())["argument_specs"]["main"][
        "options"
    ]
    assert set(defaults) == set(options)
    readme = (folder / "README.md").read_text()
    for name in options:
        assert f"`{name}`" in readme
