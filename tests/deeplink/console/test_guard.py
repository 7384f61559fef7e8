"""Who may ask what."""

from __future__ import annotations

import base64

import pytest

from deeplink.console.request_guard import Access

LOCAL = {"host": "127.0.0.1:8642"}
TOKEN = "correct-horse-battery"  # noqa: S105 - a token of this test


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8642", "10.0.0.7:80", "head.site"]
)
def test_hosts_that_are_this_machine(host: str) -> None:
    assert Access(hosts=frozenset({"head.site"})).refuse("GET", {"host": host}) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8642", "[", ":80"]
)
def test_a_name_that_was_rebound_is_refused(host: str) -> None:
    refusal = Access().refuse("GET", {"host": host})
    assert refusal is not None
    assert refusal.status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"])
def test_nothing_but_reading(method: str) -> None:
    refusal = Access().refuse(method, LOCAL)
    assert refusal is not None
    assert refusal.status_code == 405


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic(TOKEN)])
def test_the_token_opens(given: str) -> None:
    assert Access(TOKEN).refuse("GET", {**LOCAL, "authorization": given}) is None


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", basic(TOKEN[1:]), basic(""), "Basic !!!", "Basic \u00e9", TOKEN],
)
def test_anything_else_does_not(given: str) -> None:
    refusal = Access(TOKEN).refuse("GET", {**LOCAL, "authorization": given})
    assert refusal is not None
    assert refusal.status_code == 401
    assert "www-authenticate" in refusal.headers


def test_another_sites_page_reads_nothing_but_may_link_here() -> None:
    headers = {**LOCAL, "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    refusal = Access().refuse("GET", headers)
    assert refusal is not None
    assert refusal.status_code == 403
    assert Access().refuse("GET", {**headers, "sec-fetch-mode": "navigate"}) is None
