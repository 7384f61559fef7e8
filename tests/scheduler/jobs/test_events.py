"""Events in words: each of ours has some, and a stranger's is shown as it is."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler import launch
from deeplink.scheduler.jobs.follow import _WORDS, event_in_words

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)
)


def test_an_attempt_and_its_end() -> None:
    begun = {
        "event": "attempt-started",
        "attempt": "7.0.1",
        "nodes": ["n2", "n1"],
        "spares": ["n3"],
        "world_size": 8,
    }
    said = event_in_words({**begun, "ring_crossings": 2})
    assert said == "attempt 7.0.1 started: 8 ranks on n[1-2], n3 rests, 2 ring crossings"
    assert (
        event_in_words({"event": "ended", "code": 9, "because": "rank 3 failed"})
        == "ended with exit code 9: rank 3 failed"
    )


def test_one_that_is_not_known_is_shown_as_it_is_and_in_one_line() -> None:
    assert event_in_words({"event": "new", "unix": 1.0, "what": "a\nb"}) == "new: what a\\nb"


@given(
    st.sampled_from(sorted(_WORDS)), st.dictionaries(st.sampled_from(["because", "nodes", "code", "lost"]), JSON)
)
def test_facts_that_are_missing_or_strange_do_not_keep_the_rest_from_being_told(
    name: str, facts: dict[str, object]
) -> None:
    assert event_in_words({"event": name, "unix": 1.0, **facts})


def test_the_events_of_the_launcher_have_words() -> None:
    source = "".join(path.read_text() for path in Path(next(iter(launch.__path__))).glob("*.py"))
    written = set(re.findall(r"\w\.event\(\s*\"([a-z-]+)\"", source))
    written |= set(re.findall(r"_give_back\(partial\(.*\), \"([a-z-]+)\"", source))
    assert {"job-started", "network", "attempt-started", "relaunch", "requeue", "held", "ended"} <= written
    assert written <= set(_WORDS)
