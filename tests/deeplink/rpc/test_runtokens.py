"""Each attempt of a run has a token of its own, and the newest is the one that is taken."""

from __future__ import annotations

import stat
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import Attempt
from deeplink.rpc.tokens import RunTokens, read_token, token_file_of, token_of, write_token

attempts = st.builds(Attempt, st.just(7), st.integers(0, 2), st.integers(0, 9))


@given(st.lists(attempts, min_size=1), attempts)
def test_the_newest_that_was_shown_is_taken_and_no_older_one(shown: list[Attempt], asked: Attempt) -> None:
    tokens, newest = RunTokens("secret"), shown[0]
    assert tokens.current() == ""
    for attempt in shown:
        newest = max(newest, attempt)
        assert tokens.is_valid(token_of("secret", attempt)) == (attempt == newest)
        assert (tokens.newest, tokens.current()) == (newest, token_of("secret", newest))
    assert tokens.has_ended(token_of("secret", asked)) == (asked < newest)
    assert tokens.newest == newest


@given(attempts, attempts, st.text(max_size=60))
def test_nobody_makes_a_token_of_another(attempt: Attempt, other: Attempt, text: str) -> None:
    tokens, token = RunTokens("secret"), token_of("secret", attempt)
    forged = f"{other}:{token.partition(':')[2]}"
    for wrong in (
        "secret",
        "",
        text,
        forged if other != attempt else "",
        token_of("another", attempt),
        token[:-1],
    ):
        assert not tokens.is_valid(wrong)
        assert not tokens.has_ended(wrong)
    assert tokens.newest is None


def test_the_nodes_ranks_and_the_agent_after_this_one_find_the_newest(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write_token(secret, "secret")
    tokens = RunTokens("secret", tmp_path)
    for relaunch in (0, 2):
        assert tokens.is_valid(token_of("secret", Attempt(7, 0, relaunch)))
    for relaunch in (0, 1, 2):
        path = token_file_of(secret, Attempt(7, 0, relaunch))
        assert read_token(path) == token_of("secret", Attempt(7, 0, relaunch))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "token-9.9.9").write_text("not ours")
    after = RunTokens("secret", tmp_path)
    assert after.newest == Attempt(7, 0, 2)
    assert not after.is_valid(token_of("secret", Attempt(7, 0, 1)))


def test_a_rank_that_finds_no_secret_is_told_where_its_token_will_be(tmp_path: Path) -> None:
    path = token_file_of(tmp_path / "secret", Attempt(7, 0, 1))
    assert not path.exists()
    RunTokens("secret", tmp_path).is_valid(token_of("secret", Attempt(7, 0, 1)))
    assert read_token(path) == token_of("secret", Attempt(7, 0, 1))
