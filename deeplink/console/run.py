"""The running console: two threads that collect, one event loop that serves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING

from deeplink.console.app import build_app
from deeplink.console.feed import Feed
from deeplink.console.nodes import ShownHealth
from deeplink.console.serve import Server, listen, parse_address
from deeplink.console.snapshot import ConsoleSnapshot, build
from deeplink.metrics import CONSOLE_INCIDENTS, CONSOLE_NODES
from deeplink.scheduler.slurm.command import end_unfinished
from deeplink.scheduler.watch.records import IncidentOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from deeplink.console.collect import Collector
    from deeplink.console.delta import Document
    from deeplink.console.guard import Access


_LEAVE_S = 0.5


class Console:
    """A console that can be served: its feed is filled while `collecting` is entered."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._stop = threading.Event()
        self._news = threading.Event()
        self.feed = Feed(build(collector.readings()).document())
        self.failure: BaseException | None = None
        self.failed: Callable[[], None] = self.feed.close

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        """Collect while the context lasts. The threads are daemons: a Slurm command that hangs delays no exit."""
        loop = asyncio.get_running_loop()
        asking, building = [
            threading.Thread(target=self._guarded, args=(loop, work), name=f"console-{name}", daemon=True)
            for name, work in (("slurm", self._ask_slurm), ("build", lambda: self._build(loop)))
        ]
        asking.start()
        building.start()
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

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            self._news.clear()
            made = build(self._collector.readings())
            measure(made)
            loop.call_soon_threadsafe(self._publish, made.document())
            self._news.wait(self._collector.settings.interval_s)
        self._collector.close()

    def _publish(self, document: Document) -> None:
        try:
            self.feed.publish(document)
        except Exception as problem:  # noqa: BLE001 - handed on to `serve`, which raises it
            self._fail(problem)

    def _fail(self, problem: BaseException) -> None:
        if not self._stop.is_set():
            self.failure = problem
            self.failed()

    def _guarded(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        # A page that shows old facts without saying so is worse than none: what nobody foresaw ends the console.
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


def measure(snapshot: ConsoleSnapshot) -> None:
    """Put the snapshot's counts into the metrics."""
    nodes = Counter(node.health for node in snapshot.nodes)
    for health in ShownHealth:
        CONSOLE_NODES.labels(health.value).set(nodes[health])
    incidents = Counter(each.outcome for each in snapshot.incidents)
    for outcome in IncidentOutcome:
        CONSOLE_INCIDENTS.labels(outcome.value).set(incidents[outcome])


def run(collector: Collector, bind: str, access: Access, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then return within a second.

    Args:
        collector: the sources.
        bind: `HOST:PORT`.
        access: who may ask.
        started: called with the page's address once it can be opened.

    Raises:
        BindFormatError: `bind` is no address.
        BindRefusedError: it is beyond loopback and `access` has no token.
        PortBusyError: it is in use.
        ListenError: the system refused it.
    """
    address = parse_address(bind)
    listener = listen(address, token=access.token)
    console = Console(collector)
    started(address.url(listener.getsockname()[1]))
    app = build_app(console.feed, access, background=console.collecting, recall=collector.incident)
    server = Server(app, console.feed)
    console.failed = server.leave
    asyncio.run(server.serve(sockets=[listener]))
    if console.failure is not None:
        raise console.failure
