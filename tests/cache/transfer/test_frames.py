from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.errors import FrameError
from deeplink.cache.transfer import frames
from deeplink.core.types import ShardId
from deeplink.v1 import cache_pb2


class Message:
    """A reply in memory, read as one that is being received."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def read(self, size: int) -> bytes:
        assert size <= self.left
        self._at += size
        return self._data[self._at - size : self._at]


def decode_reply(message: bytes) -> list[bytes]:
    """Return the items' bytes of a reply."""
    received = Message(message)
    items = frames.read_reply_head(received)
    return [received.read(length) for length in items["length"].tolist()]


ITEMS = st.lists(st.one_of(st.binary(max_size=300), st.integers(1, 9)), max_size=20)


@given(ITEMS)
def test_a_reply_comes_back(items: list[bytes | int]) -> None:
    head = np.zeros(len(items), frames.ITEM)
    head["status"] = [item if isinstance(item, int) else 0 for item in items]
    head["length"] = [0 if isinstance(item, int) else len(item) for item in items]
    body = b"".join(item for item in items if isinstance(item, bytes))
    assert decode_reply(frames.reply_start(head) + body) == [
        b"" if isinstance(item, int) else item for item in items
    ]


@given(st.integers(0, 2**64 - 1), st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), max_size=20))
def test_a_request_comes_back(number: int, rows: list[tuple[int, int, int, int]]) -> None:
    request = frames.ExtentsRequest(number, [ShardId("ab" * 20)], np.array(rows, frames.EXTENT))
    back = frames.decode_request(frames.encode_request(request))
    assert (back.id, list(back.shards)) == (number, ["ab" * 20])
    assert back.extents.tobytes() == request.extents.tobytes()


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(message: bytes) -> None:
    for decode in (decode_reply, frames.decode_request):
        try:
            decode(message)
        except FrameError:
            continue


def test_too_many_extents_are_refused() -> None:
    message = cache_pb2.ReadRequest(extents=bytes(16 * (frames.MOST_EXTENTS + 1))).SerializeToString()
    with pytest.raises(FrameError, match="extents"):
        frames.decode_request(message)


def test_a_body_that_does_not_fit_its_head_is_refused() -> None:
    head = np.array([(0, 2**32 - 1)] * 3, frames.ITEM)
    with pytest.raises(FrameError, match="fit"):
        decode_reply(frames.reply_start(head) + b"x")
