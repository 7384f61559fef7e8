"""The shelf: one whole snapshot, then changes; a bounded past; nobody holds anyone up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deeplink.console import feed as feeds
from deeplink.console.feed import MOST_CLIENTS, SHELF, Feed
from tests.deeplink.console.conftest import apply


def document(number: int) -> dict[str, Any]:
    return {"unix": float(number), "nodes": {"n0": {"heard": number}}}


def read(chunk: bytes) -> tuple[str, str, Any]:
    fields = dict(line.split(": ", 1) for line in chunk.decode().strip().splitlines())
    return fields["id"], fields["event"], json.loads(fields["data"])


async def take(events: AsyncGenerator[bytes, None]) -> tuple[str, str, Any]:
    return read(await asyncio.wait_for(anext(events), 5))


def test_first_the_whole_and_then_what_changed() -> None:
    async def scene() -> None:
        feed = Feed(document(0))
        events = feed.follow()
        _, name, state = await take(events)
        assert name == "snapshot"
        for number in range(1, 4):
            feed.publish(document(number))
            _, name, delta = await take(events)
            assert name == "change"
            assert delta["after"] == state["seq"]
            state = apply(state, delta)
            assert state["nodes"] == {"n0": {"heard": number}}
        await events.aclose()
        assert feed.clients == 0

    asyncio.run(scene())


def test_a_slow_reader_gets_the_whole_anew_and_the_shelf_stays_short() -> None:
    async def scene() -> None:
        feed = Feed(document(0))
        events = feed.follow()
        await take(events)
        for number in range(10 * SHELF):
            feed.publish(document(number))
        assert len(feed._shelf) == SHELF
        _, name, state = await take(events)
        assert name == "snapshot"
        assert state["seq"] == feed.latest.seq
        await events.aclose()

    asyncio.run(scene())


def test_who_comes_back_soon_gets_only_what_was_missed() -> None:
    async def scene() -> None:
        feed = Feed(document(0))
        events = feed.follow()
        ident, _, state = await take(events)
        await events.aclose()
        for number in range(3):
            feed.publish(document(number))
        again = feed.follow(ident)
        for _ in range(3):
            _, name, delta = await take(again)
            assert name == "change"
            state = apply(state, delta)
        assert state["seq"] == feed.latest.seq
        await again.aclose()

    asyncio.run(scene())


@pytest.mark.parametrize("ident", ["other-3", "nonsense", "-", "1-\u00b2", "x" * 5000, "-99999999999999999999"])
def test_a_last_event_id_of_another_run_is_answered_with_the_whole(ident: str) -> None:
    async def scene() -> None:
        feed = Feed(document(0))
        feed.publish(document(1))
        events = feed.follow(ident)
        assert (await take(events))[1] == "snapshot"
        await events.aclose()

    asyncio.run(scene())


def test_a_silent_line_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "HEARTBEAT_S", 0.01)

    async def scene() -> None:
        feed = Feed(document(0))
        events = feed.follow()
        await take(events)
        assert (await asyncio.wait_for(anext(events), 5)).startswith(b":")
        await events.aclose()

    asyncio.run(scene())


def test_closing_ends_every_stream() -> None:
    async def scene() -> None:
        feed = Feed(document(0))
        streams = [feed.follow() for _ in range(3)]
        for events in streams:
            await take(events)
        waiting = [asyncio.ensure_future(anext(events, None)) for events in streams]
        await asyncio.sleep(0)
        assert feed.clients == 3
        feed.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [None] * 3
        assert feed.full

    asyncio.run(scene())


def test_no_more_than_so_many_follow() -> None:
    async def scene() -> None:
        feed = Feed(document(0))
        streams = [feed.follow() for _ in range(MOST_CLIENTS)]
        for events in streams:
            await take(events)
        assert feed.full
        await streams[0].aclose()
        assert feed.clients == MOST_CLIENTS - 1
        for events in streams[1:]:
            await events.aclose()

    asyncio.run(scene())
