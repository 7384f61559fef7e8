"""`deeplink console` as a process: it starts, refuses, prints, and leaves when told."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplink.cli.console import command
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Incident
from deeplink.scheduler.testbed.processes import ProcessId
from tests.waiting import LIMIT_S

COMMAND = [sys.executable, "-m", "deeplink", "console"]
# What Slurm does not answer is given up after 5 s; here after longer than a test may take.
PATIENT = """
from deeplink.console import collect
from deeplink.cli import main
collect.QUERY_S = 900.0
main()
"""


def ran(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HOME": str(tmp_path), "DEEPLINK_STATE": str(tmp_path)}
    return subprocess.run(
        [*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@contextmanager
def running(
    tmp_path: Path, *arguments: str, by: Sequence[str] = COMMAND
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    env = {**os.environ, "HOME": str(tmp_path), "DEEPLINK_STATE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [*by, "--bind", "127.0.0.1:0", "--interval", "0.2", *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            assert "http://127.0.0.1:" in said, process.stderr.read() if process.stderr else said
            yield process, int(said.split("127.0.0.1:")[1].split("/")[0])
        finally:
            process.kill()


def opened(port: int, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    until = time.monotonic() + LIMIT_S
    while True:
        asker = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        try:
            asker.request("GET", path)
            return asker, asker.getresponse()
        except OSError:
            asker.close()
            if time.monotonic() > until:
                raise


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_leaves_at_a_signal_with_pages_open(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, "--no-slurm") as (process, port):
        pages = [opened(port, "/api/v1/events") for _ in range(3)]
        for _, answer in pages:
            assert answer.readline().startswith(b"id: ")
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0
        took = time.monotonic() - began
        for asker, _ in pages:
            asker.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    print(f"left {took:.2f} s after {number.name}")  # noqa: T201 - a figure for people; no test asserts a time


@pytest.mark.slow
def test_a_page_that_reads_nothing_does_not_hold_it_up(tmp_path: Path) -> None:
    with Journal(tmp_path / "watch.sqlite") as journal:
        for number in range(100):
            journal.record_incident(
                Incident(
                    id=f"big-{number}", kind="node-dead", began_unix=1, detected_unix=2, evidence="x" * 100_000
                )
            )
    with running(tmp_path, "--no-slurm") as (process, port), socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stuck.connect(("127.0.0.1", port))
        stuck.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stuck.recv(1, socket.MSG_PEEK) == b"H"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        print(f"left {time.monotonic() - began:.2f} s after SIGTERM")  # noqa: T201 - a figure for people


@pytest.mark.slow
def test_without_its_extra_it_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['starlette'] = None; from deeplink.cli import main; main()"
    env = {**os.environ, "HOME": str(tmp_path), "DEEPLINK_STATE": str(tmp_path)}
    command = [sys.executable, "-c", program, "console"]
    done = subprocess.run(
        [*command, "--no-slurm"], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "deeplink[console]" in done.stderr
    one = [*command, "--no-slurm", "--json"]
    assert subprocess.run(one, env=env, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


@pytest.mark.slow
def test_a_hanging_slurm_delays_neither_the_page_nor_the_end_and_is_ended(tmp_path: Path) -> None:
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    for name in ("scontrol", "squeue"):
        (programs / name).write_text(f"#!/bin/sh\necho $$ >> '{asked}'\nexec sleep 600\n")
        (programs / name).chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{programs}:{before}"
    try:
        with running(tmp_path, by=[sys.executable, "-c", PATIENT, "console"]) as (process, port):
            asker, answer = opened(port, "/api/v1/snapshot")
            document = json.loads(answer.read())
            asker.close()
            assert document["sources"]["nodes"]["state"] in {"waiting", "failing"}
            until = time.monotonic() + LIMIT_S
            while not (asked.exists() and asked.read_text().endswith("\n")):
                assert time.monotonic() < until
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, "well before the hanging command's own bound"
        left = [pid for pid in asked.read_text().split() if ProcessId.of(int(pid))]
        assert left == []
    finally:
        os.environ["PATH"] = before


@pytest.mark.slow
def test_one_snapshot_as_json(tmp_path: Path) -> None:
    done = ran(tmp_path, "--json", "--no-slurm")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["headline"] == {"mood": "unknown", "text": "Nothing known yet"}
    assert document["sources"]["journal"]["state"] == "waiting"


@pytest.mark.parametrize(
    "words",
    [("--bind", "127.0.0.1:0"), ("--open",), ("--token-file", "console.token"), ("--allow-host", "ops.example")],
)
def test_one_snapshot_takes_no_options_of_the_page(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(command, ["--json", "--no-slurm", *words])
    assert done.exit_code == 2
    assert "--json serves no page" in done.output


@pytest.mark.slow
def test_a_busy_port_and_a_wide_address_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = ran(tmp_path, "--no-slurm", "--bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert "is in use" in done.stderr
    assert "--bind 127.0.0.1:0" in done.stderr
    done = ran(tmp_path, "--no-slurm", "--bind", "0.0.0.0:0")
    assert done.returncode == 2
    assert "--token-file" in done.stderr


@pytest.mark.slow
def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame-sesame-sesame")
    token.chmod(0o644)
    done = ran(tmp_path, "--no-slurm", "--bind", "0.0.0.0:0", "--token-file", str(token))
    assert done.returncode == 1
    assert "0600" in done.stderr
