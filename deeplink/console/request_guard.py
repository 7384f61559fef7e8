"""Who may ask what: every request passes here, and every answer gets the headers that keep a browser strict."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    problem: str
    remedy: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one console: every request passes here first."""

    token: str = ""  # of every request, as bearer or basic authentication's password; empty: none is needed

    hosts: frozenset[str] = frozenset()  # good in the Host header besides IP addresses: only a name can be rebound

    posts: frozenset[str] = frozenset()  # paths that take requests of operators, who are told apart there

    def refuse(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused; None where it may pass. Header names are lower case."""
        host = host_name(headers.get("host", ""))
        if not self._known(host):
            return Refusal(
                421,
                f"this console is not {host or 'nobody'!r}",
                "Ask by address, or start it with --allow-host NAME.",
            )
        if method not in {"GET", "HEAD"}:
            return Refusal(
                405,
                "that is only shown, and not changed",
                "Use GET; operators POST to api/v1/actions.",
                ((b"allow", b"GET, HEAD"),),
            )
        if self.token and not self._carried(headers.get("authorization", "")):
            challenge = b'Basic realm="deeplink console: any name, the token as password", charset="UTF-8"'
            return Refusal(
                401,
                "the request carries no valid token",
                "Authorization: Bearer TOKEN, or basic authentication with the token as password.",
                ((b"www-authenticate", challenge),),
            )
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return Refusal(403, "another site's page asked for this", "Open the console itself.")
        return None

    def _known(self, host: str) -> bool:
        if host == "localhost" or host in self.hosts:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def _carried(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        given = b""
        if scheme.lower() == "bearer":
            given = value.strip().encode()
        elif scheme.lower() == "basic":
            try:
                given = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except ValueError:  # no base64, or not even ASCII
                return False
        return hmac.compare_digest(given, self.token.encode())


def host_name(header: str) -> str:
    """Return the name or address in a Host header, without port and brackets.

    >>> host_name("LocalHost:8642"), host_name("[::1]:8642"), host_name("10.0.0.1")
    ('localhost', '::1', '10.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")


class RequestGuard:
    """Refuses by the rules, and puts the headers that keep a browser strict on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":  # nothing here listens for those
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        is_post = scope["method"] == "POST" and scope["path"] in self._access.posts
        refusal = self._access.refuse("GET" if is_post else scope["method"], headers)
        if refusal is None:
            await self._app(scope, receive, strict)
        else:
            await answer(strict, refusal)


async def answer(send: Send, refusal: Refusal) -> None:
    """Say why not, as JSON."""
    body = json.dumps({"error": refusal.problem, "remedy": refusal.remedy}).encode()
    head = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *refusal.headers)
    await send({"type": "http.response.start", "status": refusal.status, "headers": list(head)})
    await send({"type": "http.response.body", "body": body})
