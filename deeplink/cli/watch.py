"""`deeplink watch`: watch jobs from outside, and restart those that lost a node."""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from deeplink.cli.options import (
    flag,
    integer,
    json_option,
    metrics_token,
    option,
    path_option,
    real,
    standing_secret,
)
from deeplink.cli.output import print_json, speaker
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.rpc.daemon import ending_signals, notify_systemd
from deeplink.scheduler.journal.journal import default_journal
from deeplink.scheduler.watch.notify.channels import Channel, load_channels
from deeplink.scheduler.watch.notify.delivery import NotSentError, sender, trial

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.scheduler.watch.service import WatchSettings
    from deeplink.scheduler.watch.watchdog import Daemon

DEFAULT_BIND = "127.0.0.1:7412"
DAY_S, MINTED_DAYS = 86_400, 365
ONCE_S = 6.0  # how long --once looks: as long as the slowest proof of a dead node takes, and a little
ONCE_BUSY_S = 120.0
SLICE_S = 0.25

_EPILOG = """
It acts only with --act: drains and downs nodes proved dead (needs an operator's rights in Slurm), requeues jobs
with the bad nodes excluded. Without --act it says what it would do. It touches only jobs that send it heartbeats
(`deeplink run` does, when DEEPLINK_WATCH is set), and believes those of a job's owner alone, as MUNGE proves. It
may be killed at any moment: started again, it finishes what it began. Of two with one journal, one leads and the
other waits.

\b
Examples:
  deeplink watch                                          observe, on loopback
  deeplink watch --act --bind 0.0.0.0:7412 --token-file /etc/deeplink/watch.token
  deeplink watch --act --resume --metrics-bind 127.0.0.1:9412
  deeplink watch --once                                   look once, report, end
  deeplink watch --notify-test                            send a test message to each channel
  deeplink watch --mint ada --token-file /etc/deeplink/watch.token    a token for ada, where there is no MUNGE
  deeplink watch --mint ada --operator --days 30 --token-file /etc/deeplink/watch.token    hers for the console
"""


class _User(click.ParamType[int]):
    """A user's name or number, as his number."""

    name = "USER"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        import pwd

        text = str(value)
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            return pwd.getpwnam(text).pw_uid
        except KeyError:
            self.fail(f"there is no user {text}", param, ctx)


