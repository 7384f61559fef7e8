"""Messages of many nodes through one stream of lines."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.scheduler.sitecheck.site_evidence import Messages, to_lines
from tests.effort import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(40))
@given(st.data())
def test_messages_arrive_whole_however_their_lines_are_mixed(data: st.DataObject) -> None:
    said = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=3)
    sent = {f"n{number}": data.draw(said) for number in range(3)}
    queues = {node: [line for one in said for line in to_lines(node, one)] for node, said in sent.items()}
    messages = Messages()
    got: dict[str, list[Any]] = {node: [] for node in sent}
    while any(queues.values()):
        node = data.draw(st.sampled_from(sorted(node for node, lines in queues.items() if lines)))
        taken = messages.take(queues[node].pop(0) + "\n")
        if taken is not None:
            got[taken[0]].append(taken[1])
    assert got == sent


@given(st.text(), st.integers(0, 2))
def test_noise_between_the_lines_harms_nothing(noise: str, place: int) -> None:
    message = {"text": "x" * 4000, "numbers": list(range(600))}
    lines = to_lines("n0", message)
    assert len(lines) > 2
    assert max(map(len, lines)) < 1000, "srun hands on 1,024 bytes at a time"
    messages = Messages()
    got = [messages.take(line) for line in [*lines[:place], noise, *lines[place:]]]
    assert [one for one in got if one is not None] == [("n0", message)]


def test_a_message_that_lost_a_line_is_dropped_and_the_next_one_taken() -> None:
    lines = to_lines("n0", {"numbers": list(range(3000))})
    messages = Messages()
    assert all(messages.take(line) is None for line in lines[:1] + lines[2:])
    assert [messages.take(line) for line in to_lines("n0", {"next": 1})] == [("n0", {"next": 1})]


def test_what_is_no_message_is_kept_for_who_wants_to_know() -> None:
    messages = Messages()
    for line in ("srun: error: n3: task 3: Exited with exit code 127\n", "deeplink-doctor n0 0 1 ?????", "\n"):
        assert messages.take(line) is None
    assert messages.strange[0] == "srun: error: n3: task 3: Exited with exit code 127"
