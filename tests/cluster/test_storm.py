"""Cases of the storm on a real Slurm: one that went well from the first day, and one for each bug it found."""

from __future__ import annotations

import pytest

from benchmarks.storm.case import StormCase
from benchmarks.storm.invariants import violations
from benchmarks.storm.playing import play

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


CASES = (
    "2+1 operator; node-killed last @20+1 for 5; watchdog-killed ctl @20+2 for 2",
    # Slurm puts the job back because its controller was cut off: that was an incident beside the controller's.
    "2+1 operator; controller-cut ctl @20+0 for 20",
    # An agent that was killed before it had come up cost 120 s and the run.
    "2+0 none; agent-killed batch @0+1",
    # Slurm ends all of a step when a slurmd goes away while the step is launched.
    "2+1 none; slurmd-killed last @0+2 for 6",
)


@pytest.mark.parametrize("text", CASES)
def test_every_invariant_holds(text: str) -> None:
    case = StormCase.parse(text)
    facts = play(case, print, lambda _run: None)
    assert violations(facts) == []
    assert len(facts.came) == len(case.injections)
