"""What either end may be told: it is a call, an answer, or refused; the token never travels."""

from __future__ import annotations

import hmac
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.types import Attempt
from deeplink.rpc.plain import framing
from deeplink.rpc.plain.framing import HEAD, LARGEST_REQUEST, FrameKind, Inbound, SessionError, Status
from deeplink.rpc.tokens import RunTokens, named, new_token, token_of
from tests.effort import examples

TOKEN = "secret"  # noqa: S105 - of a server that lives as long as its test
MINE, THEIRS = b"c" * framing.NONCE_BYTES, b"a" * framing.NONCE_BYTES
HELLO = framing.hello(MINE, TOKEN)
CALLS = st.lists(st.tuples(st.text(alphabet="abc./", max_size=40), st.binary(max_size=300)), max_size=8)


def agent(token: str = TOKEN, nonce: bytes = THEIRS, node: str = "n0") -> Inbound:
    return Inbound(named(token), node, nonce)


def proof_for(inbound: Inbound, token: str = TOKEN, said: bytes = HELLO) -> bytes:
    """Return what a client with this token answers to an agent that it has greeted."""
    return framing.answered(token, said, inbound.said[HEAD.size :])[0]


def proven(nonce: bytes = THEIRS) -> Inbound:
    found = agent(nonce=nonce)
    found.receive(HELLO)
    found.receive(proof_for(found))
    return found


@settings(max_examples=examples(100))
@given(CALLS, st.lists(st.integers(1, 4000), max_size=20))
def test_calls_come_whole_however_they_are_torn(calls: list[tuple[str, bytes]], cuts: list[int]) -> None:
    inbound = agent()
    inbound.receive(HELLO)
    said = proof_for(inbound) + b"".join(framing.call(*call) for call in calls)
    at = sorted({0, *(cut % (len(said) + 1) for cut in cuts), len(said)})
    for start, stop in pairwise(at):
        inbound.receive(said[start:stop])
    assert [(one.method, one.message) for one in inbound.requests] == calls
    assert inbound.token == TOKEN
    assert inbound.is_idle == (not calls)


@settings(max_examples=examples(100))
@given(st.integers(0, len(HELLO)), st.binary(max_size=400))
def test_garbage_in_place_of_a_greeting_proves_nothing(start: int, rest: bytes) -> None:
    inbound = agent()
    with suppress(SessionError):
        inbound.receive(HELLO[:start] + rest)
    assert not inbound.token
    assert not inbound.requests
    assert TOKEN.encode() not in inbound.said


@settings(max_examples=examples(100))
@given(st.binary(max_size=200))
def test_garbage_from_who_is_proven_is_a_call_or_an_end(rest: bytes) -> None:
    inbound = proven()
    with suppress(SessionError):
        inbound.receive(rest)
    assert len(inbound.requests) <= len(rest) // HEAD.size


def test_a_client_takes_an_agent_only_for_its_own_token_and_nonce() -> None:
    theirs = agent("another")
    theirs.receive(HELLO)
    with pytest.raises(PermissionError):
        proof_for(theirs)
    replayed = agent()
    replayed.receive(HELLO)
    with pytest.raises(PermissionError):
        proof_for(replayed, said=framing.hello(b"d" * framing.NONCE_BYTES, TOKEN))
    passed_on = bytearray(replayed.said)
    passed_on[-1:] = b"1"  # another node's name
    replayed.said = bytes(passed_on)
    with pytest.raises(PermissionError):
        proof_for(replayed)


def test_an_agent_takes_a_client_only_for_its_own_token_and_nonce() -> None:
    before = agent()
    before.receive(HELLO)
    recorded = proof_for(before)
    another = agent(nonce=b"b" * framing.NONCE_BYTES)
    another.receive(HELLO)
    with pytest.raises(SessionError, match="proof") as refused:
        another.receive(recorded)
    assert refused.value.status == Status.UNAUTHENTICATED
    reflected = agent()
    reflected.receive(HELLO)
    theirs = reflected.said[HEAD.size + framing.NONCE_BYTES :][: framing.PROOF_BYTES]
    with pytest.raises(SessionError, match="proof"):
        reflected.receive(HEAD.pack(FrameKind.PROOF, 0, 0, len(theirs), 0) + theirs)
    assert not reflected.token


def test_the_token_of_an_attempt_is_found_by_its_name_and_does_not_travel() -> None:
    secret, attempt = new_token(), Attempt(7, 0, 2)
    token = token_of(secret, attempt)
    inbound = Inbound(named(RunTokens(secret)), "n0", THEIRS)
    said = framing.hello(MINE, token)
    inbound.receive(said)
    proof = framing.answered(token, said, inbound.said[HEAD.size :])[0]
    assert framing.name_of(token) == "7.0.2"
    assert hmac.compare_digest(inbound.said[HEAD.size :][:32], THEIRS)
    for sent in (said, inbound.said, proof):
        assert token.encode() not in sent
        assert token.partition(":")[2].encode() not in sent
    inbound.receive(proof)
    assert inbound.token == token
    with pytest.raises(SessionError, match="names no token"):
        Inbound(named(RunTokens(secret)), "n0", THEIRS).receive(framing.hello(MINE, "no attempt's"))


def test_another_version_is_told_so_before_all_else() -> None:
    other = bytearray(HELLO[:12])
    other[len(framing.MAGIC)] = framing.VERSION + 1
    with pytest.raises(SessionError, match="run one release on all nodes") as refused:
        agent().receive(bytes(other))
    assert refused.value.status == Status.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "said",
    [
        framing.call("/t.T/Call", bytes(LARGEST_REQUEST + 1))[: HEAD.size],
        framing.call("/" + "m" * 200, b""),
        framing.part(3) + b"abc",
        framing.end(0),
        HEAD.pack(FrameKind.PROOF, 0, 0, framing.PROOF_BYTES, 0),
        framing.call("/t.T/Call", b"") * 40,
        HELLO,
    ],
    ids=[
        "too long",
        "a long name",
        "a part",
        "an end",
        "a second proof",
        "calls without end",
        "a second greeting",
    ],
)
def test_who_breaks_the_rules_is_refused_before_it_is_kept(said: bytes) -> None:
    with pytest.raises(SessionError):
        proven().receive(said)


@given(st.integers(0, 16), st.text(max_size=5000), st.integers(0, 2**32 - 1))
def test_the_end_of_an_answer_comes_back(status: int, why: str, retry_ms: int) -> None:
    said = framing.end(status, why, retry_ms=retry_ms)
    head = framing.head_of(said[: HEAD.size])
    assert (head.status, head.size) == (status, len(said) - HEAD.size)
    assert why.encode(errors="replace").startswith(said[HEAD.size :])
    assert 0.0 <= framing.retry_s(head.value) <= 60.0


@given(st.binary(min_size=HEAD.size, max_size=HEAD.size))
def test_whatever_an_agent_says_is_a_bounded_frame_or_refused(said: bytes) -> None:
    try:
        head = framing.head_of(said)
    except ValueError:
        return
    assert head.size <= framing.LARGEST_PART
    assert head.kind in set(FrameKind)
