"""Storage that does not answer: a claim that is a pipe holds up whoever reads it, as a frozen mount does."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from deeplink.checkpoints import Checkpoints, StorageSilentError, ownership
from deeplink.checkpoints.background import BlockingIo
from deeplink.core.types import Attempt
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)
    monkeypatch.setattr(ownership, "STILL_S", 0.3)
    pipe = tmp_path / "claims" / "claim-0000000001" / "claim.json"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    yield tmp_path
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # who still reads goes on


@pytest.mark.parametrize(
    "options",
    [{"attempt": Attempt(17, 0, 1)}, {"attempt": Attempt(17, 0, 1), "readonly": True}, {}],
    ids=["a rank", "a rank that only looks", "outside of a job"],
)
def test_latest_gives_a_folder_up_that_does_not_answer_and_says_so(frozen: Path, options: dict[str, Any]) -> None:
    checkpoints = Checkpoints(frozen, **options)
    for _ in range(2):
        with pytest.raises(StorageSilentError, match="did not answer for") as given_up:
            checkpoints.latest()
        assert "storage" in str(given_up.value.remedy)


def test_with_a_nodes_disk_too(frozen: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageSilentError):
        Checkpoints(frozen, attempt=Attempt(17, 0, 1), local=tmp_path / "ssd").latest()


def test_what_takes_long_is_waited_for_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience, let, waits = BlockingIo(tmp_path, 0.05), threading.Event(), list[float | None]()

    def waited(answers: list[Future[str]], patience_s: float | None) -> object:
        waits.append(patience_s)
        patience.stir(1)  # it goes on meanwhile
        if len(waits) < 8:
            return wait(answers, patience_s)
        let.set()
        return wait(answers, LIMIT_S)

    monkeypatch.setattr("deeplink.checkpoints.background.wait", waited)
    assert patience.ask(lambda: let.wait(LIMIT_S) and "read") == "read"
    assert waits == [0.05] * 8


def test_an_answer_that_comes_as_it_is_given_up_is_taken_and_the_next_is_asked_for(tmp_path: Path) -> None:
    let = threading.Event()

    class Late(BlockingIo):
        """The answer comes when the wait for it is over, and it is not held for overdue yet."""

        @property
        @override
        def is_overdue(self) -> bool:
            if self._late is not None:
                let.set()
                assert wait([self._late], LIMIT_S).done
            return super().is_overdue

    patience = Late(tmp_path, 0.05)
    assert patience.ask(lambda: let.wait(LIMIT_S) and "read") == "read"
    assert patience.ask(lambda: "again", 20) == "again"


def test_the_thread_ends_with_who_asks(tmp_path: Path) -> None:
    let, threads = threading.Event(), []

    def long() -> None:
        threads.append(threading.current_thread())
        let.wait(LIMIT_S)

    answered, late = BlockingIo(tmp_path, LIMIT_S), BlockingIo(tmp_path, 0.05)
    threads.append(answered.ask(threading.current_thread))
    assert answered.ask(threading.current_thread) is threads[0]
    with pytest.raises(TimeoutError):
        late.ask(long)
    del answered, late
    gc.collect()
    let.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_a_late_answer_makes_way_for_the_next_question(tmp_path: Path) -> None:
    let = threading.Event()
    patience = BlockingIo(tmp_path, 0.05)
    with pytest.raises(TimeoutError):
        patience.ask(lambda: let.wait(LIMIT_S))
    with pytest.raises(TimeoutError):
        patience.ask(lambda: "asked meanwhile")
    let.set()
    end = time.monotonic() + LIMIT_S
    while patience.is_overdue:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert patience.ask(lambda: "again", 20) == "again"
