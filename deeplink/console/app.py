"""The console's HTTP face: the page, the read-only API, the stream of events, metrics and health."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from deeplink.console.feed import encode
from deeplink.core.errors import DeepLinkError
from deeplink.core.metrics import CONSOLE_DROPPED, CONSOLE_STREAMS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deeplink.console.feed import Feed

SLOW_S = 10.0  # a browser that takes nothing for so long is let go; it comes back by itself
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
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
    """The rules of one console: every request passes here first, and nothing is ever changed through it."""

    token: str = ""  # of every request, as bearer or basic authentication's password; empty: none is needed

    hosts: frozenset[str] = frozenset()  # good in the Host header besides IP addresses: only a name can be rebound

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
                405, "the console only shows; it changes nothing", "Use GET.", ((b"allow", b"GET, HEAD"),)
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
        refusal = self._access.refuse(scope["method"], headers)
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


def _assets() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return the files of the page with their headers, by name."""
    # Read once: a page is never half of an old version and half of a new one, and no path comes from outside.
    found = {}
    for path in sorted((Path(__file__).parent / "static").iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            tag, kind = f'"{hashlib.sha256(body).hexdigest()[:16]}"', f"{_TYPES[path.suffix]}; charset=utf-8"
            found[path.name] = body, {"etag": tag, "cache-control": "no-cache", "content-type": kind}
    return found


def _json(value: object, status: int = 200) -> Response:
    body = value if isinstance(value, bytes) else encode(value)
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def _refusal(status: int, problem: str, remedy: str = "") -> Response:
    return _json({"error": problem, "remedy": remedy}, status)


@dataclass(frozen=True, slots=True)
class _Pages:
    """The endpoints; each answers from the newest frame alone, but for one incident's whole record."""

    feed: Feed
    assets: dict[str, tuple[bytes, dict[str, str]]]
    recall: Callable[[str], dict[str, Any] | None] | None = None

    async def page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self.assets:
            return _refusal(404, "no such file")
        body, head = self.assets[name]
        if request.headers.get("if-none-match") == head["etag"]:
            return Response(status_code=304, headers=head)
        return Response(body, headers=head)

    async def snapshot(self, _request: Request) -> Response:
        return _json(self.feed.latest.body)

    def table(self, name: str) -> Callable[[Request], Any]:
        async def listing(_request: Request) -> Response:
            return _json({**self._about(), name: list(self.feed.latest.document[name].values())})

        return listing

    async def job(self, request: Request) -> Response:
        document, job = self.feed.latest.document, request.path_params["job"]
        if job not in document["jobs"]:
            return _refusal(404, f"no job {job} on record", "api/v1/jobs lists those that are.")
        incidents = [each for each in document["incidents"].values() if str(each["job"]) == job]
        curve = document["curves"].get(job)
        return _json({**self._about(), "job": document["jobs"][job], "curve": curve, "incidents": incidents})

    def _about(self) -> dict[str, Any]:
        return {key: self.feed.latest.document[key] for key in ("seq", "unix", "sources")}

    async def incident(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            found = await asyncio.to_thread(self.recall, name) if self.recall else None
        except DeepLinkError as problem:
            return _refusal(503, str(problem), problem.remedy)
        if found is None:
            return _refusal(404, f"no incident {name} on record", "api/v1/incidents lists the newest.")
        return _json({"incident": found})

    async def metrics(self, _request: Request) -> Response:
        return Response(
            generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"}
        )

    async def health(self, _request: Request) -> Response:
        document = self.feed.latest.document
        states = {each["name"]: each["state"] for each in document["sources"].values()}
        return _json({"ok": True, "seq": document["seq"], "sources": states})


class _Stream:
    """Server-sent events. An application of its own, because it must bound how long a browser may take to read."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._feed.full:
            wait = ((b"retry-after", b"5"),)
            await answer(
                send, Refusal(503, "too many pages are open", "Close some, or ask api/v1/snapshot.", wait)
            )
            return
        headers = dict(scope["headers"])
        gone = asyncio.create_task(_gone(receive))
        pour = asyncio.create_task(self._pour(send, headers.get(b"last-event-id", b"").decode("latin-1")))
        try:
            await asyncio.wait({gone, pour}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, pour):
                task.cancel()
            await asyncio.gather(gone, pour, return_exceptions=True)

    async def _pour(self, send: Send, last_event_id: str) -> None:
        head = {b"content-type": b"text/event-stream", b"cache-control": b"no-store", b"x-accel-buffering": b"no"}
        await send({"type": "http.response.start", "status": 200, "headers": list(head.items())})
        async with contextlib.aclosing(self._feed.follow(last_event_id)) as events:
            try:
                async for chunk in events:
                    CONSOLE_STREAMS.set(self._feed.clients)
                    async with asyncio.timeout(SLOW_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except TimeoutError:
                CONSOLE_DROPPED.inc()
        CONSOLE_STREAMS.set(self._feed.clients)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def build_app(
    feed: Feed,
    access: Access,
    *,
    background: Callable[[], contextlib.AbstractAsyncContextManager[None]] | None = None,
    recall: Callable[[str], dict[str, Any] | None] | None = None,
) -> ASGIApp:
    """Return the console as an ASGI application."""
    pages = _Pages(feed, _assets(), recall)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with background() if background else contextlib.nullcontext():
            yield

    routes = [
        Route("/", pages.page),
        Route("/static/{name}", pages.page),
        Route("/api/v1/snapshot", pages.snapshot),
        Route("/api/v1/nodes", pages.table("nodes")),
        Route("/api/v1/jobs", pages.table("jobs")),
        Route("/api/v1/jobs/{job}", pages.job),
        Route("/api/v1/incidents", pages.table("incidents")),
        Route("/api/v1/incidents/{name}", pages.incident),
        Route("/api/v1/events", _Stream(feed)),
        Route("/metrics", pages.metrics),
        Route("/healthz", pages.health),
    ]
    return RequestGuard(Starlette(routes=routes, lifespan=lifespan), access)
