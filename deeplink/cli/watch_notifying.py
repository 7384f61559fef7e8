"""`deeplink watch --notify-test`: one message to each channel, and what came of it."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

import click

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.scheduler.watch.notify.channels import Channel


class NotifyUnsetError(DeepLinkError):
    """There is nobody to tell."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__(
            "no notifications are configured",
            remedy="`notify_file` of the configuration, or DEEPLINK_NOTIFY_FILE, names a file: docs/incidents.md.",
        )


def channels_of(path: Path | None) -> tuple[Channel, ...]:
    """Return the channels that the configuration's `notify_file` names; none without one.

    Raises:
        ConfigError: the file cannot be used.
    """
    from deeplink.scheduler.watch.notify.channels import load_channels

    return load_channels(path) if path else ()


def try_channels(channels: tuple[Channel, ...], *, as_json: bool) -> None:
    """Send one message to each channel and say what came of it; exit 1 if one did not take it.

    Raises:
        NotifyUnsetError: there is no channel.
    """
    from deeplink.scheduler.watch.notify.delivery import NotSentError
    from deeplink.scheduler.watch.notify.delivery_queue import sender
    from deeplink.scheduler.watch.notify.message import trial

    if not channels:
        raise NotifyUnsetError
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
            told = {"channel": channel.name, "taken": not problem, "problem": problem, "seconds": round(took, 3)}
            click.echo(json.dumps(told))
        else:
            click.echo(f"{channel.name}: {f'not taken: {problem}' if problem else 'taken'} ({took:.1f} s)")
    if failed:
        raise click.exceptions.Exit(1)
