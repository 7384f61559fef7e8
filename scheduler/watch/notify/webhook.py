"""A message as HTTP POST of JSON; through the proxy that the environment names, where it names one."""

from __future__ import annotations

import http.client
import json
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.watch.notify.channels import checked_url
from deeplink.scheduler.watch.notify.delivery import NotSentError, cut_off, trust
from deeplink.tokens import read_token

if TYPE_CHECKING:
    from deeplink.scheduler.watch.notify.channels import Webhook
    from deeplink.scheduler.watch.notify.message import Notification

LONGEST_READ = 4_096
_TAKEN = range(200, 300)


class WebhookSender:
    """Posts messages to one URL; a connection each, for they are few."""

    def __init__(self, name: str, way: Webhook, timeout_s: float) -> None:
        self._name, self._way, self._timeout_s = name, way, timeout_s

    def send(self, message: Notification) -> None:
        """Post a message.

        Raises:
            NotSentError: the other side could not be reached, was too slow, or answered anything but 2xx.
        """
        try:
            status, reason, wait = self._post(message)
        # UnicodeError and ValueError: of host names and header fields that cannot be sent.
        except (OSError, http.client.HTTPException, UnicodeError, ValueError) as problem:
            raise NotSentError(self._name, str(problem) or type(problem).__name__) from problem
        except NotSentError:
            raise
        except DeepLinkError as problem:  # of a file with a URL or token
            raise NotSentError(self._name, str(problem)) from problem
        if status not in _TAKEN:
            raise NotSentError(self._name, f"it answered {status} {reason}", wait)

    def _post(self, message: Notification) -> tuple[int, str, float]:
        url = urllib.parse.urlsplit(self._url())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "deeplink-watch",
            "Idempotency-Key": message.id,
            "Connection": "close",
        }
        if self._way.token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(self._way.token_file)}"
        connection, target = self._connection(url)
        try:
            with cut_off(self._timeout_s, lambda: connection.sock):
                connection.request("POST", target, json.dumps(message.document).encode(), headers)
                answer = connection.getresponse()
                answer.read(LONGEST_READ)
            return answer.status, answer.reason, _seconds(answer.getheader("Retry-After"))
        finally:
            connection.close()

    def _url(self) -> str:
        if self._way.url_file is None:
            return self._way.url

        def wrong(_key: str, problem: str) -> NotSentError:
            return NotSentError(self._name, f"{self._way.url_file}: {problem}")

        return checked_url(self._way.url_file.read_text(encoding="utf-8").strip(), wrong)

    def _connection(self, url: urllib.parse.SplitResult) -> tuple[http.client.HTTPConnection, str]:
        host, target = url.hostname or "", urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(url.scheme)
        over = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else url
        if url.scheme == "https":
            tls = http.client.HTTPSConnection(
                over.hostname or "", over.port, timeout=self._timeout_s, context=trust(self._way.ca_file)
            )
            if proxy:
                tls.set_tunnel(host, url.port or 443)
            return tls, target
        plain = http.client.HTTPConnection(over.hostname or "", over.port, timeout=self._timeout_s)
        # A proxy is asked for the whole address.
        return plain, urllib.parse.urlunsplit(
            (url.scheme, url.netloc, url.path or "/", url.query, "")
        ) if proxy else target


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; as a date it is left to our own pauses."""
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 6 else 0.0  # noqa: PLR2004 - a day and more
