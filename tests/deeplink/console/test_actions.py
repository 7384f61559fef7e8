"""Actions through the console's API: who may, from where, what is passed on and what is done once."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from deeplink.console.actions import LONGEST_BODY, MOST_AT_ONCE, ConsoleActions
from deeplink.console.app import build_app
from deeplink.console.collect import Collector
from deeplink.console.journal_queries import JournalQueries
from deeplink.console.request_guard import (
    Access,
    ConsoleRole,
    Roles,
    check_proxies,
    foreign_origin,
    parse_networks,
)
from deeplink.console.serve import Console, Server, listen, parse_address
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.watch.operator_requests import OperatorClient
from tests.scheduler.watch.callers import TOKEN
from tests.scheduler.watch.operator_desk import EXPIRED, FORGED, OPERATORS, Desk, listening
from tests.waiting import LIMIT_S

PROXY = {"x-deeplink-role": "operator", "x-remote-user": "ada"}
ASKED = "of every request"
BEARER = {"authorization": f"Bearer {ASKED}"}
NETWORKS = parse_networks(["127.0.0.1", "10.0.0.0/28", "fd00::/8"])


@pytest.mark.parametrize(
    ("client", "headers", "role", "name"),
    [
        ("127.0.0.1", [], "viewer", ""),
        ("127.0.0.1", [*PROXY.items()], "operator", "ada"),
        ("10.0.0.15", [*PROXY.items()], "operator", "ada"),
        ("::ffff:10.0.0.15", [*PROXY.items()], "operator", "ada"),
        ("fd00::1%eth0", [*PROXY.items()], "operator", "ada"),
        ("10.0.0.16", [*PROXY.items()], "viewer", ""),
        ("", [*PROXY.items()], "viewer", ""),
        ("127.0.0.1", [("x-deeplink-role", "viewer"), ("x-remote-user", "ada")], "viewer", ""),
        ("127.0.0.1", [("x-deeplink-role", "operator")], "viewer", ""),
        ("127.0.0.1", [*PROXY.items(), ("x-deeplink-role", "operator")], "viewer", ""),
        ("127.0.0.1", [*PROXY.items(), ("x-remote-user", "eve")], "viewer", ""),
        ("10.9.9.9", [("deeplink-token", "some")], "operator", ""),
        ("10.9.9.9", [("deeplink-token", "x" * 513)], "viewer", ""),
    ],
)
def test_a_role_is_what_a_trusted_proxy_says_or_a_token(
    client: str, headers: list[tuple[str, str]], role: str, name: str
) -> None:
    raw = [(key.encode(), value.encode()) for key, value in headers]
    claim = Roles(NETWORKS).claim(client, Headers(raw=raw))
    assert (claim.role, claim.name) == (ConsoleRole(role), name)
    assert bool(claim.why) == (role == "viewer")


def test_no_proxy_is_trusted_unless_it_was_named() -> None:
    assert Roles().claim("127.0.0.1", Headers(PROXY)).role is ConsoleRole.VIEWER
    with pytest.raises(DeepLinkError, match="--proxy"):
        parse_networks(["proxy.site"])


def test_a_proxys_word_is_refused_where_others_at_its_address_could_say_the_same() -> None:
    with pytest.raises(DeepLinkError, match="--token-file") as refused:
        check_proxies(["127.0.0.1"], "")
    assert "Bearer" in refused.value.remedy
    check_proxies([], "")
    check_proxies(["127.0.0.1"], "a")


def test_no_console_believes_a_proxy_without_a_token(collector: Collector, journal: Journal) -> None:
    actions = ConsoleActions(OperatorClient("127.0.0.1:1"), Roles(NETWORKS), journal.path)
    with pytest.raises(DeepLinkError, match="--token-file"):
        build_app(Console(collector).feed, Access(), JournalQueries(journal.path), actions=actions)


def test_who_comes_from_the_proxys_address_without_its_token_is_nobody(act: Callable[..., Acting]) -> None:
    console = act("127.0.0.1")
    headers = {key.replace("-", "_"): value for key, value in PROXY.items()}
    assert console.post("actions/plan", DRAIN, **headers, authorization="")[0] == 401
    assert console.post("actions/plan", DRAIN, **headers)[0] == 200


SAME = {"host": "127.0.0.1:8642", "origin": "http://127.0.0.1:8642", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("change", "foreign"),
    [
        ({}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://evil.example"}, True),
        ({"origin": "http://127.0.0.1:8643"}, True),
        ({"origin": "null"}, True),
        ({"origin": "http://["}, True),
        ({"origin": "https://console.site"}, False),  # behind a proxy that ends TLS
        ({"origin": "https://console.site.evil.example"}, True),
        ({"content-type": "text/plain"}, True),
        ({"content-type": "application/x-www-form-urlencoded"}, True),
    ],
)
def test_a_request_of_another_sites_page_is_known(change: dict[str, str], foreign: bool) -> None:
    assert bool(foreign_origin(Headers({**SAME, **change}), frozenset({"console.site"}))) is foreign


def test_without_an_origin_only_a_program_with_the_token_is_heard() -> None:
    bare = {"host": "127.0.0.1"}
    assert foreign_origin(Headers(bare), frozenset())
    assert not foreign_origin(Headers({**bare, "deeplink-token": "t"}), frozenset())


@dataclass
class Acting:
    """A console whose watchdog is a desk, at a free port."""

    port: int
    desk: Desk

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {**BEARER, "origin": f"http://127.0.0.1:{self.port}", "content-type": "application/json"}
        return self._ask("POST", path, data, {**own, **{key.replace("_", "-"): v for key, v in headers.items()}})

    def get(self, path: str, **headers: str) -> dict[str, Any]:
        return self._ask(
            "GET", path, None, {**BEARER, **{key.replace("_", "-"): v for key, v in headers.items()}}
        )[1]

    def _ask(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        asker = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        asker.request(method, f"/api/v1/{path}", data, headers)
        answer = asker.getresponse()
        said = json.loads(answer.read())
        asker.close()
        return answer.status, said


@pytest.fixture
def act(collector: Collector, journal: Journal, tmp_path: Path) -> Iterator[Callable[..., Acting]]:
    """Start a console that trusts these proxies, and asks the desk's watchdog, or one at another address."""
    running: list[tuple[Server, threading.Thread]] = []
    file = tmp_path / "operator.token"
    file.touch(0o600)
    file.write_text(OPERATORS)
    desk = Desk(journal)
    with listening(desk) as found:

        def start(*proxies: str, address: str = found) -> Acting:
            console, listener = Console(collector), listen(parse_address("127.0.0.1:0"), token="")
            watchdog = OperatorClient(address, token_file=file)
            actions = ConsoleActions(watchdog, Roles(parse_networks(proxies)), journal.path)
            history = JournalQueries(journal.path)
            app = build_app(
                console.feed,
                Access(ASKED if proxies else ""),
                history,
                background=console.collecting,
                actions=actions,
            )
            server = Server(app, console.feed)
            thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
            thread.start()
            running.append((server, thread))
            return Acting(listener.getsockname()[1], desk)

        yield start
        for server, thread in running:
            server.should_exit = True
            thread.join(LIMIT_S)


