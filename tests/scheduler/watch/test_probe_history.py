"""Unbroken rows of like answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.recovery.evidence import NodeSnapshot, ProbeResult
from deeplink.scheduler.watch.memory import STALE_S, ProbeHistory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.liveness.probe import Address

N1, N2 = NodeName("n1"), NodeName("n2")
AT: dict[NodeName, Address] = {N1: ("n1", 6818), N2: ("n2", 6818)}


@dataclass
class Scripted:
    """Takes half a second to answer as it is told to."""

    clock: ManualClock
    answers: dict[NodeName, ProbeResult] = field(
        default_factory=lambda: dict.fromkeys((N1, N2), ProbeResult.SILENT)
    )

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        self.clock.sleep(deadline_s)
        return {name: self.answers[name] for name in targets}


def probing() -> tuple[ProbeHistory, Scripted]:
    clock = ManualClock()
    prober = Scripted(clock)
    return ProbeHistory(prober=prober, clock=clock), prober


def seen(one: ProbeHistory, name: NodeName = N1) -> NodeSnapshot:
    return one.seen({name: NodeSnapshot(name=name)}, one.clock.monotonic())[name]


def test_silence_and_refusal_are_one_row_and_an_answer_ends_it() -> None:
    one, prober = probing()
    for answer in (ProbeResult.SILENT, ProbeResult.REFUSES, ProbeResult.SILENT):
        prober.answers[N1] = answer
        one.probe(AT)
    assert (seen(one).slurmd, seen(one).away_probes, seen(one).away_s) == (ProbeResult.SILENT, 3, 1.5)
    prober.answers[N1] = ProbeResult.ANSWERS
    one.probe(AT)
    assert (seen(one).slurmd, seen(one).away_s, seen(one).answering_s) == (ProbeResult.ANSWERS, 0.0, 0.5)
    assert one.reach(N1)
    assert one.reach(N2) is False


def test_what_could_not_be_tried_says_nothing_and_ends_a_row_of_either_kind() -> None:
    for answer in (ProbeResult.SILENT, ProbeResult.ANSWERS):
        one, prober = probing()
        prober.answers[N1] = answer
        one.probe(AT)
        prober.answers[N1] = ProbeResult.UNKNOWN
        one.probe(AT)
        assert (seen(one).slurmd, one.reach(N1)) == (ProbeResult.UNKNOWN, None)
        prober.answers[N1] = answer
        one.probe(AT)
        assert max(seen(one).away_s, seen(one).answering_s) == 0.5


def test_a_row_lives_through_another_callers_turn_and_not_longer() -> None:
    one, prober = probing()
    one.probe(AT)
    one.probe({N2: AT[N2]})
    assert seen(one).probed_s == 0.5
    one.probe(AT)
    assert seen(one).away_probes == 2
    prober.clock.sleep(STALE_S + 0.1)
    assert one.reach(N1) is None
    one.probe({})
    assert seen(one).slurmd is ProbeResult.UNKNOWN
    one.probe(AT)
    assert seen(one).away_probes == 1


def test_when_we_were_away_ourselves_every_row_begins_anew() -> None:
    one, _ = probing()
    one.probe(AT)
    one.forget()
    assert seen(one).slurmd is ProbeResult.UNKNOWN


@given(st.lists(st.sampled_from(ProbeResult), min_size=1, max_size=20))
def test_a_row_is_as_long_as_the_newest_answers_were_of_its_kind(answers: list[ProbeResult]) -> None:
    one, prober = probing()
    for answer in answers:
        prober.answers[N1] = answer
        one.probe(AT)
    count = 0
    while count < len(answers) and answers[-1 - count].away:
        count += 1
    assert (seen(one).away_probes, seen(one).away_s) == (count, 0.5 * count)
    assert sum(one.counts.values()) == 2 * len(answers)
