"""A standing agent and a watchdog over real gRPC: told, away, told again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from deeplink.agent.node_heartbeat import Attending, ReportedFindings
from deeplink.core.clock import SystemClock
from deeplink.core.finding import Finding, Severity
from deeplink.rpc.grpc_server import FrontedServer, bound_server
from deeplink.rpc.tokens import write_token
from deeplink.scheduler.liveness.heartbeats import MOST_FINDINGS, node_from_wire
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient
from deeplink.scheduler.node.check_result import GOOD, Look, comment, drain
from deeplink.scheduler.node.host_checks import Compared, Comparison
from deeplink.scheduler.node.settings import CheckTiming
from deeplink.scheduler.node.watching import Ended, HealthCheck, HealthWatch
from deeplink.v1 import node_pb2, watch_pb2, watch_pb2_grpc
from tests.waiting import LIMIT_S, until

TOKEN = "a token for this test"  # noqa: S105 - opens nothing


class Watchdog(watch_pb2_grpc.WatchServicer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[watch_pb2.AttendRequest] = []
        self.known = True
        self.ahead_s = 0.0
        self._server: FrontedServer | None = None
        self.port = 0

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: Any) -> watch_pb2.AttendReply:
        node_from_wire(request, 5.0)  # what the real one would refuse raises
        self.heard.append(request)
        return watch_pb2.AttendReply(known=self.known, unix=time.time() + self.ahead_s)

    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: Any) -> watch_pb2.BeatReply:
        raise NotImplementedError

    def start(self, token: str = TOKEN) -> None:
        def register(server: grpc.Server) -> list[str]:
            watch_pb2_grpc.add_WatchServicer_to_server(self, server)
            return [watch_pb2.DESCRIPTOR.services_by_name["Watch"].full_name]

        bound = bound_server(f"127.0.0.1:{self.port}", token, register, workers=2)
        self.port, self._server = bound.port, bound.server
        bound.server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(LIMIT_S)
            self._server = None


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    running = Watchdog()
    running.start()
    yield running
    running.stop()


class Sick:
    """A node with one check that says what it is told to."""

    def __init__(self) -> None:
        self.says = GOOD
        self.compared = Compared()
        check = HealthCheck(
            name="disk", look=lambda: self.says, timing=CheckTiming(interval_s=0.01, bad=1, good=1)
        )
        self.watch = HealthWatch([check], clock=SystemClock())


@contextmanager
def attending(watchdog: Watchdog, folder: Path, sick: Sick, *, pause_s: float = 0.05) -> Iterator[Attending]:
    token = folder / "watch.token"
    if not token.exists():
        write_token(token, TOKEN)
    running = Attending(
        node="n3",
        topology_address="core.leaf1.n3",
        boot_id="boot-7",
        store_status=lambda: node_pb2.StoreStatus(shards=2, bytes=10, verified_bytes=5, free_bytes=7),
        health=sick.watch,
        compared=sick.compared,
        line=WatchdogClient(f"127.0.0.1:{watchdog.port}", token, "n3"),
        clock=SystemClock(),
        pause_s=pause_s,
    )
    sick.watch.changed = running.news
    sick.watch.start()
    running.start()
    try:
        yield running
    finally:
        began = time.monotonic()
        running.stop()
        sick.watch.stop()
        assert time.monotonic() - began < LIMIT_S / 2


def test_the_clocks_are_compared_with_each_answer(watchdog: Watchdog, tmp_path: Path) -> None:
    sick = Sick()
    watchdog.ahead_s = 90.0
    found: list[Comparison] = []

    def is_compared() -> bool:
        found[:] = filter(None, [sick.compared.newest])
        return any(0 < one.within_s < 2 for one in found)

    with attending(watchdog, tmp_path, sick):
        until(is_compared, told=lambda: found)
    assert abs(found[0].ahead_s + 90.0) <= found[0].within_s + 0.1


def test_the_watchdog_hears_how_the_node_is(watchdog: Watchdog, tmp_path: Path) -> None:
    sick = Sick()
    with attending(watchdog, tmp_path, sick):
        until(lambda: watchdog.heard)
        first = watchdog.heard[0]
        assert (first.node, first.topology_address, first.boot_id) == ("n3", "core.leaf1.n3", "boot-7")
        assert (first.shards, first.shard_bytes, first.verified_bytes, first.free_bytes) == (2, 10, 5, 7)
        assert abs(first.unix - time.time()) < 60
        sick.says = Look((drain("space", "full"),))
        until(lambda: watchdog.heard[-1].health)
        (finding,) = watchdog.heard[-1].health
        assert (finding.check, finding.severity, finding.problem) == ("disk", "drain", "full")
        sick.says = GOOD
        until(lambda: not watchdog.heard[-1].health)
        assert not any(request.missed for request in watchdog.heard), "it was told while it lasted"


def test_a_store_that_cannot_be_asked_once_is_asked_again(watchdog: Watchdog, tmp_path: Path) -> None:
    fails = [OSError("gone"), ValueError("odd")]

    def status() -> node_pb2.StoreStatus:
        if fails:
            raise fails.pop()
        return node_pb2.StoreStatus(shards=2)

    write_token(tmp_path / "token", TOKEN)
    running = Attending(
        node="n3",
        topology_address="",
        boot_id="",
        store_status=status,
        health=None,
        line=WatchdogClient(f"127.0.0.1:{watchdog.port}", tmp_path / "token", "n3"),
        clock=SystemClock(),
        pause_s=0.05,
    )
    running.start()
    until(lambda: watchdog.heard)
    running.stop()
    assert not fails


def test_a_change_is_told_soon_though_the_pause_is_long(watchdog: Watchdog, tmp_path: Path) -> None:
    sick = Sick()
    with attending(watchdog, tmp_path, sick, pause_s=3600):
        until(lambda: watchdog.heard)
        sick.says = Look((comment("space", "full"),))
        until(lambda: watchdog.heard[-1].health)


def test_what_began_and_ended_while_it_was_away_is_told_once_when_it_is_back(
    watchdog: Watchdog, tmp_path: Path
) -> None:
    sick = Sick()
    with attending(watchdog, tmp_path, sick):
        until(lambda: watchdog.heard)
        watchdog.stop()
        for problem in ("first", "second"):
            sick.says = Look((drain(problem, problem),))
            until(sick.watch.findings)
            sick.says = GOOD
            until(lambda: not sick.watch.findings())
        count = len(watchdog.heard)
        watchdog.start()
        until(lambda: len(watchdog.heard) > count + 1)
        back, after = watchdog.heard[count : count + 2]
        assert [finding.problem for finding in back.missed] == ["first", "second"]
        assert not after.missed


def test_a_token_that_was_changed_is_read_again(watchdog: Watchdog, tmp_path: Path) -> None:
    write_token(tmp_path / "watch.token", "another")
    sick = Sick()
    with attending(watchdog, tmp_path, sick):
        time.sleep(0.3)
        assert not watchdog.heard
        write_token(tmp_path / "watch.token", TOKEN)
        until(lambda: watchdog.heard)


def test_a_name_that_slurm_does_not_know_is_warned_of_once(
    watchdog: Watchdog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog.known = False
    with attending(watchdog, tmp_path, Sick()):
        until(lambda: len(watchdog.heard) > 3)
    assert [record.message for record in caplog.records].count(
        "Slurm knows no node n3: is `--name` or `node` right?"
    ) == 1


def test_a_watchdog_that_hangs_blocks_nobody_and_stopping_is_quick(tmp_path: Path) -> None:
    hangs = threading.Event()
    sick = Sick()

    class Hanging(Watchdog):
        @override
        def Attend(self, request: watch_pb2.AttendRequest, context: Any) -> watch_pb2.AttendReply:
            hangs.wait(LIMIT_S)
            return watch_pb2.AttendReply(known=True)

    slow = Hanging()
    slow.start()
    try:
        with attending(slow, tmp_path, sick):
            sick.says = Look((drain("space", "full"),))
            until(sick.watch.findings)
    finally:
        hangs.set()
        slow.stop()


def ended(number: int) -> Ended:
    finding = Finding(check="c", severity=Severity.ERROR, text=str(number), since_unix=float(number))
    return Ended(number, ("c", "s", float(number)), finding)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), max_size=40),
    st.integers(1, 8),
)
def test_each_that_ended_untold_is_told_once_if_there_is_room(
    rounds: list[tuple[int, bool, bool]], room: int
) -> None:
    """Each round some findings end, one of them perhaps told before; then the watchdog is reached, or not."""
    told, number, past, said = ReportedFindings(), 0, list[Ended](), list[str]()
    expected: list[str] = []
    for count, knew, reached in rounds:
        new = [ended(number + offset) for offset in range(1, count + 1)]
        number += count
        if knew and new:
            told.keys = told.keys | {new[0].key}
        past += new
        waiting = [one for one in past if one.number > told.upto]
        missed = told.missed(waiting, room)
        assert len(missed) <= room
        if reached:
            said += [finding.text for finding in missed]
            expected += [str(one.number) for one in waiting if one.key not in told.keys][-room:]
            told.delivered({}, waiting)
    assert said == expected
    assert len(said) == len(set(said))


def test_no_message_holds_more_than_the_watchdog_takes(watchdog: Watchdog, tmp_path: Path) -> None:
    many = [ended(number) for number in range(1, 400)]
    assert len(ReportedFindings().missed(many, MOST_FINDINGS - 16)) == MOST_FINDINGS - 16
    assert ReportedFindings().missed(many, 0) == []
