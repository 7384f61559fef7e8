"""`deeplink watch` as a process: it takes beats, tells its metrics, gives way to a leader, ends cleanly."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

from deeplink.cli.output import speaker
from deeplink.cli.watch import command
from deeplink.core.types import Attempt
from deeplink.rpc.channel import open_channel
from deeplink.rpc.tokens import read_token
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import beat_to_wire
from deeplink.scheduler.recovery.records import Beat, Phase
from deeplink.scheduler.watch.authorizer import Caller, TokenMint
from deeplink.v1 import watch_pb2_grpc
from tests.processes import free_ports
from tests.scheduler.watch.callers import ME, NEVER
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

# A Slurm that knows nobody: what the cluster tests show is not repeated here.
SLURM = """#!/bin/sh
case "$0 $1 $2" in
*"show node") echo "No nodes in the system";;
*squeue*)
    end=$(echo "$*" | sed -n 's/.*JobID:\\(~[0-9a-f]*~\\).*/\\1/p')
    for field in 17 17 RUNNING None 0 1 USER '' '' x; do printf '%s%s' "$field" "$end"; done;;
esac
""".replace("USER", ME)


class Watchdog:
    """One `deeplink watch` process."""

    def __init__(self, folder: Path, *options: str, **more: str) -> None:
        env = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "DEEPLINK_STATE": str(folder),
            **more,
        }
        argv = [sys.executable, "-m", "deeplink", "watch", "--bind", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self, word: str) -> str:
        """The next line with the word; the test's own time limit bounds the wait."""
        for line in self.out:
            if word in line:
                return line
        raise AssertionError(f"{word!r} was never said")

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "scontrol"):
        (tmp_path / "bin" / name).write_text(SLURM)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def watchdogs(folder: Path) -> Iterator[list[Watchdog]]:
    started: list[Watchdog] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait(LIMIT_S)
        each.out.close()


def test_it_takes_heartbeats_serves_its_metrics_and_ends_at_sigterm(
    folder: Path, watchdogs: list[Watchdog]
) -> None:
    with_metrics = f"127.0.0.1:{free_ports(1)[0]}"
    watchdogs.append(Watchdog(folder, "--metrics-bind", with_metrics))
    ready = watchdogs[0].line("watching: ")
    assert "observing only" in ready
    found = re.search(r"beats at (\S+),", ready)
    assert found
    with open_channel(
        found[1], TokenMint(read_token(folder / "watch.token")).token(Caller(uid=os.getuid()), NEVER)
    ) as channel:
        beat = Beat(attempt=Attempt(17, 0, 0), phase=Phase.RUNNING, user=ME)
        assert watch_pb2_grpc.WatchStub(channel).Beat(beat_to_wire(beat), timeout=LIMIT_S).known
    scraped = await_metric(with_metrics, "deeplink_watch_loop_seconds_count")
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scraped,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert 'deeplink_watch_beats_total{answer="kept"} 1.0' in scraped
    assert "deeplink_watch_leading 1.0" in scraped
    assert "deeplink_watch_acting 0.0" in scraped
    assert watchdogs[0].end() == 0
    assert "stopped" in watchdogs[0].out.read()
    with Journal(folder / "watch.sqlite", read_only=True) as journal:
        assert [job.job for job in journal.jobs()] == [17]
    assert absences(folder) == 0


def absences(folder: Path) -> int:
    with Journal(folder / "watch.sqlite", read_only=True) as journal:
        return len(journal.incidents(kind="watchdog-away"))


def await_round(folder: Path) -> None:
    """Wait until a watchdog has come round: from then on it would be missed."""
    end = time.monotonic() + LIMIT_S
    while not (folder / "watch.sqlite.lock").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_that_was_killed_is_reported_by_the_next_and_one_that_was_ended_is_not(
    folder: Path, watchdogs: list[Watchdog]
) -> None:
    for signum in (signal.SIGHUP, signal.SIGKILL, signal.SIGTERM):
        watchdogs.append(Watchdog(folder))
        watchdogs[-1].line("watching: ")
        await_round(folder)
        watchdogs[-1].process.send_signal(signum)
        assert watchdogs[-1].process.wait(LIMIT_S) == (-signum if signum is signal.SIGKILL else 0)
        if signum is signal.SIGKILL:
            watchdogs.append(Watchdog(folder, "--once"))
            assert watchdogs[-1].process.wait(LIMIT_S) == 0
            assert absences(folder) == 0, "who looks once leaves that to the next watchdog"
    assert absences(folder) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_one_goes_on_at_a_signal_that_its_caller_ignores(
    folder: Path, watchdogs: list[Watchdog], signum: signal.Signals
) -> None:
    before = signal.signal(signum, signal.SIG_IGN)  # a shell does so for its background jobs, nohup for SIGHUP
    try:
        watchdogs.append(Watchdog(folder))
    finally:
        signal.signal(signum, before)
    watchdogs[0].line("watching: ")
    watchdogs[0].process.send_signal(signum)
    await_round(folder)
    assert watchdogs[0].process.poll() is None
    watchdogs[0].process.send_signal(signal.SIGTERM)
    assert watchdogs[0].process.wait(LIMIT_S) == 0


