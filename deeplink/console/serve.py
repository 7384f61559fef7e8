"""The running console: three threads that collect, and one event loop that serves and ends within a second."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from deeplink.console.app import build_app
from deeplink.console.collect import CATALOG_PERIOD_S
from deeplink.console.feed import Feed
from deeplink.console.job_metrics import measure
from deeplink.console.journal_queries import JournalQueries
from deeplink.console.snapshot import ConsoleSnapshot, Memo, build
from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.daemon import ending_signals, is_loopback, split_bind
from deeplink.rpc.listeners import refused
from deeplink.scheduler.slurm.command import end_unfinished

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deeplink.console.actions import ConsoleActions
    from deeplink.console.collect import Collector
    from deeplink.console.feed import Document
    from deeplink.console.request_guard import Access

_LEAVE_S = 0.5
STUCK_MS = 20_000
"""A peer that acknowledges nothing, or keeps its window shut, for so long is cut off by the kernel."""
GRACE_S = 0.4  # how long a connection may take to end once we leave
_BACKLOG = 128
_MOST_CONNECTIONS = 512
PROOF_S = 10.0  # how long a connection has, from the moment it is accepted, for a request that is not refused
_REFUSED = 400


@dataclass(frozen=True, slots=True)
class Address:
    """Address that the console listens on."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def family(self) -> socket.AddressFamily:
        """IPv4 or IPv6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def url(self, port: int) -> str:
        """Return what to open in a browser."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def parse_address(text: str) -> Address:
    """Read `HOST:PORT`: an IP address (`[::1]` in brackets) or localhost, and a port (0: any free one).

    >>> parse_address("[::1]:8642")
    Address(host='::1', port=8642)
    """
    host, port = split_bind(text)
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise DeepLinkError(
                f"cannot listen on {text}: {host!r} is neither an IP address nor localhost", exit_code=2
            ) from None
    return Address(host, port)


def listen(address: Address, *, token: str) -> socket.socket:
    """Return a socket bound to the address."""
    if not address.loopback and not token:
        where = f"{address.host}:{address.port}"
        raise DeepLinkError(
            f"{where} is reachable from other machines, and the console would ask nobody who they are",
            remedy="Give --token-file FILE (0600), or stay on 127.0.0.1: `ssh -L 8642:127.0.0.1:8642 HOST`.",
            exit_code=2,
        )
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by each connection: what bounds a browser that never reads, also while we wait to leave.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError as problem:
        listener.close()
        raise refused(f"{address.host}:{address.port}", problem) from problem
    return listener


class _Protocol(H11Protocol):
    """A connection: a few of those that have not made a request are held, and those for a moment."""

    def __init__(self, places: _Places, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._places = places
        self._deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if self.client is not None and self._places.take(self.client, transport):
            self._deadline = self.loop.call_later(PROOF_S, self._places.end_if_unproven, self.client)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self.client is not None:
            self._places.leave(self.client)
        super().connection_lost(exc)


class _Places:
    """The connections of a console. A request that was not refused proves the peer; each connection has one."""

    def __init__(self, app: ASGIApp, bounds: ConnectionBounds, clock: Clock) -> None:
        self._app = app
        self._admission = Admission[tuple[str, int]](bounds, clock)
        self._transports: dict[tuple[str, int], asyncio.Transport] = {}

    def take(self, client: tuple[str, int], transport: asyncio.Transport) -> bool:
        """Take a connection in; return whether there was room. It may end another."""
        leaves = self._admission.admit(client, client[0])
        self._transports[client] = transport
        if leaves is not None:
            self._end(leaves)
        return leaves != client

    def leave(self, client: tuple[str, int]) -> None:
        self._admission.leave(client)
        self._transports.pop(client, None)

    def end_if_unproven(self, client: tuple[str, int]) -> None:
        if client in self._admission.overdue():
            self._end(client)

    def _end(self, client: tuple[str, int]) -> None:
        transport = self._transports.pop(client, None)
        if transport is not None:
            transport.abort()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] < _REFUSED and scope.get("client"):
                    self._admission.prove(tuple(scope["client"]))
                # What is kept open could begin another request, and never end it.
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, last)


