"""The console's HTTP face: the page, the read-only API, the stream of events, metrics and health."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from deeplink.console.feed import encode
from deeplink.console.guard import Refusal, RequestGuard, answer
from deeplink.errors import DeepLinkError
from deeplink.metrics import CONSOLE_DROPPED, CONSOLE_STREAMS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from deeplink.console.feed import Feed
    from deeplink.console.guard import Access

SLOW_S = 10.0
"""A browser that takes nothing for so long is let go; it comes back by itself."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    kind: str
    tag: str


def _assets() -> dict[str, _Asset]:
    # Read once: a page is never half of an old version and half of a new one, and no path comes from outside.
    folder = Path(__file__).parent / "static"
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            digest = hashlib.sha256(body).hexdigest()[:16]
            found[path.name] = _Asset(body, f"{_TYPES[path.suffix]}; charset=utf-8", f'"{digest}"')
    return found


def _json(value: object, status: int = 200) -> Response:
    return _fresh(encode(value), status)


def _fresh(body: bytes, status: int = 200) -> Response:
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


@dataclass(frozen=True, slots=True)
class _Pages:
    """The endpoints; each answers from the newest frame and asks nobody, but for one incident's whole record."""

    feed: Feed
    assets: dict[str, _Asset]
    recall: Callable[[str], dict[str, Any] | None] | None = None

    async def page(self, request: Request) -> Response:
        asset = self.assets.get(request.path_params.get("name", "index.html"))
        if asset is None:
            return _json({"error": "no such file", "remedy": ""}, 404)
        head = {"etag": asset.tag, "cache-control": "no-cache", "content-type": asset.kind}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=head)
        return Response(asset.body, headers=head)

    async def snapshot(self, _request: Request) -> Response:
        return _fresh(self.feed.latest.body)

    def table(self, name: str) -> Callable[[Request], Any]:
        async def listing(_request: Request) -> Response:
            document = self.feed.latest.document
            about = {key: document[key] for key in ("seq", "unix", "sources")}
            return _json({**about, name: list(document[name].values())})

        return listing

    async def job(self, request: Request) -> Response:
        document, job = self.feed.latest.document, request.path_params["job"]
        if job not in document["jobs"]:
            return _json({"error": f"no job {job} on record", "remedy": "api/v1/jobs lists those that are."}, 404)
        incidents = [each for each in document["incidents"].values() if str(each["job"]) == job]
        about = {key: document[key] for key in ("seq", "unix", "sources")}
        curve = document["curves"].get(job)
        return _json({**about, "job": document["jobs"][job], "curve": curve, "incidents": incidents})

    async def incident(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            found = await asyncio.to_thread(self.recall, name) if self.recall else None
        except DeepLinkError as problem:
            return _json({"error": str(problem), "remedy": problem.remedy}, 503)
        if found is None:
            remedy = "api/v1/incidents lists the newest."
            return _json({"error": f"no incident {name} on record", "remedy": remedy}, 404)
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
        head = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": head})
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
    """Return the console as an ASGI application.

    Args:
        feed: where the frames come from.
        access: who may ask.
        background: what runs while the application does (the collector).
        recall: returns all that is on record of an incident, by number or id; called in a thread.
    """
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
