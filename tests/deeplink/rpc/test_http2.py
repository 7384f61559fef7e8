"""The heads of calls: what clients of gRPC write is read; what is malformed is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.rpc.http2 import HeaderReader
from tests.deeplink.rpc.http2_frames import request_head

ALWAYS = {
    ":method": "POST",
    ":scheme": "http",
    ":authority": "host:1",
    "te": "trailers",
    "content-type": "application/grpc",
}
# RFC 7541 C.4 and C.6: requests and responses of one connection each, Huffman-coded, with a dynamic table.
REQUESTS = [
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", {}),
    ("828684be5886a8eb10649cbf", {"cache-control": "no-cache"}),
    ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", {"custom-key": "custom-value"}),
]


@given(st.text(min_size=1, max_size=400), st.lists(st.tuples(st.text(max_size=300), st.text(max_size=300))))
def test_what_was_written_is_read_back(method: str, metadata: list[tuple[str, str]]) -> None:
    found = HeaderReader().read(request_head("host:1", method, tuple(metadata)))
    assert found == {**ALWAYS, ":path": method, **dict(metadata)}


def test_the_examples_of_the_standard_are_read() -> None:
    reader = HeaderReader()
    for block, besides in REQUESTS:
        found = reader.read(bytes.fromhex(block))
        assert found[":authority"] == "www.example.com"
        assert besides.items() <= found.items()


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_refused(head: bytes) -> None:
    try:
        fields = HeaderReader().read(head)
    except ValueError:
        return
    assert len(fields) <= len(head)


@pytest.mark.parametrize(
    "head",
    [
        b"\x00\x05abc",
        b"\x00\x01a",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x00\x01\xff\x01x",
        b"\x00",
        b"\x80",
        b"\xc0",
        b"\x3f\xff\x7f",
        b"\x00\x01a\x81\x00",
        b"\x00\x01a\x84\xff\xff\xff\xff",
        b"\x00\x01a" + b"\x7f\xff\xff\x03" + b"x" * 65_534,
    ],
    ids=[
        "name too short",
        "no value",
        "endless number",
        "not UTF-8",
        "no name",
        "field 0",
        "no such field",
        "table too large",
        "ends within a code",
        "goes on after the end",
        "too long",
    ],
)
def test_a_malformed_head_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        HeaderReader().read(head)


def test_fields_in_the_table_do_not_pile_up() -> None:
    reader = HeaderReader()
    for number in range(500):
        name = f"name-{number:05d}".encode()
        reader.read(b"\x40" + bytes([len(name)]) + name + b"\x7f\x00" + b"v" * 127)
    assert reader.read(b"\xbe")["name-00499"] == "v" * 127
    with pytest.raises(ValueError, match="too soon"):
        reader.read(b"\xff\x00" + b"\x00" * 0)
