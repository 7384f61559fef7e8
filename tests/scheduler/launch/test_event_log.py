"""What a run leaves behind, and that nobody who does not listen can hold it up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.config import Config
from deeplink.core.types import Attempt
from deeplink.rpc.grpc_server import bound_server
from deeplink.rpc.tokens import TokenError, new_token, write_token
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.launch.event_log import (
    MOST_INCIDENTS,
    MOST_INCIDENTS_AT_ONCE,
    MOST_POINTS,
    EventLog,
    EventSink,
    to_journal,
    to_watchdog,
)
from deeplink.scheduler.recovery.records import Beat, Incident, Phase, ProgressPoint
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from tests.waiting import LIMIT_S

ATTEMPT = Attempt(7, 0, 0)
BEAT = Beat(attempt=ATTEMPT, phase=Phase.RUNNING, user="ann", job_name="train")


def point(step: int) -> ProgressPoint:
    return ProgressPoint(attempt=ATTEMPT, step=step, unix=float(step))


def incident(number: int) -> Incident:
    return Incident(id=f"7.0.{number}-rank-failed", kind="rank-failed", began_unix=1.0, detected_unix=2.0)


def with_news(points: list[ProgressPoint], incidents: list[Incident]) -> Beat:
    return replace(BEAT, progress=tuple(points), incidents=tuple(incidents))


def test_events_are_lines_of_json_with_both_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    chronicle = EventLog(tmp_path, clock, [])
    chronicle.event("began", "it begins", nodes=("n0",))
    chronicle.event("silent-one")
    chronicle.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines[0] == {"event": "began", "unix": clock.unix(), "monotonic": 1000.0, "nodes": ["n0"]}
    assert capsys.readouterr().err == "deeplink: it begins\n"


def test_people_can_have_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chronicle = EventLog(tmp_path, ManualClock(), [], as_json=True)
    chronicle.event("silent-one", code=3)
    chronicle.close()
    assert json.loads(capsys.readouterr().err)["code"] == 3


def test_a_folder_that_is_gone_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chronicle = EventLog(tmp_path / "gone", ManualClock(), [])
    chronicle.event("began", "it begins")
    chronicle.close()
    assert capsys.readouterr().err == "deeplink: it begins\n"


def test_what_cannot_be_delivered_is_kept_for_the_next_time() -> None:
    seen: list[Beat] = []
    delivered = threading.Event()
    refuse = [True]

    def deliver(beat: Beat) -> None:
        if refuse[0]:
            refuse[0] = False
            raise ConnectionError("the watchdog is away")
        seen.append(beat)
        delivered.set()

    courier = EventSink(deliver, "test")
    courier.give(with_news([point(1), point(2)], [incident(1)]), now=True)
    assert delivered.wait(LIMIT_S)
    courier.give(with_news([point(3)], []), now=True)
    courier.close()
    assert [one.step for beat in seen for one in beat.progress] == [1, 2, 3]
    assert [one.id for beat in seen for one in beat.incidents] == [incident(1).id]


class Away:
    """Takes nothing until it is back; what it takes is seen."""

    def __init__(self) -> None:
        self.is_back = False
        self.seen: list[Beat] = []
        self.asked = threading.Semaphore(0)

    def __call__(self, beat: Beat) -> None:
        self.asked.release()
        if not self.is_back:
            raise ConnectionError("the watchdog is away")
        self.seen.append(beat)


def test_reports_that_come_in_during_a_delivery_are_delivered_though_older_ones_gave_way() -> None:
    seen: list[int] = []
    begun, let_go = threading.Event(), threading.Event()

    def deliver(beat: Beat) -> None:
        begun.set()
        assert let_go.wait(LIMIT_S)
        seen.extend(one.step for one in beat.progress)

    courier = EventSink(deliver, "test")
    courier.give(with_news([point(step) for step in range(MOST_POINTS)], []), now=True)
    assert begun.wait(LIMIT_S)
    courier.give(with_news([point(MOST_POINTS)], []), now=True)
    let_go.set()
    courier.close()
    assert seen == list(range(MOST_POINTS + 1))


def test_of_what_a_far_end_misses_the_newest_is_kept_and_told_in_parts() -> None:
    away = Away()
    courier = EventSink(away, "test")
    for number in range(2 * MOST_INCIDENTS):
        courier.give(with_news([], [incident(number)]), now=True)
    assert away.asked.acquire(timeout=LIMIT_S)
    away.is_back = True
    courier.close()
    assert max(len(beat.incidents) for beat in away.seen) <= MOST_INCIDENTS_AT_ONCE
    told = [one.id for beat in away.seen for one in beat.incidents]
    assert told == [incident(number).id for number in range(MOST_INCIDENTS, 2 * MOST_INCIDENTS)]


def test_what_cannot_be_told_is_dropped_with_the_reason_and_the_beat_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def deliver(beat: Beat) -> None:
        told.release()
        if any(one.step > 9 for one in beat.progress):
            raise OverflowError("int too big to convert")
        seen.append(beat)

    seen, told = list[Beat](), threading.Semaphore(0)
    courier = EventSink(deliver, "test")
    courier.give(with_news([point(10)], [incident(1)]), now=True)
    assert told.acquire(timeout=LIMIT_S)
    courier.give(with_news([point(3)], []), now=True)
    courier.close()
    assert [one.step for beat in seen for one in beat.progress] == [3]
    (record,) = caplog.records
    assert record.getMessage() == "test: 1 report and 1 incident cannot be told: int too big to convert"
    assert record.exc_info, "a defect of ours is told with where it is"


def test_a_far_end_that_refuses_every_report_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def deliver(beat: Beat) -> None:
        told.release()
        if beat.progress:
            raise OverflowError("int too big to convert")

    told = threading.Semaphore(0)
    courier = EventSink(deliver, "test")
    for step in range(8):
        courier.give(with_news([point(step)], []), now=True)
        assert told.acquire(timeout=LIMIT_S)
        courier.give(BEAT, now=True)  # taken, in between
        assert told.acquire(timeout=LIMIT_S)
    courier.close()
    assert len(caplog.records) == 1


def test_a_far_end_that_hangs_holds_nobody_up() -> None:
    hung, end = threading.Event(), threading.Event()

    def hang(_beat: Beat) -> None:
        hung.set()
        end.wait(LIMIT_S)

    courier = EventSink(hang, "test")
    courier.give(BEAT, now=True)
    assert hung.wait(LIMIT_S)
    for step in range(5_000):
        courier.give(with_news([point(step)], []), now=True)
    assert not end.is_set(), "all of it was taken over while the far end hung"
    end.set()
    courier.close()


def test_the_journal_of_a_job_holds_its_beats(tmp_path: Path) -> None:
    courier = EventSink(to_journal(tmp_path / "journal.sqlite", ManualClock()), "journal")
    courier.give(with_news([point(1), point(2)], []), now=True)
    courier.close()
    with Journal(tmp_path / "journal.sqlite", read_only=True) as journal:
        (job,) = journal.jobs()
        assert (job.job, job.user, job.newest.last_step) == (7, "ann", 2)


class Told(watch_pb2_grpc.WatchServicer):
    """Keeps the beats it gets."""

    def __init__(self) -> None:
        self.beats: list[watch_pb2.BeatRequest] = []
        self.refused = threading.Event()

    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: grpc.ServicerContext) -> watch_pb2.BeatReply:
        if any(one.step == 13 for one in request.progress):
            self.refused.set()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such step")
        self.beats.append(request)
        return watch_pb2.BeatReply(known=True)

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: grpc.ServicerContext) -> watch_pb2.AttendReply:
        return watch_pb2.AttendReply()


@contextmanager
def watching(told: Told, token: str) -> Iterator[str]:
    """A watchdog that is up; its address."""

    def register(server: grpc.Server) -> list[str]:
        watch_pb2_grpc.add_WatchServicer_to_server(told, server)
        return ["deeplink.v1.Watch"]

    bound = bound_server("127.0.0.1:0", token, register)
    bound.server.start()
    try:
        yield f"127.0.0.1:{bound.port}"
    finally:
        bound.server.stop(0).wait(LIMIT_S)


def test_beats_reach_a_watchdog_over_the_wire(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told, token = Told(), new_token()
    write_token(tmp_path / "token", token)
    with watching(told, token) as address:
        deliver = to_watchdog(Config(watch=address, watch_token_file=tmp_path / "token"))
        assert deliver is not None
        courier = EventSink(deliver, "beat")
        courier.give(with_news([point(13)], []), now=True)
        assert told.refused.wait(LIMIT_S)
        courier.give(with_news([point(4)], []), now=True)
        courier.close()
    assert (told.beats[-1].user, told.beats[-1].phase) == ("ann", watch_pb2.PHASE_RUNNING)
    assert [one.step for beat in told.beats for one in beat.progress] == [4]
    assert "beat: 1 report and 0 incidents cannot be told: no such step" in caplog.messages


def test_a_watchdog_that_is_not_there_is_done_without() -> None:
    assert to_watchdog(Config()) is None


def test_a_token_that_comes_late_or_changes_is_taken_up(tmp_path: Path) -> None:
    told, token = Told(), new_token()
    with watching(told, token) as address:
        deliver = to_watchdog(Config(watch=address, watch_token_file=tmp_path / "token"))
        assert deliver is not None
        with pytest.raises(TokenError):
            deliver(BEAT)
        write_token(tmp_path / "token", new_token())
        with pytest.raises(grpc.RpcError):
            deliver(BEAT)
        write_token(tmp_path / "token", token)
        deliver(BEAT)
    assert len(told.beats) == 1


def test_a_beat_says_how_long_it_waited_for_the_one_before() -> None:
    clock, begun, let_go = ManualClock(), threading.Event(), threading.Event()
    seen: list[float] = []

    def deliver(beat: Beat) -> None:
        seen.append(beat.waited_s)
        begun.set()
        assert let_go.wait(LIMIT_S)

    courier = EventSink(deliver, "test", clock)
    courier.give(BEAT, now=True)
    assert begun.wait(LIMIT_S)
    courier.give(BEAT, now=True)
    clock.now += 1.5
    let_go.set()
    courier.close()
    assert (seen[0], seen[-1]) == (0.0, 1.5)


def test_a_delivery_that_hangs_is_noticed(tmp_path: Path) -> None:
    clock, let_go = ManualClock(), threading.Event()
    hung = threading.Event()

    def hang(_beat: Beat) -> None:
        hung.set()
        let_go.wait(LIMIT_S)

    courier = EventSink(hang, "test", clock)
    chronicle = EventLog(tmp_path, clock, [courier])
    assert chronicle.stuck_s() == 0.0
    courier.give(BEAT, now=True)
    assert hung.wait(LIMIT_S)
    clock.now += 12.0
    assert chronicle.stuck_s() == 12.0
    let_go.set()
    courier.close()
    assert chronicle.stuck_s() == 0.0
    chronicle.close()
