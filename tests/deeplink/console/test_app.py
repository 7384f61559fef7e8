"""The HTTP face, asked over a real socket of a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import pytest
from typing_extensions import override

from deeplink.console import app as apps
from deeplink.console import feed as feeds
from deeplink.console import journal_queries as queries
from deeplink.console.collect import Collector, ConsoleSettings
from deeplink.console.journal_queries import JournalQueries
from deeplink.console.query import Query
from deeplink.console.request_guard import Access
from deeplink.console.serve import Console, listen, parse_address, run
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.rpc.listeners import ListenError, PortBusyError
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome, NodeRecord
from deeplink.scheduler.slurm.client import Slurm
from tests.deeplink.console.conftest import RecordedSlurm, apply, digits_beat
from tests.waiting import LIMIT_S, until


def events(answer: http.client.HTTPResponse) -> tuple[str, str, Any]:
    """Read the next event, past comments."""
    fields: dict[str, str] = {}
    while True:
        line = answer.readline().decode().rstrip("\n")
        if not line and "data" in fields:
            return fields["id"], fields["event"], json.loads(fields["data"])
        name, _, value = line.partition(": ")
        fields[name] = value


def test_the_page_and_its_parts_come_with_a_strict_policy(collector: Collector, serve: Callable[..., Any]) -> None:
    served = serve(collector)
    for path, kind in [
        ("/", "text/html"),
        ("/static/console.js", "text/javascript"),
        ("/static/console.css", "text/css"),
        ("/static/icon.svg", "image/svg+xml"),
    ]:
        status, headers, body = served.get(path)
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert b"http://" not in body.replace(b"http://www.w3.org/", b""), "no assets from elsewhere"
        assert b"https://" not in body
        assert served.get(path, if_none_match=headers["etag"])[0] == 304


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/", "/nothing", "/api/v1"]
)
def test_other_paths_are_not_found(path: str, collector: Collector, serve: Callable[..., Any]) -> None:
    assert serve(collector).get(path)[0] == 404


def test_the_api_tells_what_the_page_shows(
    filled: Journal, collector: Collector, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    served = serve(collector)
    eventually(lambda: len(served.json("/api/v1/nodes")["nodes"]) == 8)
    assert served.json("/api/v1/snapshot")["cluster"] == "recorded"
    assert {job["id"] for job in served.json("/api/v1/jobs")["jobs"]} == {9, 12, 17, 21}
    one = served.json("/api/v1/jobs/17")
    assert one["job"]["repeated_steps"] == 32
    course = served.json("/api/v1/jobs/17/timeline")["timeline"]
    assert len(course["metrics"]["loss"]) > 100
    assert [each["name"] for each in course["attempts"]] == ["17.0.0", "17.0.1"]
    assert [each["kind"] for each in course["incidents"]] == ["node-silent"]
    middle = course["metrics"]["loss"][50][0]
    later = served.json(f"/api/v1/jobs/17/timeline?since={middle}")["timeline"]["metrics"]["loss"]
    assert later[0][0] >= middle
    assert served.get("/api/v1/jobs/4711/timeline")[0] == 404
    assert [each["kind"] for each in one["incidents"]] == ["node-silent"]
    assert len(served.json("/api/v1/incidents")["incidents"]) == 3
    assert served.json("/api/v1/datasets")["datasets"] == []
    assert not any({"stacks", "timeline"} & set(each) for each in served.json("/api/v1/incidents")["incidents"])
    assert served.json("/healthz")["sources"]["nodes"] == "ok"
    status, _, body = served.get("/api/v1/jobs/4711")
    assert status == 404
    assert "4711" in json.loads(body)["error"]


def test_a_list_is_filtered_sorted_and_paged_by_the_console(
    filled: Journal, collector: Collector, slurm: Any, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    slurm.jobs = tuple(
        (str(i), str(i), "PENDING", "Priority", "0", "1", "dora", "", "", f"s{i}") for i in range(100, 220)
    )
    served = serve(collector)
    eventually(lambda: served.json("/api/v1/jobs")["found"] == 124)
    first = served.json("/api/v1/jobs?sort=user&turned=1")
    assert (len(first["jobs"]), first["pages"], first["jobs"][0]["user"]) == (50, 3, "dora")
    assert first["states"] == {"failed": 1, "pending": 120, "running": 2, "succeeded": 1}
    assert [job["id"] for job in served.json("/api/v1/jobs?text=digits")["jobs"]] == [17]
    assert {job["id"] for job in served.json("/api/v1/jobs?node=n3&state=running")["jobs"]} == {17}
    assert len(served.json("/api/v1/jobs?page=99")["jobs"]) == 24, "the last one, where there are fewer"
    assert [each["job"] for each in served.json("/api/v1/incidents?user=alice")["incidents"]] == [17]
    assert len(served.json("/api/v1/incidents?node=n5&kind=node-dead&job=12")["incidents"]) == 1
    assert served.json("/api/v1/incidents?since=9e11")["found"] == 0
    assert served.json("/api/v1/search?text=DIGITS")["hits"][0]["place"] == "jobs/17"


def test_incidents_of_long_ago_are_found_behind_more_than_one_question_finds(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MOST_FOUND", 3)
    for number in range(1, 11):
        outcome = IncidentOutcome.FAILED if number == 2 else IncidentOutcome.OPEN
        began = Incident(id=f"x-{number}", kind="odd", began_unix=number, detected_unix=number, outcome=outcome)
        journal.record_incident(began)
    asked = JournalQueries(journal.path)
    found = {
        question: [
            each["number"] for each in asked.incidents(Query.of(dict(parse_qsl(question))), {})["incidents"]
        ]
        for question in ("until=3", "state=failed", "state=open&until=4&since=2", "text=odd")
    }
    assert found == {
        "until=3": [3, 2, 1], "state=failed": [2], "state=open&until=4&since=2": [4, 3], "text=odd": [10, 9, 8]
    }  # fmt: skip


@pytest.mark.parametrize("asked", ["jobs?sort=beauty", "jobs?page=x", "incidents?since=nan", "search?colour=red"])
def test_a_question_that_cannot_be_understood_is_refused_with_what_can_be_asked(
    asked: str, collector: Collector, serve: Callable[..., Any]
) -> None:
    status, _, body = serve(collector).get(f"/api/v1/{asked}")
    assert status == 400
    assert json.loads(body)["remedy"]


@pytest.mark.parametrize(
    "asked",
    [
        "incidents?job=" + "9" * 60, "incidents?node=%ff%fe&kind=%00", "incidents/" + "9" * 300, "jobs/%ff",
        "jobs/-1", "jobs?text=" + "x" * 9000, "jobs?page=99999999999", "jobs?user=%F0%9F%92%A9&user=b",
        "search?text=%ed%a0%80", "incidents?until=1e11&since=1e-300", "events?after=%ff-9999999999999999",
        "jobs?turned=1&sort=loss",
    ],
)  # fmt: skip
def test_no_question_however_odd_breaks_the_console(
    asked: str, filled: Journal, collector: Collector, serve: Callable[..., Any]
) -> None:
    served = serve(collector)
    asker = served.connection()
    asker.request("GET", f"/api/v1/{asked}")
    with asker.getresponse() as answer:
        assert answer.status in {200, 400, 404}
    asker.close()
    assert served.json("/healthz")["ok"]


def test_whoever_takes_compressed_answers_gets_them_so(
    filled: Journal, collector: Collector, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    served = serve(collector)
    eventually(lambda: len(served.json("/api/v1/nodes")["nodes"]) == 8)
    for path in ("/api/v1/snapshot", "/api/v1/jobs", "/static/console.js"):
        _, plain, whole = served.get(path)
        _, headers, body = served.get(path, accept_encoding="gzip")
        assert (headers["content-encoding"], "content-encoding" in plain) == ("gzip", False)
        assert len(body) < len(whole) / 2
        assert len(gzip.decompress(body)) > len(whole) / 2


def test_a_page_that_has_a_snapshot_is_told_what_changed_since(
    filled: Journal, collector: Collector, serve: Callable[..., Any]
) -> None:
    served = serve(collector)
    have = served.json("/api/v1/snapshot")
    asker = served.connection()
    asker.request("GET", f"/api/v1/events?after={have['id']}")
    _, name, delta = events(asker.getresponse())
    assert (name, delta["after"]) == ("change", have["seq"])
    asker.close()


def test_one_incident_is_told_whole_when_it_is_asked_for(
    filled: Journal, collector: Collector, serve: Callable[..., Any]
) -> None:
    served = serve(collector)
    (hung,) = [each for each in filled.incidents() if each.kind == "ranks-hung"]
    one = served.json(f"/api/v1/incidents/{hung.number}")["incident"]
    assert [stack["text"] for stack in one["stacks"]] == ["all_reduce (dist.py:7)", "<b>nfs_wait</b>"]
    assert [moment["what"] for moment in one["timeline"]][-1] == "training again, 55 steps done again"
    assert served.json(f"/api/v1/incidents/{hung.id}")["incident"] == one
    for unknown in ("4711", "x", "%27"):
        assert served.get(f"/api/v1/incidents/{unknown}")[0] == 404


def test_an_incident_of_a_journal_that_is_gone_is_an_error_with_a_remedy(
    journal: Journal, collector: Collector, serve: Callable[..., Any]
) -> None:
    served = serve(collector)
    journal.path.unlink()
    status, _, body = served.get("/api/v1/incidents/1")
    assert status == 503
    assert "--journal" in json.loads(body)["remedy"]


def test_only_reading_and_only_by_our_own_name(collector: Collector, serve: Callable[..., Any]) -> None:
    served = serve(collector)
    for path in ("/", "/api/v1/snapshot", "/api/v1/events", "/metrics"):
        assert served.get(path, method="POST")[0] == 405
        assert served.get(path, host="evil.example")[0] == 421


def test_with_a_token_every_path_wants_it(collector: Collector, serve: Callable[..., Any]) -> None:
    served = serve(collector, Access("sesame-sesame"))
    for path in ("/", "/static/console.js", "/api/v1/snapshot", "/api/v1/events", "/metrics", "/healthz", "/no"):
        assert served.get(path)[0] == 401
    assert served.get("/healthz", authorization="Bearer sesame-sesame")[0] == 200


def test_events_follow_the_journal_and_resume(
    filled: Journal, collector: Collector, serve: Callable[..., Any]
) -> None:
    served = serve(collector)
    asker = served.connection()
    asker.request("GET", "/api/v1/events")
    answer = asker.getresponse()
    assert answer.getheader("content-type") == "text/event-stream"
    ident, name, state = events(answer)
    assert name == "snapshot"
    filled.record_incident(Incident(id="new-1", kind="node-dead", began_unix=5.0, detected_unix=6.0))
    while "new-1" not in state["incidents"]:
        ident, name, delta = events(answer)
        assert name == "change"
        state = apply(state, delta)
    asker.close()
    again = served.connection()
    again.request("GET", "/api/v1/events", headers={"Last-Event-ID": ident})
    _, name, delta = events(again.getresponse())
    assert name == "change"
    assert delta["after"] == state["seq"]
    again.close()


def test_an_idle_tick_is_small(filled: Journal, collector: Collector, serve: Callable[..., Any]) -> None:
    asker = serve(collector).connection()
    asker.request("GET", "/api/v1/events")
    answer = asker.getresponse()
    seen = [events(answer)[2] for _ in range(12)]
    asker.close()
    assert len(json.dumps(seen[-1])) < 1000


def test_slurm_is_asked_no_more_often_for_many_pages(
    collector: Collector, slurm: Any, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    served = serve(collector)
    askers = [served.connection() for _ in range(20)]
    answers = []
    for asker in askers:
        asker.request("GET", "/api/v1/events")
        answers.append(asker.getresponse())
        events(answers[-1])
    eventually(lambda: served.console.feed.clients == 20)
    before, frames = slurm.asked.count("squeue"), served.console.feed.latest.seq
    eventually(lambda: served.console.feed.latest.seq >= frames + 6)
    rounds = served.console.feed.latest.seq - frames
    assert slurm.asked.count("squeue") - before <= rounds + 1
    for answer in answers:
        answer.close()
    eventually(lambda: served.console.feed.clients == 0)


def test_a_page_that_reads_nothing_is_let_go_and_holds_nobody_up(
    filled: Journal,
    collector: Collector,
    serve: Callable[..., Any],
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "SLOW_S", 0.3)
    served = serve(collector)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    slow.connect(("127.0.0.1", served.port))
    slow.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    eventually(lambda: served.console.feed.clients == 1)
    # Fill what lies between: the system's buffers first, then the server's own.
    number = 0

    def pushed_out() -> bool:
        nonlocal number
        for _ in range(20):
            number += 1
            filled.record_incident(
                Incident(
                    id=f"big-{number}", kind="node-dead", began_unix=1, detected_unix=2, evidence="x" * 100_000
                )
            )
        return bool(served.console.feed.clients == 0)

    eventually(pushed_out, LIMIT_S)
    assert served.json("/healthz")["ok"]
    slow.close()


def test_too_many_pages_are_told_so(
    collector: Collector, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deeplink.console import feed

    monkeypatch.setattr(feed, "MOST_CLIENTS", 1)
    served = serve(collector)
    first = served.connection()
    first.request("GET", "/api/v1/events")
    with first.getresponse() as answer:
        events(answer)
        status, headers, _ = served.get("/api/v1/events")
        assert status == 503
        assert headers["retry-after"]


def test_a_page_that_cannot_be_published_ends_the_console(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a page that cannot be published")

    monkeypatch.setattr(feeds, "change", broken)
    with pytest.raises(RuntimeError, match="cannot be published"):
        run(collector, "127.0.0.1:0", Access(), lambda url: None)


def test_no_text_of_slurms_however_odd_ends_the_console(
    journal: Journal, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    class Odd(RecordedSlurm):
        @override
        def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
            said = super().__call__(argv, timeout_s=timeout_s)
            return said.replace("recorded", "caf\udce9") if argv[-1] == "config" else said

    odd = Collector(ConsoleSettings(journal=journal.path, interval_s=0.2), slurm=Slurm(Odd()))
    served = serve(odd)
    eventually(lambda: served.json("/api/v1/snapshot")["cluster"] == "caf?")


@pytest.mark.slow  # asks promtool, which only the whole test run installs
def test_metrics_name_every_source(
    filled: Journal, collector: Collector, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    served = serve(collector)

    def text() -> str:
        body: bytes = served.get("/metrics")[2]
        return body.decode()

    eventually(lambda: 'deeplink_console_nodes{health="down"} 2.0' in text())
    for source in ("nodes", "jobs", "switches", "journal"):
        assert f'deeplink_console_source_up{{source="{source}"}} 1.0' in text()
    assert 'deeplink_job_info{job_id="17",label="17",name="digits-ddp",user="alice"} 1.0' in text()
    assert 'deeplink_job_attempts_total{job_id="17"} 2.0' in text()
    assert "deeplink_store_healthy" not in text()
    assert "deeplink_watch_" not in text()
    promtool = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (promtool.returncode, promtool.stdout + promtool.stderr) == (0, "")


def test_prometheus_finds_the_agents_that_were_heard_within_a_day(
    filled: Journal, collector: Collector, serve: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    gone = NodeRecord(name=NodeName("n9"), seen_unix=time.time() - 2 * 86_400)
    filled.record_node(gone)
    for name in ("n0", "n6"):
        filled.record_node(NodeRecord(name=NodeName(name), seen_unix=time.time()))
    filled.record_beat(digits_beat(time.time() + 1, time.time() - 260), time.time())  # of the job there
    served = serve(collector)
    eventually(lambda: any(group["targets"] == ["n0:9411"] for group in served.json("/api/v1/targets")))
    found = served.json("/api/v1/targets?port=9000")
    assert {"targets": ["n0:9000"], "labels": {"instance": "n0", "leaf": "leaf0"}} in found
    assert {group["targets"][0] for group in found} == {"n0:9000", "n6:9000"}, "no agent of a job has that port"
    assert served.get("/api/v1/targets?port=x")[0] == 400


def test_a_busy_port_is_said_with_what_to_do() -> None:
    with listen(parse_address("127.0.0.1:0"), token="") as taken, pytest.raises(PortBusyError) as caught:
        listen(parse_address(f"127.0.0.1:{taken.getsockname()[1]}"), token="")
    assert "--bind" in caught.value.remedy


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "10.0.0.1:80"])
def test_beyond_loopback_needs_a_token(bind: str) -> None:
    with pytest.raises(DeepLinkError) as caught:
        listen(parse_address(bind), token="")
    assert "--token-file" in caught.value.remedy


def test_beyond_loopback_with_a_token() -> None:
    listen(parse_address("0.0.0.0:0"), token="sesame").close()  # noqa: S106


def test_an_address_of_another_machine_is_refused_by_the_system() -> None:
    with pytest.raises(ListenError):
        listen(parse_address("203.0.113.1:8642"), token="sesame")  # noqa: S106


@pytest.mark.parametrize(
    "text", ["", "8642", "localhost", "head.example:80", "127.0.0.1:", "127.0.0.1:99999", "1.2.3:4", ":1"]
)
def test_no_address(text: str) -> None:
    with pytest.raises(DeepLinkError):
        parse_address(text)


def held(port: int, said: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    with contextlib.suppress(OSError):  # cut off already
        peer.sendall(said)
    return peer


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\nHost: localhost", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n"],
    ids=["nothing", "half a request", "half a request after a whole one"],
)
def test_the_page_is_served_beside_hundreds_that_say_nothing_whole(
    said: bytes, collector: Collector, serve: Callable[..., Any]
) -> None:
    served = serve(collector)
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(held(served.port, said))
        assert served.get("/healthz")[0] == 200
        assert len(served.server.server_state.connections) < 200


def test_a_half_request_is_not_waited_for_whatever_drips(
    collector: Collector, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deeplink.console.serve.PROOF_S", 0.5)
    served = serve(collector)
    with held(served.port, b"GET / HTTP/1.1\r\nX: ") as slow:

        def is_over() -> bool:
            slow.settimeout(0.02)
            try:
                slow.sendall(b"x")
                return not slow.recv(1 << 16)
            except TimeoutError:
                return False
            except OSError:
                return True

        until(is_over)


def test_a_stream_behind_a_proxy_outlives_the_time_to_prove_oneself(
    collector: Collector, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deeplink.console.serve.PROOF_S", 0.5)
    served = serve(collector)
    proxy = http.client.HTTPConnection("127.0.0.1", served.port, timeout=LIMIT_S)
    with contextlib.closing(proxy):
        proxy.request(
            "GET", "/api/v1/events", headers={"X-Forwarded-For": "10.0.0.9", "X-Forwarded-Proto": "https"}
        )
        answer = proxy.getresponse()
        assert answer.status == 200
        with held(served.port, b"GET / HTTP/1.1\r\nX: ") as later, contextlib.suppress(ConnectionResetError):
            assert not later.recv(1 << 16)
        until(lambda: len(served.server.server_state.connections) <= 1)
        assert events(answer)[1] == "snapshot"
        assert served.server.server_state.connections, "its time was over before that of the later one"


def test_the_journal_is_closed_also_where_the_console_ends_by_an_error(
    filled: Journal, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("deeplink.console.serve.measure", measure)
    console = Console(collector)
    assert collector._journal._journal is not None

    async def run() -> None:
        failed = asyncio.Event()
        console.failed = failed.set
        async with console.collecting():
            await asyncio.wait_for(failed.wait(), LIMIT_S)
            assert collector._journal._journal is None

    asyncio.run(run())
    assert isinstance(console.failure, ZeroDivisionError)
