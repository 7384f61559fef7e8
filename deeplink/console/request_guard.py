"""Who may ask what: every request passes here, and every answer gets the headers that keep a browser strict.

Who asks is a viewer, unless a token or a trusted proxy says more.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from starlette.datastructures import Headers
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

TOKEN, ROLE, USER = "deeplink-token", "x-deeplink-role", "x-remote-user"
"""Headers: an operator's token; and what a proxy that knows its users says of one; it drops its clients'."""
_LONGEST_TOKEN = 512
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def refusal(status: int, problem: str, remedy: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer to a request that is not answered."""
    return JSONResponse({"error": problem, "remedy": remedy}, status, headers)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one console: every request passes here first."""

    token: str = ""  # of every request, as bearer or basic authentication's password; empty: none is needed
    hosts: frozenset[str] = frozenset()  # good in the Host header besides IP addresses: only a name can be rebound
    posts: frozenset[str] = frozenset()  # paths that take requests of operators, who are told apart there

    def refuse(self, method: str, headers: Mapping[str, str]) -> JSONResponse | None:
        """Return why a request is refused; None where it may pass. Header names are lower case."""
        host = host_name(headers.get("host", ""))
        if not self._known(host):
            return refusal(
                421,
                f"this console is not {host or 'nobody'!r}",
                "Ask by address, or start it with --allow-host NAME.",
            )
        if method not in {"GET", "HEAD"}:
            return refusal(
                405,
                "that is only shown, and not changed",
                "Use GET; operators POST to api/v1/actions.",
                {"allow": "GET, HEAD"},
            )
        if self.token and not self._carried(headers.get("authorization", "")):
            challenge = 'Basic realm="deeplink console: any name, the token as password", charset="UTF-8"'
            return refusal(
                401,
                "the request carries no valid token",
                "Authorization: Bearer TOKEN, or basic authentication with the token as password.",
                {"www-authenticate": challenge},
            )
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return refusal(403, "another site's page asked for this", "Open the console itself.")
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
        refused = self._access.refuse("GET" if is_post else scope["method"], headers)
        await (refused or self._app)(scope, receive, strict)


class ConsoleRole(StrEnum):
    """What somebody may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleClaim:
    """Who a request says it is from. A token is the watchdog's to believe."""

    role: ConsoleRole
    name: str = ""  # as a trusted proxy says
    token: str = ""
    why: str = ""  # a viewer and no more


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Read addresses (10.0.0.7) and networks (10.0.0.0/28)."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as problem:
            raise DeepLinkError(
                f"--proxy {text}: {problem}", remedy="10.0.0.7, or 10.0.0.0/28.", exit_code=2
            ) from None
    return tuple(found)


def check_proxies(proxies: Sequence[object], token: str) -> None:
    """Refuse a console that believes a proxy's word, and could not tell the proxy from others at its address."""
    if proxies and not token:
        raise DeepLinkError(
            "--proxy without --token-file: whoever can reach the console from that address could call himself "
            "an operator, on 127.0.0.1 every user of this machine",
            remedy="Give --token-file FILE (0600), and have the proxy send its token with every request: "
            "Authorization: Bearer TOKEN.",
            exit_code=2,
        )


def _once(headers: Headers, name: str) -> str:
    # Given twice, one may be the client's own that the proxy passed on.
    found = headers.getlist(name)
    return found[0].strip() if len(found) == 1 else ""


@dataclass(frozen=True, slots=True)
class Roles:
    """The rules of one console."""

    proxies: tuple[Network, ...] = ()  # whose word on users and roles is taken

    def claim(self, client: str, headers: Headers) -> RoleClaim:
        """Return who asks, from this address."""
        token = _once(headers, TOKEN)
        if token and len(token) <= _LONGEST_TOKEN and token.isascii() and token.isprintable():
            return RoleClaim(role=ConsoleRole.OPERATOR, token=token)
        if ROLE not in headers:
            why = "no operator's token was sent, and no proxy says that this is an operator"
            return RoleClaim(role=ConsoleRole.VIEWER, why=why)
        if not self._is_trusted(client):
            why = f"the header {ROLE} came from {client}, which is no trusted proxy (--proxy)"
            return RoleClaim(role=ConsoleRole.VIEWER, why=why)
        name = _once(headers, USER)
        if _once(headers, ROLE).lower() != ConsoleRole.OPERATOR or not name:
            return RoleClaim(role=ConsoleRole.VIEWER, why=f"the proxy names no operator ({ROLE}, {USER})")
        return RoleClaim(role=ConsoleRole.OPERATOR, name=name)

    def _is_trusted(self, client: str) -> bool:
        try:
            address = ipaddress.ip_address(client.partition("%")[0])
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self.proxies)


def foreign_origin(headers: Headers, hosts: frozenset[str]) -> str:
    """Return why a request that changes something may come from another site's page; empty where it does not."""
    # A browser names the origin of every POST. A program that is none sends the token, which no page of another
    # site can: it would have to ask first, and is told no.
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "another site's page asked for this"
    origin = headers.get("origin")
    if origin is None:
        return "" if _once(headers, TOKEN) else "the request names no origin"
    try:
        parts = urlsplit(origin)
        named = parts.netloc.lower() == headers.get("host", "").lower() or parts.hostname in hosts
    except ValueError:
        named = False
    if not named:
        return f"the page of {origin[:100]!r} asked for this"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return "" if kind == "application/json" else "the request is not application/json"
