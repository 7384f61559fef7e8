"""A message as a mail, by SMTP."""

from __future__ import annotations

import contextlib
import logging
import smtplib
import socket
from email.message import EmailMessage
from email.utils import formatdate
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.watch.notify.delivery import NotSentError, cut_off, trust
from deeplink.tokens import read_token

if TYPE_CHECKING:
    from deeplink.scheduler.watch.notify.channels import Email
    from deeplink.scheduler.watch.notify.message import Notification


log = logging.getLogger(__name__)


class MailSender:
    """Hands mails to one SMTP server; a connection each, for they are few."""

    def __init__(self, name: str, way: Email, timeout_s: float) -> None:
        self._name, self._way, self._timeout_s = name, way, timeout_s

    def send(self, message: Notification) -> None:
        """Hand a mail over.

        Raises:
            NotSentError: the server could not be reached, was too slow, or took it for no receiver.
        """
        try:
            refused = self._hand_over(message)
        except smtplib.SMTPResponseException as problem:
            said = problem.smtp_error.decode(errors="replace") if isinstance(problem.smtp_error, bytes) else ""
            raise NotSentError(self._name, f"it answered {problem.smtp_code} {said}") from problem
        except (OSError, smtplib.SMTPException, UnicodeError, ValueError) as problem:
            raise NotSentError(self._name, str(problem) or type(problem).__name__) from problem
        except DeepLinkError as problem:  # of the file with the password
            raise NotSentError(self._name, str(problem)) from problem
        if refused:
            # The others have it: sent again, they would have it twice.
            log.warning("channel %s: it was not taken for %s", self._name, ", ".join(sorted(refused)))

    def _hand_over(self, message: Notification) -> dict[str, tuple[int, bytes]]:
        way = self._way
        password = read_token(way.password_file) if way.password_file else ""
        us = socket.gethostname()  # smtplib would ask for the full name, which may take long
        if way.tls == "tls":
            context = trust(way.ca_file)
            server: smtplib.SMTP = smtplib.SMTP_SSL(local_hostname=us, timeout=self._timeout_s, context=context)
        else:
            server = smtplib.SMTP(local_hostname=us, timeout=self._timeout_s)
        # `connect` does not tell it, and certificates are checked by it.
        server._host = way.host  # type: ignore[attr-defined]  # noqa: SLF001 - as smtplib does itself with a host
        try:
            with cut_off(self._timeout_s, lambda: server.sock):
                server.connect(way.host, way.port)
                if way.tls == "starttls":
                    server.starttls(context=trust(way.ca_file))
                if way.user:
                    server.login(way.user, password)
                refused = server.send_message(_mail(message, way))
                with contextlib.suppress(OSError, smtplib.SMTPException):
                    server.quit()  # whatever becomes of it: the mail was taken
                return refused
        finally:
            server.close()


def _mail(message: Notification, way: Email) -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["To"] = way.sender, ", ".join(way.to)
    mail["Subject"] = " ".join(message.subject.split())[:200]
    mail["Date"] = formatdate(localtime=True)
    # The same news have the same id: a mail program shows a repeated one once.
    mail["Message-ID"] = f"<{message.id}@{way.sender.partition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"  # nobody's holiday notice answers it
    mail.set_content(message.text + "\n")
    return mail
