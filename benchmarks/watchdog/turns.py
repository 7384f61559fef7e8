"""Who is run beside whom, and how long all of it takes.

Two cores are few: a run whose seconds are measured has the machine to itself. Of stock Slurm, and of faults after
which nothing is to come, most is waiting: these go side by side, and only one of them starts its job at a time.
"""

from __future__ import annotations

import heapq
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

from benchmarks.watchdog.stand import end_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.watchdog.scenarios import Scenario, StockCase


T = TypeVar("T")
BESIDE = 6
"""Clusters that wait at once: each holds about a gigabyte."""
START_S = 12.0
"""A cluster and its job come to the fault in about so long."""


def side_by_side(
    jobs: Sequence[Callable[[threading.Lock], T]], done: Callable[[T], None], beside: int = BESIDE
) -> None:
    """Run jobs in threads, in this order, and hand over what each returns as soon as it does, here.

    Whatever ends us ends them: each gives up what it waits for and takes its cluster down before this returns.

    Args:
        jobs: each is given the lock to hold while it loads the machine.
        done: is called here, with what a job returned.
        beside: how many at once.
    """
    starting = threading.Lock()
    with ThreadPoolExecutor(beside) as pool:
        coming = [pool.submit(job, starting) for job in jobs]
        try:
            for one in as_completed(coming):
                done(one.result())
        except BaseException:
            end_all()
            pool.shutdown(cancel_futures=True)
            raise


def longest_first(those: Sequence[Scenario | StockCase]) -> list[Scenario | StockCase]:
    """Return them so that the last one to begin has the least to wait for."""
    return sorted(those, key=lambda one: -one.about_s)


def seconds(abouts: Sequence[float], beside: int = BESIDE) -> float:
    """Return how long jobs take side by side, the longest first, one starting at a time.

    >>> seconds([100.0, 30.0], beside=2)
    100.0
    >>> seconds([30.0, 30.0], beside=2)
    42.0
    >>> seconds([30.0, 30.0], beside=1)
    60.0
    """
    free, may_start = [0.0] * beside, 0.0
    for about in sorted(abouts, reverse=True):
        begins = max(heapq.heappop(free), may_start)
        may_start = begins + START_S
        heapq.heappush(free, begins + about)
    return max(free)


def estimate_s(scenarios: Sequence[Scenario], cases: Sequence[StockCase], repeats: int, stock: int) -> float:
    """Return how long all scenarios take, so many times each, and the cases of stock Slurm, so many times."""
    timed = sum(one.about_s for one in scenarios if one.timed)
    waiting = [one.about_s for one in scenarios if not one.timed]
    both = seconds([*waiting, *(case.about_s for case in cases)])
    with_stock = min(repeats, stock)
    return repeats * timed + with_stock * both + (repeats - with_stock) * seconds(waiting)
