"""The watchdog's ear: launchers' beats over gRPC, kept in the journal before they are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from typing_extensions import override

from deeplink.scheduler.watch.journal import JournalError
from deeplink.scheduler.watch.messages import beat_from_wire, node_from_wire
from deeplink.scheduler.watch.records import RecordError
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from deeplink.wire import bound_server

if TYPE_CHECKING:
    from deeplink.clock import Clock
    from deeplink.metrics import WatchMetrics
    from deeplink.scheduler.watch.book import BeatBook
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.wire import BoundServer

SERVICE = watch_pb2.DESCRIPTOR.services_by_name["Watch"].full_name


class WatchServicer(watch_pb2_grpc.WatchServicer):
    """Takes beats: into the journal first, then into the book that the loop reads. Thread-safe."""

    def __init__(self, journal: Journal, book: BeatBook, clock: Clock, metrics: WatchMetrics) -> None:
        self._journal, self._book, self._clock, self._metrics = journal, book, clock, metrics

    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: grpc.ServicerContext) -> watch_pb2.BeatReply:
        """Keep a beat; INVALID_ARGUMENT where it cannot be kept, UNAVAILABLE where the journal fails."""
        now_unix = self._clock.unix()
        try:
            beat = beat_from_wire(request, now_unix)
            self._journal.record_beat(beat, now_unix)
        except RecordError as problem:
            self._metrics.beats.labels("refused").inc()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except JournalError as problem:
            # Not answered, so the launcher sends its reports and incidents again.
            self._metrics.beats.labels("failed").inc()
            context.abort(grpc.StatusCode.UNAVAILABLE, str(problem))
        current = self._book.hear(beat, self._clock.monotonic())
        self._metrics.beats.labels("kept" if current else "late").inc()
        return watch_pb2.BeatReply(known=True)

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: grpc.ServicerContext) -> watch_pb2.AttendReply:
        """Keep what a standing agent says of its node; the same errors as of a beat."""
        now_unix = self._clock.unix()
        try:
            self._journal.record_node(node_from_wire(request, now_unix))
        except RecordError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except JournalError as problem:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(problem))
        return watch_pb2.AttendReply(known=True)


def watch_server(bind: str, token: str, servicer: WatchServicer) -> BoundServer:
    """Return a server bound to `bind`, not yet serving; every call needs the token.

    Raises:
        ListenError: the address cannot be bound.
    """

    def register(server: grpc.Server) -> tuple[str, ...]:
        watch_pb2_grpc.add_WatchServicer_to_server(servicer, server)
        return (SERVICE,)

    return bound_server(bind, token, register)
