"""`deeplink watch`: watch jobs from outside, and restart those that lost a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.config import Config
    from deeplink.scheduler.watch.daemon import Daemon
    from deeplink.scheduler.watch.service import WatchSettings

DEFAULT_BIND = "127.0.0.1:7412"
DAY_S, MINTED_DAYS = 86_400, 365
ONCE_S = 6.0
"""How long --once looks: as long as the slowest proof of a dead node takes, and a little."""
ONCE_BUSY_S = 120.0
SLICE_S = 0.25

_EPILOG = """
It acts only with --act: drains and downs nodes proved dead (needs an operator's rights in Slurm), requeues jobs
with the bad nodes excluded. Without it says what it would do. It touches only jobs that beat to it (`deeplink run`
does, when DEEPLINK_WATCH is set), and believes beats of a job's owner alone, whom MUNGE proves. It may be killed
at any moment: started again, it finishes what it began. Of two with one journal, one leads and the other waits.

\b
Examples:
  deeplink watch                                          observe, on loopback
  deeplink watch --act --bind 0.0.0.0:7412 --token-file /etc/deeplink/watch.token
  deeplink watch --act --resume --metrics-bind 127.0.0.1:9412
  deeplink watch --once                                   look once, report, end
  deeplink watch --notify-test                            try who is told of incidents
  deeplink watch --mint ada --token-file /etc/deeplink/watch.token    a token for ada, where there is no MUNGE
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
@click.option("--bind", metavar="HOST:PORT", default=DEFAULT_BIND, show_default=True, help="Where beats come in.")
@click.option(
    "--journal",
    "journal_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What is remembered. [default: watch.sqlite below config state]",
)
@click.option(
    "--act/--observe", "act", default=False, help="Act, or only say what would be done. [default: observe]"
)
@click.option("--dry-run", is_flag=True, help="The same as --observe.")
@click.option(
    "--resume", is_flag=True, help="Take nodes that we drained back into service once they answer again."
)
@click.option(
    "--act-on-switch/--no-act-on-switch",
    default=True,
    show_default=True,
    help="Give up the nodes that jobs have on a leaf that is wholly silent, in the leaf's name.",
)
@click.option(
    "--interval",
    type=FiniteRange(0.2, 60.0),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks in calm.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="0600 file with the watchdog's secret, for it alone; made when it is not there. Needed beyond loopback.",
)
@click.option(
    "--agents",
    type=_User(),
    multiple=True,
    metavar="USER",
    help="Whose standing agents are believed, besides root's and this user's own; may be given again.",
)
@click.option(
    "--mint",
    type=_User(),
    metavar="USER",
    help="Without MUNGE: print a token that proves to this watchdog that USER calls, and end.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=MINTED_DAYS,
    show_default=True,
    help="How long the token of --mint is good for.",
)
@click.option("--metrics-bind", metavar="HOST:PORT", default="", help="Serve Prometheus metrics over HTTP there.")
@click.option("--notify-test", is_flag=True, help="Send a test message to each channel of `notify_file`, end.")
@click.option("--once", is_flag=True, help="Look for some seconds, do what is to be done, end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line instead of sentences.")
def command(  # noqa: PLR0913 - one parameter for each option
    *,
    bind: str,
    journal_file: Path | None,
    act: bool,
    dry_run: bool,
    resume: bool,
    act_on_switch: bool,
    interval: float,
    token_file: Path | None,
    agents: tuple[int, ...],
    mint: int | None,
    days: int,
    metrics_bind: str,
    notify_test: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Watch jobs from outside and restart those that lost a node, until SIGTERM."""
    import time

    from deeplink.cli.watch_notifying import channels_of, try_channels
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.private import private_folder
    from deeplink.scheduler.watch.evidence import WatchPolicy
    from deeplink.scheduler.watch.identity import Caller, TokenMint
    from deeplink.scheduler.watch.journal import default_journal
    from deeplink.scheduler.watch.service import WatchSettings

    config = load_config()
    channels = channels_of(config.notify_file)
    if notify_test:
        try_channels(channels, as_json=as_json)
        return
    secret = _secret(bind, token_file, config.state)
    if mint is not None:
        until = SystemClock().unix() + days * DAY_S
        click.echo(TokenMint(secret).token(Caller(uid=mint), until))
        click.echo(f"it ends on {time.strftime('%Y-%m-%d', time.localtime(until))}", err=True)
        return
    if journal_file is None:
        private_folder(config.state, group_reads=True)  # the console's user may be a member of the group
    settings = WatchSettings(
        journal=(journal_file or default_journal(config.state)).absolute(),
        bind=bind,
        secret=secret,
        agents=agents,
        act=act and not dry_run,
        policy=WatchPolicy(resume=resume, act_on_switch=act_on_switch),
        interval_s=interval,
        metrics_bind=metrics_bind,
        channels=channels,
        **(_help(config) if act and not dry_run else {}),
    )
    stop = _Stop()
    _lead(settings, _speaker(as_json=as_json), stop, once=once)


def _help(config: Config) -> dict[str, Any]:
    from deeplink.cli.watch_wishing import heirs_of, wishes_of

    return {"wishes": wishes_of(config), "heirs": heirs_of(config)}


def _secret(bind: str, path: Path | None, state: Path) -> str:
    from deeplink.daemon import is_loopback, split_bind, standing_token

    if path is None and not is_loopback(split_bind(bind)[0]):
        raise click.UsageError(
            f"others can reach {bind}: give --token-file FILE, where the watchdog's secret is kept"
        )
    return standing_token(path, state / "watch.token")[0]


def _speaker(*, as_json: bool) -> Callable[[str], None]:
    import json
    import time

    from deeplink.text import printable

    def say(line: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        click.echo(json.dumps({"time": now, "said": line}) if as_json else f"{now} {printable(line)}")

    return say


class _Stop:
    """Becomes true at SIGTERM, SIGINT or SIGHUP; `alarm`, set when a beat is news, wakes whoever waits."""

    def __init__(self) -> None:
        import signal
        import threading

        from deeplink.daemon import ending_signals

        self.alarm = threading.Event()
        self.told = False
        for number in ending_signals(signal.SIGHUP):
            signal.signal(number, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = True  # and nothing more: setting an Event here could wait for ourselves

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until there is news; return whether it is time to stop."""
        left = seconds
        while left > 0 and not self.told and not self.alarm.wait(min(left, SLICE_S)):
            left -= SLICE_S
        self.alarm.clear()
        return self.told


def _lead(settings: WatchSettings, say: Callable[[str], None], stop: _Stop, *, once: bool) -> None:
    """Watch as soon as no other watchdog leads with this journal."""
    from deeplink.daemon import notify_systemd
    from deeplink.scheduler.watch.leader_lock import LeaderError

    told = False
    while not stop.told:
        try:
            _watch(settings, say, stop, once=once)
        except LeaderError as taken:
            if once:
                raise
            if not told:
                say(f"waiting: {taken}")
                notify_systemd("READY=1\nSTATUS=waiting for the place of the watchdog that leads")
            told = True
            stop.wait(1.0)
        else:
            return


def _watch(settings: WatchSettings, say: Callable[[str], None], stop: _Stop, *, once: bool) -> None:
    from deeplink.daemon import notify_systemd
    from deeplink.scheduler.watch.service import watching

    with watching(settings, say, stop.alarm) as (daemon, port):
        host = settings.bind.rpartition(":")[0]
        mode = "acting" if settings.act else "observing only (--act to act)"
        say(f"watching: beats at {host}:{port}, journal {settings.journal}, {mode}")
        notify_systemd(f"READY=1\nSTATUS={mode}")
        if once:
            # Who looks once is no watchdog that could be missed, and waits for no journal.
            daemon.lead, daemon.patient = None, False
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