def test_one_whose_port_is_taken_never_watched(folder: Path, watchdogs: list[Watchdog]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        watchdogs.append(Watchdog(folder, "--bind", f"127.0.0.1:{taken.getsockname()[1]}"))
        assert watchdogs[0].process.wait(LIMIT_S) != 0
    assert (folder / "watch.sqlite.lock").read_bytes() == b""


def await_metric(address: str, name: str) -> str:
    """Scrape until the loop has come round."""
    end = time.monotonic() + LIMIT_S
    while True:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
            scraped = str(answer.read().decode())
        counted = re.search(rf"^{name} (\S+)$", scraped, re.MULTILINE)
        if counted and float(counted[1]) > 0:
            return scraped
        assert time.monotonic() < end, scraped
        time.sleep(0.1)


def test_of_two_with_one_journal_one_leads_and_the_other_follows_it(
    folder: Path, watchdogs: list[Watchdog]
) -> None:
    watchdogs.append(Watchdog(folder))
    watchdogs[0].line("watching: ")
    await_round(folder)
    watchdogs.append(Watchdog(folder, "--json"))
    assert "another watchdog" in watchdogs[1].line("waiting: ")
    watchdogs[0].process.kill()
    assert '"said": "watching: ' in watchdogs[1].line("watching: ")
    assert watchdogs[1].end() == 0
    assert absences(folder) == 1


def test_systemd_is_notified_that_a_leader_and_one_that_waits_are_ready(
    folder: Path, watchdogs: list[Watchdog]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.settimeout(30)
        for status in (b"observing", b"waiting"):
            watchdogs.append(Watchdog(folder, NOTIFY_SOCKET=str(folder / "notify")))
            said = systemd.recv(4096)
            assert said.startswith(b"READY=1\n"), "or systemd would end it after a minute"
            assert status in said
        watchdogs[0].process.kill()
        assert b"observing" in systemd.recv(4096)


def test_a_second_one_that_is_to_look_once_does_not_wait(folder: Path, watchdogs: list[Watchdog]) -> None:
    watchdogs.append(Watchdog(folder))
    watchdogs[0].line("watching: ")
    watchdogs.append(Watchdog(folder, "--once"))
    assert "another watchdog holds" in watchdogs[1].line("another")
    assert watchdogs[1].process.wait(LIMIT_S) == 1


def test_once_ends_by_itself(folder: Path, watchdogs: list[Watchdog]) -> None:
    watchdogs.append(Watchdog(folder, "--once", "--dry-run", "--act"))
    assert "observing only" in watchdogs[0].line("watching: "), "--dry-run has the last word"
    assert watchdogs[0].process.wait(LIMIT_S) == 0


def test_without_slurm_it_says_so_and_ends(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "DEEPLINK_STATE": str(tmp_path), "HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "deeplink", "watch", "--bind", "127.0.0.1:0"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 127
    assert "squeue is not on PATH" in done.stderr


def test_beyond_loopback_a_token_file_is_asked_for(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--bind", "0.0.0.0:0"], env={"DEEPLINK_STATE": str(tmp_path)})
    assert done.exit_code == 2
    assert "--token-file" in done.output


def test_help_shows_examples_and_says_what_it_does_by_default() -> None:
    done = CliRunner().invoke(command, ["--help"])
    assert done.exit_code == 0
    assert "deeplink watch --act" in done.output
    assert "[default: observe]" in " ".join(done.output.split())


@pytest.mark.parametrize("as_json", [True, False])
def test_what_slurm_said_in_another_encoding_ends_no_watchdog(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    speaker(as_json=as_json)(os.fsdecode(b"drain refused: caf\xe9"))
    assert "drain refused: caf" in capsys.readouterr().out


def test_a_minted_token_ends_after_the_days_that_were_said(folder: Path) -> None:
    argv = [sys.executable, "-m", "deeplink", "watch", "--mint", str(os.getuid()), "--days", "2"]
    env = {**os.environ, "DEEPLINK_STATE": str(folder)}
    began = time.time()
    made = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    mint = TokenMint(read_token(folder / "watch.token"))
    assert mint.caller(made.stdout.strip(), began + 2 * 86_400 - 2) == Caller(uid=os.getuid())
    assert mint.caller(made.stdout.strip(), time.time() + 2 * 86_400) is None
    assert "it ends on " in made.stderr
