"""The heads of calls: what we write, grpcio reads; what is malformed is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.plainrpc import hpack


@given(st.text(min_size=1, max_size=400), st.lists(st.tuples(st.text(max_size=300), st.text(max_size=300))))
def test_what_was_written_is_read_back(method: str, metadata: list[tuple[str, str]]) -> None:
    found = hpack.literal_fields(hpack.request_head("host:1", method, metadata))
    assert found == {"te": "trailers", "content-type": "application/grpc", **dict(metadata)}


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_refused(head: bytes) -> None:
    try:
        fields = hpack.literal_fields(head)
    except ValueError:
        return
    assert all(name in head.decode(errors="replace") for name in fields if name.isascii())


@pytest.mark.parametrize(
    "head",
    [b"\x00\x05abc", b"\x00\x01a", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\x00\x01\xff\x01x", b"\x00"],
    ids=["name too short", "no value", "endless number", "not UTF-8", "no name"],
)
def test_a_malformed_head_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        hpack.literal_fields(head)
