"""One collector, however many look: frames are made once per interval and handed to every browser from one shelf.

What a slow browser has not taken stays on the one bounded shelf; what fell off it is replaced by the whole
snapshot. So memory does not grow with the browsers, nor with their slowness.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import secrets
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from deeplink.console.jobs import JobView

Document = dict[str, Any]

SHELF = 32  # changes kept for browsers that lag or come back; at the default interval a minute
MOST_CLIENTS = 128
HEARTBEAT_S = 10.0
PACKED_LEVEL = 5
_DEEPEST = 32  # levels of what goes out; ours are fewer than ten
TABLES = ("concerns", "switches", "nodes", "jobs", "incidents", "datasets", "sources")


def change(old: Document, new: Document) -> Document:
    """Return what turns `old` into `new`: changed fields of changed things, keys of things gone.

    >>> before = {"seq": 1, "unix": 5.0, "nodes": {"n0": {"state": "idle", "gpus": 2}}}
    >>> after = {"seq": 2, "unix": 6.0, "nodes": {"n0": {"state": "down", "gpus": 2}}}
    >>> change(before, after)["set"]
    {'nodes': {'n0': {'state': 'down'}}}
    """
    set_: Document = {}
    gone: Document = {}
    for table in TABLES:
        had, has = old.get(table, {}), new.get(table, {})
        if had is has:
            continue
        changed = {key: fields for key, row in has.items() if (fields := _fields(had.get(key, {}), row))}
        left = [key for key in had if key not in has]
        if changed:
            set_[table] = changed
        if left:
            gone[table] = left
    return {
        "after": old["seq"],
        "meta": _fields(_meta(old), _meta(new)),
        "set": set_,
        "gone": gone,
    }


def _meta(document: Document) -> Document:
    return {key: value for key, value in document.items() if key not in TABLES}


def _fields(old: Document, new: Document) -> Document:
    if old is new:
        return {}
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def encode(value: object) -> bytes:
    r"""Return strict JSON, compact, whatever a source said: a number that JSON has not is null.

    >>> encode({"loss": float("nan"), "name": "caf\udce9"})
    b'{"loss":null,"name":"caf?"}'
    """
    try:
        text = _dumped(value)
    except (ValueError, RecursionError):
        text = _dumped(_strict(value, _DEEPEST))
    return text.encode(errors="replace")


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _strict(value: Any, levels: int) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, (dict, list, tuple)):
        return value
    if not levels:
        return None
    if isinstance(value, dict):
        return {key: _strict(each, levels - 1) for key, each in value.items()}
    return [_strict(each, levels - 1) for each in value]


def event(name: str, ident: str, data: bytes) -> bytes:
    r"""Return one server-sent event; `data` holds no newline, which compact JSON never does.

    >>> event("change", "x-1", b"{}")
    b'id: x-1\nevent: change\ndata: {}\n\n'
    """
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (ident.encode(), name.encode(), data)


@dataclass
class Frame:
    """A snapshot as it goes out, and what leads to it from the one before."""

    run: str
    document: Document
    jobs: Sequence[JobView]  # all of them; the document has the most telling
    change: bytes

    @property
    def seq(self) -> int:
        """Number of the frame, counting from 1 since this console started."""
        return int(self.document["seq"])

    @property
    def id(self) -> str:
        """Name of the frame: what an event stream goes on after."""
        return f"{self.run}-{self.seq}"

    @cached_property
    def whole(self) -> bytes:
        """The snapshot as one event; made when first asked for."""
        return event("snapshot", self.id, self.body)

    @cached_property
    def body(self) -> bytes:
        """The snapshot as JSON."""
        return encode({**self.document, "id": self.id})

    @cached_property
    def packed(self) -> bytes:
        """The same, compressed: once for however many ask."""
        return gzip.compress(self.body, PACKED_LEVEL)


class Feed:
    """The shelf of frames and those who wait at it. Use it from one event loop only."""

    def __init__(self, first: Document, jobs: Sequence[JobView] = ()) -> None:
        self._run = secrets.token_hex(4)  # a browser's Last-Event-ID of another run means nothing here
        self._latest = Frame(self._run, {**first, "seq": 1}, jobs, b"")
        self._shelf: deque[Frame] = deque([self._latest], maxlen=SHELF)
        self._wake = asyncio.Event()
        self._closing = False
        self._clients = 0

    @property
    def latest(self) -> Frame:
        """The newest frame."""
        return self._latest

    @property
    def clients(self) -> int:
        """How many follow."""
        return self._clients

    @property
    def full(self) -> bool:
        """Whether no more may follow."""
        return self._closing or self._clients >= MOST_CLIENTS

    def publish(self, document: Document, jobs: Sequence[JobView] = ()) -> None:
        """Put a snapshot on the shelf and wake everyone who waits."""
        old = self._latest
        new = {**document, "seq": old.seq + 1}
        delta = event("change", f"{self._run}-{new['seq']}", encode(change(old.document, new)))
        self._latest = Frame(self._run, new, jobs, delta)
        self._shelf.append(self._latest)
        self._wake_all()

    def close(self) -> None:
        """End every stream, now and from now on."""
        self._closing = True
        self._wake_all()

    async def follow(self, last_event_id: str = "") -> AsyncGenerator[bytes, None]:
        """Yield events for ever, until `close`: the whole snapshot first, unless the shelf goes back far enough.

        Never holds anything for its caller but a number; a comment keeps a silent line alive.
        """
        self._clients += 1
        seen = self._resume(last_event_id)
        try:
            while not self._closing:
                wake, frame = self._wake, self._after(seen)
                if frame is not None:
                    yield frame.change
                    seen = frame.seq
                elif seen != self._latest.seq:
                    whole = self._latest
                    yield whole.whole
                    seen = whole.seq
                elif not await _set_within(wake, HEARTBEAT_S):
                    yield b": still here\n\n"
        finally:
            self._clients -= 1

    def _resume(self, last_event_id: str) -> int:
        run, _, number = last_event_id.partition("-")
        known = run == self._run and number.isascii() and number.isdigit() and len(number) < 16  # noqa: PLR2004
        return min(int(number), self._latest.seq) if known else 0

    def _after(self, seen: int) -> Frame | None:
        back = self._latest.seq - seen  # how far this browser is behind
        return self._shelf[-back] if seen and 0 < back <= len(self._shelf) - 1 else None

    def _wake_all(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()


async def _set_within(wake: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return False
    return True
