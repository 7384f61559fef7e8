from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import (
    COULD_NOT_TELL,
    GOOD,
    MOST_COMPLAINTS,
    MOST_DOUBLINGS,
    MOST_SUBJECTS,
    CheckState,
    Complaint,
    Look,
    LookTime,
    Rule,
    findings,
    folded,
)
from tests.effort import examples
from tests.hostile import WORDS

RULE = Rule(bad=3, good=2)


def bad(severity: Severity = Severity.ERROR, subject: str = "disk") -> Look:
    return Look((Complaint(subject, severity, f"{subject} is {severity.action}"),))


def after(
    looks: list[Look], rule: Rule = RULE, *, every_s: float = 10.0, state: CheckState | None = None
) -> CheckState:
    state = state or CheckState()
    for number, look in enumerate(looks):
        state = folded(state, look, rule, LookTime(1000.0 + number * every_s, number * every_s))
    return state


def severity(state: CheckState, rule: Rule = RULE) -> Severity | None:
    found = [one for subject, one in findings("c", state, rule).items() if subject != COULD_NOT_TELL]
    return max((one.severity for one in found), default=None)


def test_a_finding_takes_three_bad_looks_in_a_row_and_ends_after_two_good_ones() -> None:
    assert severity(after([bad(), bad()])) is None
    assert severity(after([bad(), bad(), GOOD, bad(), bad()])) is None
    risen = after([bad(), bad(), bad()])
    assert severity(risen) is Severity.ERROR
    (found,) = findings("c", risen, RULE).values()
    assert (found.text, found.since_unix) == ("disk is drain", 1020.0)
    assert severity(after([bad()] * 3 + [GOOD])) is Severity.ERROR
    assert severity(after([bad()] * 3 + [GOOD] * 2)) is None


def test_it_rises_to_what_all_of_the_looks_are_at_least() -> None:
    mixed = [bad(Severity.ERROR), bad(Severity.NOTE), bad(Severity.WARNING)]
    assert severity(after(mixed)) is Severity.NOTE
    assert severity(after([*mixed, bad(Severity.ERROR), bad(Severity.WARNING)])) is Severity.WARNING


def test_it_falls_to_the_worst_of_the_better_looks() -> None:
    drained = [bad()] * 3
    assert severity(after([*drained, bad(Severity.WARNING), GOOD])) is Severity.WARNING
    assert severity(after([*drained, bad(Severity.WARNING), bad(), GOOD])) is Severity.ERROR


def test_what_the_kernel_recorded_needs_one_look_and_ends_as_all_else() -> None:
    recorded = Look((Complaint("oom", Severity.NOTE, "killed", certain=True),))
    state = after([recorded])
    assert severity(state) is Severity.NOTE
    assert severity(after([recorded, GOOD])) is Severity.NOTE
    assert severity(after([recorded, GOOD, GOOD])) is None


def test_the_ladder_has_a_top() -> None:
    rule = replace(RULE, most=Severity.WARNING)
    assert severity(after([bad()] * 9, rule), rule) is Severity.WARNING


def test_a_look_that_cannot_tell_counts_neither_way() -> None:
    dark = Look((), "no answer")
    assert severity(after([bad(), dark, bad(), dark, dark])) is None
    assert severity(after([bad(), dark, bad(), dark, bad()])) is Severity.ERROR
    assert severity(after([bad()] * 3 + [dark] * 50)) is Severity.ERROR
    assert severity(after([bad()] * 3 + [GOOD, dark, GOOD])) is None


def test_that_it_cannot_tell_is_told_when_it_lasts_and_asks_for_nothing() -> None:
    dark = Look((), "no answer")
    assert not findings("c", after([dark] * 2), RULE)
    found = findings("c", after([dark] * 4), RULE)[COULD_NOT_TELL]
    assert (found.severity, found.text, found.since_unix) == (Severity.UNKNOWN, "no answer", 1000.0)
    assert not findings("c", after([dark] * 4 + [GOOD]), RULE)


def test_what_flaps_stays_longer_each_time_within_bounds() -> None:
    state, looks_to_end = CheckState(), []
    at = 0.0
    for _ in range(8):
        for _ in range(RULE.bad):
            state = folded(state, bad(), RULE, LookTime(at, at))
            at += 1
        needed = 0
        while severity(state):
            state = folded(state, GOOD, RULE, LookTime(at, at))
            at, needed = at + 1, needed + 1
        looks_to_end.append(needed)
    assert looks_to_end == [2, 4, 8, 16, 32, 32, 32, 32]
    assert looks_to_end[-1] == RULE.good << MOST_DOUBLINGS


