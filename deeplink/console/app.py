"""The console's HTTP face: the page, the read-only API, the stream of events, metrics and health."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from deeplink.console import openapi
from deeplink.console.actions import ACT, POSTS, ROLE
from deeplink.console.feed import PACKED_LEVEL, encode
from deeplink.console.query import Query, QueryError, search, select_jobs
from deeplink.console.request_guard import Access, RequestGuard, check_proxies, refusal
from deeplink.console.snapshot import job_document, job_row
from deeplink.console.timeline import NodeEvent
from deeplink.core.errors import DeepLinkError
from deeplink.core.metrics import CONSOLE, CONSOLE_DROPPED, CONSOLE_STREAMS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from deeplink.console.actions import ConsoleActions
    from deeplink.console.feed import Feed
    from deeplink.console.journal_queries import JournalQueries

METRICS_PORT = "9411"  # of node agents
WORTH_PACKING = 1_000  # bytes
MOST_COURSES = 2  # jobs whose course is made at once; more wait
SLOW_S = 10.0  # a browser that takes nothing for so long is let go; it comes back by itself
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


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


def _takes_packed(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _json(request: Request, value: object, status: int = 200) -> Response:
    return _response(encode(value), status, packs=_takes_packed(request))


def _response(body: bytes, status: int = 200, *, packs: bool) -> Response:
    head = {"cache-control": "no-store", "vary": "accept-encoding"}
    if len(body) >= WORTH_PACKING and packs:
        body, head = gzip.compress(body, PACKED_LEVEL), {**head, "content-encoding": "gzip"}
    return Response(body, status, head, "application/json")


def _refusal(request: Request, status: int, problem: str, remedy: str = "") -> Response:
    return _json(request, {"error": problem, "remedy": remedy}, status)


async def _nothing_there(request: Request, _problem: Exception) -> Response:
    return _refusal(request, 404, "there is nothing here", "api/v1/openapi.json lists what can be asked.")


async def _viewer(request: Request) -> Response:
    """Answer the page where nobody acts, as in a demo: all are viewers, and nothing was done."""
    return _json(request, {"role": "viewer", "name": "", "why": "nobody acts here", "watchdog": "", "actions": []})


async def _unclear(request: Request, problem: Any) -> Response:
    return _refusal(request, 400, str(problem), problem.remedy)


async def _unreadable(request: Request, problem: Any) -> Response:
    return _refusal(request, 503, str(problem), problem.remedy)


@dataclass(frozen=True, slots=True)
class _Pages:
    """The endpoints: from the newest frame, and from the journal what is asked for seldom."""

    feed: Feed
    assets: dict[str, tuple[bytes, dict[str, str]]]
    history: JournalQueries
    courses: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_COURSES))

    async def page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self.assets:
            return _refusal(request, 404, "no such file")
        body, head = self.assets[name]
        if request.headers.get("if-none-match") == head["etag"]:
            return Response(status_code=304, headers=head)
        if _takes_packed(request):
            return Response(gzip.compress(body, PACKED_LEVEL), headers={**head, "content-encoding": "gzip"})
        return Response(body, headers=head)

    async def snapshot(self, request: Request) -> Response:
        latest, head = self.feed.latest, {"cache-control": "no-store", "vary": "accept-encoding"}
        if _takes_packed(request):
            packed = await asyncio.to_thread(lambda: latest.packed)
            return Response(packed, 200, {**head, "content-encoding": "gzip"}, "application/json")
        return Response(latest.body, 200, head, "application/json")

    def table(self, name: str) -> Callable[[Request], Any]:
        async def listing(request: Request) -> Response:
            return _json(request, {**self._about(), name: list(self.feed.latest.document[name].values())})

        return listing

    async def jobs(self, request: Request) -> Response:
        asked, latest, about = Query.of(dict(request.query_params)), self.feed.latest, self._about()
        return _json(request, {**about, **await asyncio.to_thread(select_jobs, latest.jobs, asked, job_row)})

    async def job(self, request: Request) -> Response:
        latest, wanted = self.feed.latest, request.path_params["job"]
        job = next((each for each in latest.jobs if str(each.id) == wanted), None)
        if job is None:
            return _refusal(request, 404, f"no job {wanted} on record", "api/v1/jobs lists those that are.")
        incidents = await asyncio.to_thread(self.history.incidents, Query(job=str(job.id)), {job.id: job.user})
        return _json(
            request,
            {**self._about(), "job": job_document(job), "incidents": incidents["incidents"]},
        )

    async def timeline(self, request: Request) -> Response:
        latest, wanted, asked = self.feed.latest, request.path_params["job"], Query.of(dict(request.query_params))
        job = next((each.id for each in latest.jobs if str(each.id) == wanted), None)
        nodes = latest.document["nodes"].values()
        found = [
            NodeEvent(node["found_unix"], node["name"], "; ".join(node["findings"]), f"fabric?node={node['name']}")
            for node in nodes
            if node["found_unix"]
        ]
        about, packs = self._about(), _takes_packed(request)

        def answered() -> Response | None:
            course = None if job is None else self.history.timeline(job, asked, found)
            return None if course is None else _response(encode({**about, "timeline": course}), packs=packs)

        async with self.courses:  # of a thousand ranks each takes a good part of a second
            made = await asyncio.to_thread(answered)
        if made is None:
            return _refusal(request, 404, f"nothing is on record of job {wanted}", "api/v1/jobs lists the jobs.")
        return made

    def _about(self) -> dict[str, Any]:
        return {key: self.feed.latest.document[key] for key in ("seq", "unix", "sources")}

    async def incidents(self, request: Request) -> Response:
        asked, users = Query.of(dict(request.query_params)), {job.id: job.user for job in self.feed.latest.jobs}
        return _json(request, {**self._about(), **await asyncio.to_thread(self.history.incidents, asked, users)})

    async def incident(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = await asyncio.to_thread(self.history.incident, name)
        if found is None:
            return _refusal(request, 404, f"no incident {name} on record", "api/v1/incidents lists them.")
        return _json(request, {"incident": found})

    async def targets(self, request: Request) -> Response:
        """Tell Prometheus (http_sd) each node whose standing agent was heard within a day, at that port."""
        port, document = request.query_params.get("port", METRICS_PORT), self.feed.latest.document
        if not (port.isascii() and port.isdigit() and len(port) < 6):  # noqa: PLR2004 - a port
            raise QueryError(f"port {port!r} is no port", remedy=f"Leave it out for {METRICS_PORT}.")
        known = [
            {"targets": [f"{node['name']}:{port}"], "labels": {"instance": node["name"], "leaf": node["switch"]}}
            for node in document["nodes"].values()
            if node["standing"]
        ]
        return Response(encode(known), 200, {"cache-control": "no-store"}, "application/json")

    async def search(self, request: Request) -> Response:
        latest, asked = self.feed.latest, Query.of(dict(request.query_params))
        hits = await asyncio.to_thread(search, asked.text, latest.document, latest.jobs)
        return _json(request, {"hits": hits})

    async def described(self, request: Request) -> Response:
        return _json(request, openapi.document())

    async def metrics(self, request: Request) -> Response:
        encode_metrics, kind = choose_encoder(request.headers.get("accept", ""))
        body = await asyncio.to_thread(encode_metrics, CONSOLE.registry)
        return Response(body, headers={"content-type": kind, "cache-control": "no-store"})

    async def health(self, request: Request) -> Response:
        document = self.feed.latest.document
        states = {each["name"]: each["state"] for each in document["sources"].values()}
        return _json(request, {"ok": True, "seq": document["seq"], "sources": states})


class _Stream:
    """Server-sent events. An application of its own, because it must bound how long a browser may take to read."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._feed.full:
            hint = "Close some, or ask api/v1/snapshot."
            await refusal(503, "too many pages are open", hint, {"retry-after": "5"})(scope, receive, send)
            return
        headers = dict(scope["headers"])
        gone = asyncio.create_task(_gone(receive))
        # A browser that comes back says what it had in a header, one that just asked for a snapshot in its URL.
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        after = headers.get(b"last-event-id", b"").decode("latin-1") or asked.get("after", "")
        pour = asyncio.create_task(self._pour(send, after))
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
    history: JournalQueries,
    *,
    background: Callable[[], contextlib.AbstractAsyncContextManager[None]] | None = None,
    actions: ConsoleActions | None = None,
) -> ASGIApp:
    """Return the console as an ASGI application; DeepLinkError where anybody could pass for its proxy."""
    if actions is not None:
        check_proxies(actions.roles.proxies, access.token)
    pages = _Pages(feed, _assets(), history)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with background() if background else contextlib.nullcontext():
            yield

    routes = [
        Route("/", pages.page),
        Route("/static/{name}", pages.page),
        Route("/api/v1/snapshot", pages.snapshot),
        Route("/api/v1/nodes", pages.table("nodes")),
        Route("/api/v1/datasets", pages.table("datasets")),
        Route("/api/v1/search", pages.search),
        Route("/api/v1/openapi.json", pages.described),
        Route("/api/v1/jobs", pages.jobs),
        Route("/api/v1/jobs/{job}", pages.job),
        Route("/api/v1/jobs/{job}/timeline", pages.timeline),
        Route("/api/v1/incidents", pages.incidents),
        Route("/api/v1/incidents/{name}", pages.incident),
        Route("/api/v1/targets", pages.targets),
        Route("/api/v1/events", _Stream(feed)),
        Route("/metrics", pages.metrics),
        Route("/healthz", pages.health),
    ]
    if actions is None:
        routes += [Route(ROLE, _viewer, methods=["GET"]), Route(ACT, _viewer, methods=["GET"])]
    else:
        routes += actions.routes()
        access = replace(access, posts=POSTS)
    handlers = {404: _nothing_there, QueryError: _unclear, DeepLinkError: _unreadable}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return RequestGuard(app, access)
