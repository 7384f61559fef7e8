"""Who asks a console to act, and from where: a viewer, unless a token or a trusted proxy says more."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.datastructures import Headers

TOKEN, ROLE, USER = "deeplink-token", "x-deeplink-role", "x-remote-user"
"""Headers: an operator's token; and what a proxy that knows its users says of one; it drops its clients'."""
_LONGEST_TOKEN = 512
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


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