def test_what_comes_back_a_day_later_does_not_flap() -> None:
    state = after([bad()] * 3 + [GOOD] * 2)
    later = LookTime(90_000, 90_000)
    for _ in range(3):
        state = folded(state, bad(), RULE, later)
    for _ in range(2):
        state = folded(state, GOOD, RULE, later)
    assert severity(state) is None


def test_subjects_stand_for_themselves_and_are_bounded() -> None:
    two = Look((*bad(subject="a").complaints, *bad(Severity.NOTE, "b").complaints))
    found = findings("c", after([two, two, bad(subject="a"), bad(subject="a")]), RULE)
    assert {name: one.severity for name, one in found.items()} == {"a": Severity.ERROR}
    many = Look(tuple(Complaint(f"s{n:03}", Severity.NOTE, "x") for n in range(500)))
    assert len(findings("c", after([many] * 3), RULE)) == MOST_COMPLAINTS
    state = CheckState()
    for number in range(500):
        state = folded(state, bad(subject=str(number)), Rule(bad=1), LookTime(number, number))
    assert len(state.subjects) == MOST_SUBJECTS


def test_what_once_flapped_makes_room_for_what_is_bad_now() -> None:
    state = CheckState()
    for number in range(MOST_SUBJECTS):
        state = folded(state, bad(subject=f"old {number}"), Rule(bad=1, good=1), LookTime(number, number))
    state = folded(state, GOOD, Rule(bad=1, good=1), LookTime(99, 99))
    state = folded(state, bad(subject="new"), Rule(bad=1, good=1), LookTime(100, 100))
    assert "new" in findings("c", state, RULE)


def test_what_a_look_says_is_on_one_line_and_short() -> None:
    for word in ("s\n" * 300, *WORDS):
        look = Look((Complaint(word, Severity.ERROR, word + "c" * 999),), word * 99).bounded()
        for text in (look.complaints[0].subject, look.complaints[0].problem, look.unknown):
            assert len(text) <= 256
            assert text.isprintable()


LOOKS = st.lists(
    st.one_of(
        st.just(GOOD),
        st.just(Look((), "dark")),
        st.sampled_from([Severity.NOTE, Severity.WARNING, Severity.ERROR]).map(bad),
    ),
    max_size=60,
)
RULES = st.builds(
    Rule,
    bad=st.integers(1, 5),
    good=st.integers(1, 5),
    most=st.sampled_from([Severity.NOTE, Severity.WARNING, Severity.ERROR]),
)


@given(LOOKS, RULES)
def test_it_rises_only_on_evidence_falls_only_on_evidence_and_never_passes_its_top(
    looks: list[Look], rule: Rule
) -> None:
    state, level, known = CheckState(), Severity.OK, []
    for number, look in enumerate(looks):
        state = folded(state, look, rule, LookTime(number, number))
        now = severity(state, rule)
        new = now or Severity.OK
        if not look.unknown:
            known.append(look.complaints[0].severity if look.complaints else Severity.OK)
        if look.unknown:
            assert new == level
        if new > level:
            assert len(known) >= rule.bad
            assert min(known[-rule.bad :]) >= new
        if new < level:
            assert len(known) >= rule.good
            assert max(known[-rule.good :]) < level
        assert new <= rule.most
        level = new


@given(LOOKS, RULES)
def test_good_looks_end_everything_in_bounded_time(looks: list[Look], rule: Rule) -> None:
    state = after(looks, rule, every_s=1.0)
    for number in range(3 * (rule.good << MOST_DOUBLINGS)):
        state = folded(state, GOOD, rule, LookTime(number + 100, number + 100))
    assert not findings("c", state, rule)


@settings(max_examples=examples(16))
@given(st.integers(1, 4), st.integers(1, 4))
def test_a_check_that_alternates_for_ever_changes_seldom(bad_s: int, good_s: int) -> None:
    rule = Rule(bad=bad_s, good=good_s)
    state, changes, before = CheckState(), 0, None
    for number in range(800):
        look = bad() if number % (bad_s + good_s) < bad_s else GOOD
        state = folded(state, look, rule, LookTime(number, number))
        now = severity(state, rule)
        changes, before = changes + (now is not before), now
    assert changes <= 2 * (MOST_DOUBLINGS + 2)
