from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.timeouts import PROBE_WAIT_S, CachedProbe
from tests.waiting import LIMIT_S


def test_one_look_does_for_all_who_ask_within_its_time() -> None:
    looks, clock = iter(range(100)), ManualClock()
    lately = CachedProbe(lambda: next(looks), -1, clock, kept_s=0.5, share=20)
    assert [lately() for _ in range(3)] == [0, 0, 0]
    clock.sleep(0.6)
    assert lately() == 1


def test_a_look_that_hangs_holds_up_nobody_and_is_the_only_one() -> None:
    go, looks = threading.Event(), []

    def look() -> str:
        looks.append(1)
        if len(looks) > 1:
            go.wait(LIMIT_S)
        return f"seen {len(looks)}"

    lately = CachedProbe(look, "nothing yet", SystemClock(), kept_s=0.01, share=0)
    assert lately() == "seen 1"
    time.sleep(0.05)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: lately(), range(100))) == ["seen 1"] * 100
    assert time.monotonic() - began < 10 + PROBE_WAIT_S
    assert len(looks) == 2
    go.set()
    deadline = time.monotonic() + LIMIT_S
    while lately() == "seen 1":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_until_the_first_look_has_ended_it_says_so() -> None:
    go = threading.Event()
    lately = CachedProbe(lambda: go.wait(LIMIT_S), None, SystemClock(), kept_s=0.01, share=0)
    assert lately() is None
    go.set()