@click.command("watch", epilog=_EPILOG)
@option("--bind HOST:PORT", "Where heartbeats come in.", default=DEFAULT_BIND)
@path_option(
    "--journal FILE", "What is remembered. [default: watch.sqlite below config state]", name="journal_file"
)
@option("--act/--observe", "Act, or only say what would be done. [default: observe]", name="act", default=False)
@flag("--dry-run", "The same as --observe.")
@flag("--resume", "Take nodes that we drained back into service once they answer again.")
@real("--interval S", "Seconds between two looks in calm.", 0.2, 60.0, default=1.0)
@path_option(
    "--token-file FILE",
    "0600 file with the watchdog's secret, for it alone; made when it is not there. Needed beyond loopback.",
)
@option(
    "--agents USER",
    "Whose standing agents are believed, besides root's and this user's own; may be given again.",
    type=_User(),
    multiple=True,
)
@option(
    "--operators USER",
    "Who may have it act by hand (`deeplink operate`, the console), besides root and this user; may be repeated.",
    type=_User(),
    multiple=True,
)
@option(
    "--mint USER",
    "Without MUNGE: print a token that proves to this watchdog that USER calls, and end.",
    type=_User(),
)
@flag("--operator", "The token of --mint is an operator's.")
@integer("--days", "How long the token of --mint is good for.", 1, 3650, default=MINTED_DAYS)
@option("--metrics-bind HOST:PORT", "Serve Prometheus metrics over HTTP there.", default="")
@path_option("--metrics-token-file FILE", "0600 file with the token to show for metrics. Needed beyond loopback.")
@flag("--notify-test", "Send a test message to each channel of `notify_file`, end.")
@flag("--once", "Look for some seconds, do what is to be done, end.")
@json_option("One JSON object per line instead of sentences.")
def command(  # noqa: PLR0913 - one parameter for each option
    *,
    bind: str,
    journal_file: Path | None,
    act: bool,
    dry_run: bool,
    resume: bool,
    interval: float,
    token_file: Path | None,
    agents: tuple[int, ...],
    operators: tuple[int, ...],
    mint: int | None,
    operator: bool,
    days: int,
    metrics_bind: str,
    metrics_token_file: Path | None,
    notify_test: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Watch jobs from outside and restart those that lost a node, until SIGTERM."""
    from deeplink.scheduler.recovery.evidence import WatchPolicy
    from deeplink.scheduler.recovery.witnesses import with_thresholds
    from deeplink.scheduler.watch.authorizer import Caller, TokenMint
    from deeplink.scheduler.watch.service import WatchSettings

    config = load_config()
    channels = load_channels(config.notify_file) if config.notify_file else ()
    if notify_test:
        _try_channels(channels, as_json=as_json)
        return
    secret, _ = standing_secret(bind, token_file, config.state / "watch.token")
    if operator and mint is None:
        raise click.UsageError("--operator says what the token of --mint USER is for")
    if mint is not None:
        until = SystemClock().unix() + days * DAY_S
        click.echo(TokenMint(secret).token(Caller(uid=mint, operator=operator), until))
        click.echo(f"it ends on {time.strftime('%Y-%m-%d', time.localtime(until))}", err=True)
        return
    if journal_file is None:
        private_folder(config.state, group_reads=True)  # the console's user may be a member of the group
    settings = WatchSettings(
        journal=(journal_file or default_journal(config.state)).absolute(),
        bind=bind,
        secret=secret,
        agents=agents,
        operators=operators,
        act=act and not dry_run,
        policy=with_thresholds(WatchPolicy(resume=resume), config.recovery),
        interval_s=interval,
        metrics_bind=metrics_bind,
        metrics_token=metrics_token(metrics_bind, metrics_token_file),
        channels=channels,
    )
    _lead(settings, speaker(as_json=as_json), _Stop(), once=once)


class _Stop:
    """Becomes true at SIGTERM, SIGINT or SIGHUP; `alarm`, set when a heartbeat is news, ends a wait."""

    def __init__(self) -> None:
        self.alarm = threading.Event()
        self.due = False
        for number in ending_signals(signal.SIGHUP):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self.due = True  # and nothing more: setting an Event here could wait for ourselves

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until there is news; return whether it is time to stop."""
        left = seconds
        while left > 0 and not self.due and not self.alarm.wait(min(left, SLICE_S)):
            left -= SLICE_S
        self.alarm.clear()
        return self.due


def _lead(settings: WatchSettings, say: Callable[[str], None], stop: _Stop, *, once: bool) -> None:
    """Watch as soon as no other watchdog leads with this journal."""
    from deeplink.core.descriptors import LockHeldError

    waiting = False
    while not stop.due:
        try:
            _watch(settings, say, stop, once=once)
        except LockHeldError as taken:
            if once:
                raise
            if not waiting:
                say(f"waiting: {taken}")
                notify_systemd("READY=1\nSTATUS=waiting for the place of the watchdog that leads")
            waiting = True
            stop.wait(1.0)
        else:
            return


def _watch(settings: WatchSettings, say: Callable[[str], None], stop: _Stop, *, once: bool) -> None:
    from deeplink.scheduler.watch.service import watching

    with watching(settings, say, stop.alarm) as (daemon, port):
        host = settings.bind.rpartition(":")[0]
        mode = "acting" if settings.act else "observing only (--act to act)"
        say(f"watching: heartbeats at {host}:{port}, journal {settings.journal}, {mode}")
        notify_systemd(f"READY=1\nSTATUS={mode}")
        if once:
            # Who looks once is no watchdog that could be missed, and waits for no journal.
            daemon.lock, daemon.patient = None, False
        daemon.run(_until(daemon, stop, once=once))
        notify_systemd("STOPPING=1")
    say("stopped")


def _until(daemon: Daemon, stop: _Stop, *, once: bool) -> Callable[[float], bool]:
    began = daemon.clock.monotonic()

    def pause(seconds: float) -> bool:
        if stop.wait(seconds):
            return True
        looked = daemon.clock.monotonic() - began
        return once and (looked >= ONCE_BUSY_S or (looked >= ONCE_S and not daemon.busy))

    return pause


def _try_channels(channels: tuple[Channel, ...], *, as_json: bool) -> None:
    """Send one message to each channel and say what came of it; exit 1 if one did not take it."""
    if not channels:
        raise DeepLinkError(
            "no notifications are configured",
            remedy="`notify_file` of the configuration, or DEEPLINK_NOTIFY_FILE, names a file: docs/incidents.md.",
            exit_code=2,
        )
    message = trial(socket.gethostname(), time.time())
    failed = False
    for channel in channels:
        began = time.monotonic()
        problem = ""
        try:
            sender(channel)(message)
        except NotSentError as refused:
            problem, failed = refused.problem, True
        took = time.monotonic() - began
        if as_json:
            facts = {"channel": channel.name, "taken": not problem, "problem": problem}
            print_json({**facts, "seconds": round(took, 3)})
        else:
            click.echo(f"{channel.name}: {f'not taken: {problem}' if problem else 'taken'} ({took:.1f} s)")
    if failed:
        raise click.exceptions.Exit(1)
