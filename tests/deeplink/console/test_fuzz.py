"""The API against its own OpenAPI document: whatever is asked, however odd, no answer is an error of ours."""

from __future__ import annotations

import json
import socket
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.console import openapi
from deeplink.console.actions import ConsoleActions
from deeplink.console.collect import Collector, ConsoleSettings
from deeplink.console.demo_sources import DemoDay
from deeplink.console.request_guard import Roles
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, NodeRecord, Phase, ProgressPoint
from deeplink.scheduler.watch.operator_requests import OperatorClient
from tests.waiting import LIMIT_S

DOCUMENT = openapi.document()
ASKED = [
    path for path, has in DOCUMENT["paths"].items() if "get" in has and path not in {"/api/v1/events", "/metrics"}
]
ODD = st.one_of(
    st.text(max_size=40),
    st.binary(max_size=20).map(lambda raw: raw.decode("latin-1")),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["17", "29", "n142", "running", "step", "1e309", "-0", "\x00", "../..", "%", "9" * 300, "x" * 9000]
    ),
)


@st.composite
def questions(draw: Any) -> str:
    path = draw(st.sampled_from(ASKED))
    operation = DOCUMENT["paths"][path]["get"]
    asked = {}
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", urllib.parse.quote(draw(ODD), safe=""))
        elif draw(st.booleans()):
            numeric = parameter["schema"]["type"] in {"number", "integer"}
            asked[parameter["name"]] = draw(
                st.floats(0, 1e11).map(str) if numeric and draw(st.booleans()) else ODD
            )
    if draw(st.integers(0, 9)) == 0:
        asked[draw(st.text(max_size=8))] = draw(ODD)
    return str(path + (f"?{urllib.parse.urlencode(asked)}" if asked else ""))


@pytest.fixture
def demo(tmp_path: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    day = DemoDay(tmp_path, 2.0)
    yield serve(day.collector)
    day.close()


def test_every_route_is_in_the_document(demo: Any) -> None:
    published = demo.json("/api/v1/openapi.json")
    assert published == json.loads(json.dumps(DOCUMENT))
    app = demo.server.config.app._app._app  # behind the places and the guard
    routes = {route.path for route in app.routes}
    acts = ConsoleActions(OperatorClient("127.0.0.1:1"), Roles(), Path("none"))  # a recorded day has no watchdog
    routes |= {route.path for route in acts.routes()}
    assert routes - {"/", "/static/{name}"} == set(published["paths"])


@pytest.mark.slow
def test_no_question_that_the_document_allows_or_forbids_is_answered_by_an_error_of_ours(demo: Any) -> None:
    seen: set[int] = set()

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(questions())
    def ask(question: str) -> None:
        status, headers, body = demo.get(question)
        seen.add(status)
        assert status in {200, 400, 404}, (question, status, body[:200])
        assert headers["content-type"].startswith("application/json")
        if status != 200:
            assert json.loads(body)["error"]

    ask()
    assert 200 in seen
    assert demo.get("/api/v1/jobs/nobody")[0] == 404
    assert demo.get("/healthz")[0] == 200


def test_names_of_ten_kilobytes_numbers_that_are_none_and_clocks_that_jump_are_shown_as_they_are(
    tmp_path: Path, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    path, attempt = tmp_path / "watch.sqlite", Attempt(5, 0, 0)
    long = "n\u00e4me\udcff" * 2_000
    unix = [1000.0, 1010.0, 400.0, 1e12, 1020.0]
    values = [1.0, float("nan"), float("inf"), -float("inf"), 1e308]
    points = tuple(
        ProgressPoint(attempt=attempt, step=step, unix=when, metrics={"loss": value, long: value})
        for step, (when, value) in enumerate(zip(unix, values, strict=True))
    )
    with Journal(path) as journal:
        said = Beat(attempt=attempt, phase=Phase.RUNNING, job_name=long[:10_000], user=long, progress=points)
        journal.record_beat(said, 1e12)
        journal.record_node(NodeRecord(name=NodeName("n" * 255), seen_unix=-5.0, free_bytes=1 << 60))
        odd = Incident(id="x", kind="odd", began_unix=1e12, detected_unix=-1.0, evidence=long, attempt=attempt)
        journal.record_incident(odd)
    served = serve(Collector(ConsoleSettings(journal=path, slurm=False, interval_s=0.2)))
    eventually(lambda: served.json("/api/v1/jobs")["jobs"])
    course = served.json("/api/v1/jobs/5/timeline")["timeline"]
    assert [value for _, value, _ in course["metrics"]["loss"]] == [1.0, None, None, None, 1e308]
    assert served.json("/api/v1/incidents")["found"] == 1
    assert served.json("/api/v1/snapshot")["incidents"]


@pytest.mark.parametrize("damage", [b"", b"no journal" * 999, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_journal_is_said_and_ends_nothing(
    damage: bytes, tmp_path: Path, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    path = tmp_path / "watch.sqlite"
    path.write_bytes(damage)
    served = serve(Collector(ConsoleSettings(journal=path, slurm=False, interval_s=0.2)))
    eventually(lambda: served.json("/api/v1/snapshot")["sources"]["journal"]["state"] == "failing")
    problem = served.json("/api/v1/snapshot")["sources"]["journal"]
    assert problem["problem"]
    assert problem["remedy"]
    assert served.get("/api/v1/incidents")[0] == 503
    assert served.get("/healthz")[0] == 200


def test_a_journal_of_a_later_version_is_left_alone_and_said(
    journal: Journal, collector: Collector, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    journal._db.execute("PRAGMA user_version = 99")
    served = serve(collector)
    eventually(lambda: served.json("/api/v1/snapshot")["sources"]["journal"]["state"] == "failing")
    assert "newer than this" in served.json("/api/v1/snapshot")["sources"]["journal"]["problem"]


@pytest.mark.slow
def test_two_thousand_half_requests_keep_nobody_out(demo: Any, eventually: Callable[..., Any]) -> None:
    halves = []
    try:
        for number in range(2_000):
            half = socket.socket()
            half.settimeout(LIMIT_S)
            try:
                half.connect(("127.0.0.1", demo.port))
                half.sendall(b"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
            except OSError:  # it was ended: there are more than may be
                half.close()
                continue
            halves.append(half)
            if number % 500 == 499:
                assert demo.get("/healthz")[0] == 200
        assert demo.get("/api/v1/jobs")[0] == 200
    finally:
        for half in halves:
            half.close()
    eventually(lambda: demo.get("/healthz")[0] == 200)
