"""`deeplink watch` tells of incidents: a test message to each channel, and a real watchdog with a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deeplink.cli.watch import command
from deeplink.core.config import ConfigError
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.journal import Journal
from tests.scheduler.watch.notify.servers import Heard, Post, mail_server, web
from tests.scheduler.watch.notify.things import dead, recovered
from tests.waiting import LIMIT_S, until

SLURM = '#!/bin/sh\ncase "$1 $2" in "show node") echo "No nodes in the system";; esac\n'


def tried(folder: Path, text: str, *options: str) -> Result:
    (folder / "notify.toml").write_text(text)
    env = {"DEEPLINK_STATE": str(folder), "DEEPLINK_NOTIFY_FILE": str(folder / "notify.toml"), "no_proxy": "*"}
    return CliRunner().invoke(command, ["--notify-test", *options], env=env)


def test_each_channel_is_tried_and_what_came_of_it_is_said(tmp_path: Path) -> None:
    with web(Heard(answers=[200, 500])) as heard, mail_server(Post()) as post:
        channels = f"""
        [[notify]]
        kind = "webhook"
        url = "{heard.url}"
        [[notify]]
        kind = "email"
        to = ["ops@example.org"]
        from = "deeplink@example.org"
        host = "127.0.0.1"
        port = {post.port}
        [[notify]]
        kind = "command"
        argv = ["/bin/sh", "-c", "cat > {tmp_path}/told"]
        """
        done = tried(tmp_path, channels)
        assert done.exit_code == 0, done.output
        assert [line.split(" (")[0] for line in done.output.splitlines()] == [
            "webhook: taken",
            "email: taken",
            "command: taken",
        ]
        assert heard.documents[0]["test"] is True
        assert "test of notifications" in post.mails[0]
        assert json.loads((tmp_path / "told").read_text())["test"] is True
        failed = tried(tmp_path, channels, "--json")
        assert failed.exit_code == 1
        told = [json.loads(line) for line in failed.output.splitlines()]
        assert [(one["channel"], one["taken"], one["problem"]) for one in told] == [
            ("webhook", False, "it answered 500 Internal Server Error"),
            ("email", True, ""),
            ("command", True, ""),
        ]
    assert not (tmp_path / "watch.sqlite").exists(), "a test is no watchdog"


def test_without_channels_the_remedy_is_named(tmp_path: Path) -> None:
    problem = tried(tmp_path, "").exception
    assert isinstance(problem, DeepLinkError)
    assert problem.exit_code == 2
    assert "DEEPLINK_NOTIFY_FILE" in problem.remedy


def test_a_mistake_in_the_file_is_said_before_anything_is_watched(tmp_path: Path) -> None:
    assert isinstance(tried(tmp_path, '[[notify]]\nkind = "pigeon"').exception, ConfigError)


@pytest.mark.slow
def test_a_watchdog_sends_what_its_journal_holds_and_was_not_sent(tmp_path: Path) -> None:
    """Found by a channel that knows the journal: one opened before, one more recorded while no watchdog ran."""
    for name in ("squeue", "scontrol", "sinfo"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SLURM)
        path.chmod(0o755)
    with web(Heard()) as heard:
        (tmp_path / "notify.toml").write_text(
            f'[[notify]]\nkind = "webhook"\nname = "chat"\nurl = "{heard.url}"\nafter_s = 0\n'
        )
        with Journal(tmp_path / "watch.sqlite") as journal:
            journal.record_incident(dead(1))
            journal.open_channel("chat")
            journal.record_incident(dead(2, "n2"))
            journal.record_incident(recovered(dead(2, "n2")))
        env = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "DEEPLINK_STATE": str(tmp_path),
            "DEEPLINK_NOTIFY_FILE": str(tmp_path / "notify.toml"),
            "no_proxy": "*",
        }
        argv = [sys.executable, "-m", "deeplink", "watch", "--bind", "127.0.0.1:0"]
        for _ in range(2):  # the second has nothing to tell
            with subprocess.Popen(
                argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as one:
                try:
                    assert one.stdout is not None
                    assert "watching" in one.stdout.readline()
                    until(lambda: len(heard.documents) == 1)
                finally:
                    one.send_signal(signal.SIGTERM)
                    assert one.wait(LIMIT_S) == 0
        (document,) = heard.documents
        assert [(hit["id"], hit["outcome"]) for hit in document["incidents"]] == [(dead(2, "n2").id, "recovered")]