class Server(uvicorn.Server):
    """A uvicorn that ends its event streams first, so that leaving takes no longer than an ordinary answer."""

    def __init__(self, app: ASGIApp, feed: Feed, clock: Clock | None = None) -> None:
        bounds = ConnectionBounds(connections=_MOST_CONNECTIONS, proof_s=PROOF_S)
        places = _Places(app, bounds, clock or SystemClock())
        super().__init__(
            uvicorn.Config(
                places,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the peer is known by the address that it has here
                http=partial(_Protocol, places),  # type: ignore[arg-type] # it is called, and nothing else
                ws="none",
                loop="asyncio",
                lifespan="on",
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )
        self._feed = feed

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn raises the signal again once it has left; a daemon that was to stop and did has not failed.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, ending = asyncio.get_running_loop(), ending_signals()
        for number in ending:
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            for number in ending:
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        """End the streams and stop serving; call it from the event loop."""
        self.should_exit = True
        self._feed.close()

    def _cut(self) -> None:
        # Who has not read its end by now is not reading: uvicorn would wait, and keep what it did not take.
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        asyncio.get_running_loop().call_later(GRACE_S, self._cut)
        await super().shutdown(sockets)


class Console:
    """A console that can be served: its feed is filled while `collecting` is entered."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._stop = threading.Event()
        self._news = threading.Event()
        self._memo = Memo()
        first = build(collector.readings(), self._memo)
        self.feed = Feed(first.document(), first.jobs)
        self.failure: BaseException | None = None
        self.failed: Callable[[], None] = self.feed.close

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        """Collect while the context lasts. The threads are daemons: a Slurm command that hangs delays no exit."""
        loop = asyncio.get_running_loop()
        works = {"slurm": self._ask_slurm, "build": lambda: self._build(loop), "catalog": self._read_catalog}
        asking, building, catalog = [
            threading.Thread(target=self._guarded, args=(loop, work), name=f"console-{name}", daemon=True)
            for name, work in works.items()
        ]
        for thread in (asking, building, catalog):
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._news.set()
            await asyncio.to_thread(building.join, _LEAVE_S)
            await asyncio.to_thread(_stop_asking, asking)

    def _ask_slurm(self) -> None:
        if not self._collector.settings.slurm:
            return
        while not self._stop.is_set():
            self._collector.refresh_slurm()
            self._news.set()
            self._stop.wait(self._collector.settings.interval_s)

    def _read_catalog(self) -> None:
        # A thread of its own, which nobody waits for: the file system of the catalog may hang.
        while not self._stop.is_set():
            self._collector.refresh_datasets()
            self._news.set()
            self._stop.wait(CATALOG_PERIOD_S)

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._stop.is_set():
                self._news.clear()
                readings = self._collector.readings()
                made = build(readings, self._memo)
                counted = (made.nodes, made.jobs, made.incidents, readings.journal.reports)
                self._memo.of("metrics", counted, lambda *_, made=made, readings=readings: measure(made, readings))
                loop.call_soon_threadsafe(self._publish, made, made.document(self._memo))
                # Slurm's answer is the time to look; the clock is where that takes long, or where it is not asked.
                slurm = self._collector.settings.slurm
                self._news.wait(self._collector.settings.interval_s * (1.5 if slurm else 1.0))
        finally:
            self._collector.close()

    def _publish(self, made: ConsoleSnapshot, document: Document) -> None:
        try:
            self.feed.publish(document, made.jobs)
        except Exception as problem:  # noqa: BLE001 - handed on to `serve`, which raises it
            self._fail(problem)

    def _fail(self, problem: BaseException) -> None:
        if not self._stop.is_set():
            self.failure = problem
            self.failed()

    def _guarded(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        # A page that shows old facts without saying so is worse than none: an unforeseen error ends the console.
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 - handed on to `serve`, which raises it
            loop.call_soon_threadsafe(self._fail, problem)


def _stop_asking(thread: threading.Thread) -> None:
    # Again and again: it may have been just between two commands.
    for _ in range(10):
        end_unfinished()
        thread.join(_LEAVE_S / 10)
        if not thread.is_alive():
            return


def run(
    collector: Collector,
    bind: str,
    access: Access,
    started: Callable[[str], None],
    actions: ConsoleActions | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then return within a second."""
    address = parse_address(bind)
    listener = listen(address, token=access.token)
    console = Console(collector)
    started(address.url(listener.getsockname()[1]))
    history = JournalQueries(collector.settings.journal)
    app = build_app(console.feed, access, history, background=console.collecting, actions=actions)
    server = Server(app, console.feed)
    console.failed = server.leave
    asyncio.run(server.serve(sockets=[listener]))
    if console.failure is not None:
        raise console.failure