DRAIN = {"verb": "drain", "target": "n3", "why": "fan is loud"}


def test_a_viewer_is_shown_everything_and_changes_nothing(act: Callable[..., Acting]) -> None:
    console = act()
    assert console.get("role")["role"] == "viewer"
    for headers in ({}, PROXY, {"deeplink_token": EXPIRED}, {"deeplink_token": FORGED}, {"deeplink_token": TOKEN}):
        for path in ("actions/plan", "actions"):
            body = {**DRAIN, "request": "request-1", "saw": "{}"}
            status, said = console.post(path, body, **{key.replace("-", "_"): v for key, v in headers.items()})
            assert status in {401, 403}, said
        assert console.get("role", **headers)["role"] == "viewer"
    assert not console.desk.machine.orders
    assert console.get("actions") == {"actions": []}


@pytest.mark.parametrize("by", ["token", "proxy"])
def test_an_operator_asks_agrees_and_it_is_done_once_and_on_record(act: Callable[..., Acting], by: str) -> None:
    console = act("127.0.0.1")
    headers = (
        {"deeplink_token": OPERATORS} if by == "token" else {k.replace("-", "_"): v for k, v in PROXY.items()}
    )
    role = console.get("role", **headers)
    assert role["role"] == "operator"
    status, plan = console.post("actions/plan", DRAIN, **headers)
    assert status == 200
    person = role["name"]
    assert plan["commands"] == [f"scontrol update nodename=n3 state=drain 'reason=operator {person}: fan is loud'"]
    agreed = {**DRAIN, "saw": plan["saw"], "request": plan["request"]}
    for _ in range(2):
        status, done = console.post("actions", agreed, **headers)
        assert (status, done["outcome"], done["undo"]) == (200, "done", "resume")
    assert len(console.desk.machine.orders) == 1
    (record,) = console.get("actions?target=n3")["actions"]
    assert (record["person"], record["why"]) == (person, "fan is loud")
    assert bool(record["via"]) == (by == "proxy")


def test_other_pages_and_half_requests_are_refused_before_anybody_is_asked(act: Callable[..., Acting]) -> None:
    console = act("127.0.0.1")
    token = {"deeplink_token": OPERATORS}
    assert console.post("actions/plan", DRAIN, **token, origin="http://evil.example")[0] == 403
    assert console.post("actions/plan", DRAIN, **token, sec_fetch_site="cross-site")[0] == 403
    assert console.post("actions/plan", DRAIN, **token, content_type="text/plain")[0] == 403
    assert console.post("actions/plan", b"{" * 3_000, **token)[0] == 400
    assert console.post("actions/plan", b"x" * (LONGEST_BODY + 1), **token)[0] == 413
    for wrong in (
        {"verb": "reboot"},
        {"target": "-x"},
        {"why": 3},
        {"force": "yes"},
        {"more": 1},
        {"why": "\ud800"},
    ):
        assert console.post("actions/plan", {**DRAIN, **wrong}, **token)[0] == 400, wrong
    assert console.post("actions", {**DRAIN, "request": "x", "saw": "{}"}, **token)[0] == 400
    assert console._ask("PUT", "actions", b"", BEARER)[0] == 405
    assert console._ask("POST", "nodes", b"", BEARER)[0] == 405


def test_where_no_watchdog_runs_it_says_so_and_gives_the_command(act: Callable[..., Acting]) -> None:
    console = act("127.0.0.1", address="127.0.0.1:1")
    headers = {key.replace("-", "_"): value for key, value in PROXY.items()}
    role = console.get("role", **headers)
    assert role["role"] == "operator"
    assert role["watchdog"]
    status, said = console.post("actions/plan", DRAIN, **headers)
    assert status == 503
    assert "no watchdog" in said["error"]
    assert said["commands"] == ["scontrol update nodename=n3 state=drain 'reason=operator ada: fan is loud'"]


def test_those_who_ask_who_they_are_take_no_place_of_an_action() -> None:
    actions = ConsoleActions(OperatorClient("127.0.0.1:1"), Roles(), Path("none"))

    async def asked() -> str:
        async with AsyncExitStack() as stack:
            for _ in range(MOST_AT_ONCE):
                await stack.enter_async_context(actions._roles)
            return await actions._asked(lambda: "done", actions._places)

    assert asyncio.run(asked()) == "done"
