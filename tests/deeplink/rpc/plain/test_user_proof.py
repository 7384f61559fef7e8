"""Who shows no token between nodes is whom a real munged says, on that connection alone."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.rpc.plain import PlainCallError, PlainRefusedError
from deeplink.rpc.plain.serving import ServerLimits
from deeplink.scheduler.slurm import munge
from deeplink.scheduler.slurm.command import finish
from tests.deeplink.rpc.plain.servers import REPEAT, SAY, WHO, Served, served, soon
from tests.munged import running_munged, set_munge_socket
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.rpc.tokens import Vouch

NOBODY = 65_534


@pytest.fixture
def place() -> Iterator[str]:
    with running_munged() as socket:
        yield socket


def user_of(place: str) -> Callable[[str], tuple[int, str]]:
    def found(credential: str) -> tuple[int, str]:
        decoded = munge.decoded(credential, place)
        return decoded.uid, decoded.statement

    return found


@pytest.fixture
def server(place: str) -> Iterator[Served]:
    with served(user_of=user_of(place)) as running:
        yield running


@pytest.fixture
def ours(place: str) -> Vouch:
    return partial(munge.encoded, socket=place)


def test_a_call_carries_the_user_whom_munge_names(server: Served, ours: Vouch) -> None:
    with server.connect(ours) as connection:
        for _ in range(3):
            assert connection.call(WHO, b"it is ", soon(LIMIT_S)) == b"it is %d" % os.geteuid()
    assert server.repeat() == [10, 10]  # who knows the token is served as ever


@pytest.mark.parametrize("method", [REPEAT, SAY])
def test_of_what_the_token_opens_a_user_has_nothing(server: Served, ours: Vouch, method: str) -> None:
    with server.connect(ours) as connection, pytest.raises(PlainCallError, match="no such method"):
        connection.call(method, b"1 1", soon(LIMIT_S))
    with server.connect() as connection, pytest.raises(PlainCallError, match="no such method"):
        connection.call(WHO, b"", soon(LIMIT_S))


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_another_user_is_that_one(server: Served, place: str) -> None:
    program = "import sys; from deeplink.scheduler.slurm.munge import encoded; print(encoded(*sys.argv[1:]))"

    def as_nobody(statement: str) -> str:
        argv = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", sys.executable, "-c", program, statement, place]
        return finish(argv, timeout_s=LIMIT_S).stdout.strip()

    with server.connect(as_nobody) as connection:
        assert connection.call(WHO, b"", soon(LIMIT_S)) == b"%d" % NOBODY


def test_a_credential_is_good_once_and_for_its_connection(server: Served, ours: Vouch) -> None:
    made: list[str] = []

    def noting(statement: str) -> str:
        made.append(ours(statement))
        return made[-1]

    with server.connect(noting) as connection:
        assert connection.call(WHO, b"", soon(LIMIT_S))
    unused: Vouch = lambda _statement: ours("of another connection")  # noqa: E731
    shown: list[Vouch] = [
        lambda _statement: made[0],
        unused,
        lambda _statement: "MUNGE:AAAA:",
        lambda _statement: "",
    ]
    for wrong in shown:
        with server.connect(wrong) as connection, pytest.raises(PlainRefusedError):
            connection.call(WHO, b"", soon(LIMIT_S))
    assert len(server.refused) == len(shown)
    with server.connect(ours) as connection:
        assert connection.call(WHO, b"", soon(LIMIT_S))


def test_one_user_cannot_have_all_connections(place: str, ours: Vouch) -> None:
    with served(ServerLimits(connections=8), user_of(place)) as server:
        held = [server.connect(ours) for _ in range(2)]
        for connection in held:
            connection.call(WHO, b"", soon(LIMIT_S))
        with server.connect(ours) as another, pytest.raises(PlainCallError):
            another.call(WHO, b"", soon(LIMIT_S))
        assert server.repeat() == [10, 10]
        for connection in held:
            assert connection.call(WHO, b"", soon(LIMIT_S))
            connection.close()


def test_without_munge_users_are_refused_and_tokens_are_not(ours: Vouch) -> None:
    with served(user_of=user_of("/nowhere")) as server:
        with server.connect(ours) as connection, pytest.raises(PlainRefusedError):
            connection.call(WHO, b"", soon(LIMIT_S))
        nowhere = partial(munge.encoded, socket="/nowhere")
        with server.connect(nowhere) as connection, pytest.raises(PlainCallError, match="MUNGE"):
            connection.call(WHO, b"", soon(LIMIT_S))
        assert server.repeat() == [10, 10]
    with served() as server, server.connect(ours) as connection, pytest.raises(PlainRefusedError):
        connection.call(WHO, b"", soon(LIMIT_S))


def test_where_munge_listens_is_asked_of_slurm(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(munge, "_places", [""])
    set_munge_socket(tmp_path, "/nowhere")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(DeepLinkError, match="MUNGE"):
        munge.vouch("it")
    set_munge_socket(tmp_path, place)
    assert munge.decoded(munge.vouch("it"), place).statement == "it"
