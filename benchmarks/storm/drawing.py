"""Draws the cases of a storm from its seed, and makes a failing case smaller. Pure."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.storm.case import FLAGS, KINDS, RIGHTS, SPARE, Injection, StormCase, StormJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AT_STEPS = (0, 20, 40, 80)
"""The steps that faults wait for; a job makes about 160."""
WITHIN_S = 6.0
_SHAPES = ((2, 0), (2, 1), (3, 0), (3, 1), (4, 2))
_SHORTEST_HOLD_S = 1.0


def case_of(seed: int, number: int) -> StormCase:
    """Return the case of that number of the storm with that seed: the same each time."""
    chance = random.Random(f"{seed}-{number}")  # noqa: S311 - no secret
    ranks, spares = chance.choice(_SHAPES)
    watch = chance.choices(tuple(RIGHTS), (4, 2, 3))[0]
    job = StormJob(
        ranks=ranks,
        spares=spares,
        watch=watch,
        array=ranks + spares <= 3 and chance.random() < 1 / 4,  # noqa: PLR2004 - of it there are two
        standing=watch == "operator" and chance.random() < 1 / 4,
        children=chance.random() < 1 / 4,
    )
    kinds = [name for name in KINDS if watch != "none" or not name.startswith("watchdog-")]
    weights = [KINDS[name].weight for name in kinds]
    step = chance.choice(AT_STEPS)
    injections = []
    for what in chance.choices(kinds, weights, k=chance.choices((1, 2, 3), (3, 4, 2))[0]):
        kind = KINDS[what]
        places = [place for place in kind.places if spares or place != SPARE]
        low, high = kind.hold_s
        injections.append(
            Injection(
                what=what,
                place=chance.choice(places),
                step=max(step, kind.from_step),
                wait_s=_half(chance.uniform(0, WITHIN_S)),
                hold_s=_half(chance.uniform(low, high)),
            )
        )
        step = max(step, chance.choice(AT_STEPS))
    return StormCase(job, tuple(injections))


def _half(seconds: float) -> float:
    return round(2 * seconds) / 2


def size(case: StormCase) -> tuple[float, ...]:
    """Return how large a case is: what `smaller` returns is smaller, and there is a smallest."""
    return (
        len(case.injections),
        _size(case.job),
        sum(one.hold_s for one in case.injections),
        sum(one.step + one.wait_s for one in case.injections),
    )


def _size(job: StormJob) -> int:
    return job.nodes + sum(bool(getattr(job, flag)) for flag in FLAGS)


def smaller(case: StormCase) -> Iterator[StormCase]:
    """Return cases that are a little smaller, by promise: without a fault, with fewer nodes, shorter."""
    for place in range(len(case.injections) if len(case.injections) > 1 else 0):
        yield replace(case, injections=case.injections[:place] + case.injections[place + 1 :])
    job = case.job
    for fewer in (
        replace(job, array=False),
        replace(job, standing=False),
        replace(job, children=False),
        replace(job, ranks=2),
        replace(job, spares=min(1, job.spares)),
        replace(job, spares=0),
    ):
        keeps = job.spares == 0 or fewer.spares or all(one.place != SPARE for one in case.injections)
        if _size(fewer) < _size(job) and keeps:
            yield replace(case, job=fewer)
    for place, one in enumerate(case.injections):
        for less in (
            replace(one, hold_s=max(_half(one.hold_s / 2), _SHORTEST_HOLD_S)),
            replace(one, step=min(one.step, AT_STEPS[1]), wait_s=0.0),
            replace(one, wait_s=_half(one.wait_s / 2)),
        ):
            changed = (*case.injections[:place], less, *case.injections[place + 1 :])
            if size(found := replace(case, injections=changed)) < size(case):
                yield found


def smallest(case: StormCase, fails: Callable[[StormCase], bool], tries: int) -> StormCase:
    """Return the smallest case on the way down from one that fails, asking at most `tries` times."""
    found, asked = case, {case}
    while True:
        for one in smaller(found):
            if one in asked:
                continue
            if len(asked) > tries:
                return found
            asked.add(one)
            if fails(one):
                found = one
                break
        else:
            return found
