"""By what choices are compared: the predicted step where the job's profile and the machines are known."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from deeplink.scheduler.placement.hint.decide import (
    LEAST_SHARE,
    MachineSpeeds,
    Surroundings,
    Weighed,
    decide,
    gains,
    other_shapes,
    settle,
    trial_of,
    without_wish,
)
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, NodeChoice, Why
from deeplink.scheduler.placement.model import Constants, Job, LinkSpeed, Profile, ReadSpeeds, profile_text
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm.nodeset import unfold
from tests.scheduler.placement.hint.clusters import nodes, now, site
from tests.waiting import LIMIT_S

TALKATIVE = Job(batch=4, sample_s=1e-3, gradient_bytes=1e9, overlap=0.2)
SILENT = Job(batch=64, sample_s=10e-3, gradient_bytes=1e5)
NARROW = Constants(path_bandwidth=0.5e9, nic=LinkSpeed(1e9, 14e-6), leaf=LinkSpeed(0.2e9, 14e-6))
READS = ReadSpeeds(local=3e9, peer=1e9, source=0.1e9)
SAID = "sbatch: Job 13 to start at 2026-11-21T22:24:24 using 16 processors on nodes {} in partition main\n"


def ask(job: Job, **more: object) -> Ask:
    return replace(Ask(nodes=4, gpus=2, exclusive=True, profile=profile_text(Profile(job))), **more)  # type: ignore[arg-type]


def step_of(option: NodeChoice) -> float:
    assert option.step_s is not None
    return option.step_s


def weighed(
    wanted: Ask, known: Constants | None, residency: DataResidency | None = None, busy: str = ""
) -> Weighed:
    machines = MachineSpeeds() if known is None else MachineSpeeds(known)
    return decide(wanted, Surroundings(now(busy=busy), site(), residency or DataResidency(), machines=machines))


def test_with_a_profile_and_constants_costs_are_seconds() -> None:
    found = weighed(ask(TALKATIVE), NARROW).decision
    assert found.cost == "predicted step"
    best = found.candidates[0]
    assert step_of(best) == pytest.approx(best.cost, rel=0.01)
    assert found.predicted[0].split() == ["step", f"{1e3 * step_of(best):.3f}", "ms"]
    assert f"predicted step {1e3 * step_of(best):.1f} ms" in found.words
    # Across the leaf's narrow uplink it takes longer.
    assert [option.leaves for option in found.candidates] == [1, 1, 2, 2, 2]
    assert step_of(found.candidates[2]) > 4 * step_of(best)


@pytest.mark.parametrize(
    ("wanted", "known", "residency", "note"),
    [
        (replace(ask(TALKATIVE), profile=""), NARROW, None, ""),
        (ask(TALKATIVE), None, None, "deeplink calibrate"),
        (ask(TALKATIVE), NARROW, DataResidency({}, 10), "no sample_bytes"),
        (ask(replace(TALKATIVE, sample_bytes=1.0)), NARROW, DataResidency({}, 10), "calibrate --data"),
        (replace(ask(TALKATIVE), profile="{}"), NARROW, None, "no profile of a job"),
    ],
)
def test_else_weights_count_and_why_is_said(
    wanted: Ask, known: Constants | None, residency: DataResidency | None, note: str
) -> None:
    found = weighed(wanted, known, residency).decision
    plain = weighed(replace(wanted, profile=""), None, residency).decision
    assert found.cost == "weights"
    assert (found.candidates, found.predicted) == (plain.candidates, ())
    assert any(note in said for said in found.notes) if note else not found.notes


def test_data_counts_in_seconds_where_reading_was_timed() -> None:
    held = DataResidency(dict.fromkeys(nodes("n1 n3 n5 n7"), 10), 40)
    known = replace(NARROW, reads=READS)
    found = weighed(ask(replace(SILENT, sample_bytes=4e6)), known, held).decision
    assert (found.cost, found.nodes) == ("predicted step", nodes("n1 n3 n5 n7"))
    assert step_of(found.candidates[-1]) > 2 * step_of(found.candidates[0])
    assert any(line.split()[0] == "reading" for line in found.predicted)


def option(cost: float, step_s: float | None) -> NodeChoice:
    return NodeChoice(nodes=(), cost=cost, crossings=0, leaves=1, percent_local=100.0, step_s=step_s)


def test_what_is_worth_a_wish() -> None:
    assert gains(option(0.0, None), option(0.2, None))
    assert not gains(option(0.0, None), option(0.19, None))
    assert gains(option(9.0, 0.98), option(1.0, 1.0))
    assert not gains(option(0.0, 0.9801), option(9.0, 1.0))
    assert LEAST_SHARE == 0.02


def settled(wanted: Ask, theirs: str) -> Decision:
    found = weighed(wanted, NARROW)
    plain = trial_of(SAID.format(theirs), unfold)
    return without_wish(found, plain) or settle(found, plain, plain)


def test_slurms_own_choice_is_weighed_by_the_step_too() -> None:
    worse = settled(ask(TALKATIVE), "n[0-3]")
    assert worse.kind is HintKind.NODES
    assert worse.own is not None
    assert worse.own.nodes == nodes("n0 n2 n1 n3")
    assert step_of(worse.own) > 4 * step_of(worse.candidates[0])
    assert f"n0, n1, n2, n3: predicted step {1e3 * step_of(worse.own):.1f} ms" in worse.words
    # By weights the same nodes are a leaf too many; to this job it hardly matters where it runs.
    same = settled(ask(SILENT), "n[0-3]")
    assert (same.kind, same.why) == (HintKind.NOTHING, Why.AS_GOOD)
    assert same.own is not None
    assert step_of(same.own) < 1.02 * step_of(same.candidates[0])
    assert settled(replace(ask(SILENT), profile=""), "n[0-3]").kind is HintKind.NODES


def test_other_shapes_of_the_same_gpus_are_told_where_they_are_faster() -> None:
    two = ask(TALKATIVE, nodes=2, gpus=2, exclusive=False)
    known = replace(NARROW, leaf=LinkSpeed(1e9, 14e-6))
    around = Surroundings(now(), site(), machines=MachineSpeeds(known))
    (one, four) = other_shapes(two, decide(two, around), around)
    assert one.startswith("the same GPUs as 1 node with 4 each: predicted step ")
    assert four.startswith("the same GPUs as 4 nodes with 1 each: predicted step ")
    assert four.endswith(f"not {1e3 * step_of(decide(two, around).decision.candidates[0]):.1f} ms")
    best = replace(two, nodes=1, gpus=4)
    assert other_shapes(best, decide(best, around), around) == ()
    plain = replace(two, profile="")
    assert other_shapes(plain, decide(plain, around), around) == ()


def test_numpy_is_loaded_for_jobs_with_a_profile_alone() -> None:
    program = """
import sys
import deeplink.scheduler.placement.hint.making
from deeplink.scheduler.placement.hint.decision import Ask
from deeplink.scheduler.placement.hint.decide import MachineSpeeds, scale_of
from deeplink.scheduler.placement.model import Constants
scale_of(Ask(), MachineSpeeds(Constants()), data=False)
scale_of(Ask(profile="{}"), MachineSpeeds(), data=False)
scale_of(Ask(profile="{}"), MachineSpeeds(Constants()), data=False)
print("numpy" in sys.modules)
profile = '{"format": 1, "batch": 1, "sample_s": 1, "gradient_bytes": 1}'
scale_of(Ask(profile=profile), MachineSpeeds(Constants()), data=False)
print("numpy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.split() == ["False", "True"]
