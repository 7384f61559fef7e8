"""How a message is sent to a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.notify.channels import Email, Program
from deeplink.scheduler.watch.notify.mail import MailSender
from deeplink.scheduler.watch.notify.program import ProgramSender
from deeplink.scheduler.watch.notify.webhook import WebhookSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.watch.notify.channels import Channel
    from deeplink.scheduler.watch.notify.message import Notification


def sender(channel: Channel) -> Callable[[Notification], None]:
    """Return what tries once to send a message, in bounded time, and raises NotSentError where it is not taken."""
    match channel.way:
        case Program():
            return ProgramSender(channel.name, channel.way, channel.timeout_s).send
        case Email():
            return MailSender(channel.name, channel.way, channel.timeout_s).send
        case _:
            return WebhookSender(channel.name, channel.way, channel.timeout_s).send
