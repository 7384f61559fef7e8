"""YAML and JSON with lines, whatever the text is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.topology.sources.marked import Item, MarkedTextError, from_json, from_yaml

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def plain(item: Item) -> Any:
    if isinstance(item.value, list):
        return [plain(one) for one in item.value]
    if isinstance(item.value, dict):
        return {key: plain(one) for key, one in item.value.items()}
    return item.value


def as_texts(value: Any) -> Any:
    if isinstance(value, list):
        return [as_texts(one) for one in value]
    if isinstance(value, dict):
        return {key: as_texts(one) for key, one in value.items()}
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


@given(VALUES)
def test_json_is_read_as_json_reads_it(value: Any) -> None:
    assert plain(from_json(json.dumps(value, indent=1))) == as_texts(value)


@given(st.text(max_size=200))
@pytest.mark.parametrize("read", [from_json, from_yaml])
def test_any_text_is_read_or_refused(read: Callable[[str], Item], text: str) -> None:
    line = 0
    try:
        line = read(text).line
    except MarkedTextError as refused:
        line = refused.line
    assert 0 <= line <= len(text) + 1  # YAML knows more line breaks than one


@pytest.mark.parametrize("read", [from_json, from_yaml])
@pytest.mark.parametrize("opening", ["[", '{"a":', "- ", "? "])
def test_nesting_without_end_is_refused(read: Callable[[str], Item], opening: str) -> None:
    with pytest.raises(MarkedTextError):
        read(opening * 20_000)


def test_scalars_stay_the_text_that_was_written() -> None:
    item = from_yaml("nodes: [0101, 1e3, yes, 2025-11-01, ~, '']")
    assert [one.text for one in item.fields["nodes"].items] == ["0101", "1e3", "yes", "2025-11-01", "", ""]
    item = from_json('{"a": [0.5, true, null, 1e400]}')
    assert [one.text for one in item.fields["a"].items] == ["0.5", "true", "", "1e400"]


def test_lines_are_those_of_the_text() -> None:
    item = from_yaml("a: 1\nb:\n- {c: 2}\n- d\n")
    assert [one.line for one in item.fields["b"].items] == [3, 4]
    item = from_json('{"a": 1,\n "b": [\n  {"c": 2},\n  {"d": 3}]}')
    assert [one.line for one in item.fields["b"].items] == [3, 4]


def test_aliases_are_shared_and_not_copied() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 5))
    item = from_yaml(text)
    assert item.fields["a4"].items[0] is item.fields["a4"].items[9]


def test_a_value_that_holds_itself_is_refused() -> None:
    with pytest.raises(MarkedTextError) as refused:
        from_yaml("a: 1\nb: &b [*b]")
    assert refused.value.line == 2


def test_a_text_is_a_list_of_one_and_nothing_is_an_empty_one() -> None:
    assert [one.text for one in Item("n0", 1).items] == ["n0"]
    assert Item("", 1).items == []
    assert Item("n0", 1).fields == {}
    assert Item([], 1).text is None


def test_aliases_that_stand_for_more_than_can_be_gone_through_are_refused() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11))
    with pytest.raises(MarkedTextError, match="more than") as refused:
        from_yaml(text)
    assert refused.value.line == 7


@pytest.mark.parametrize("read", [from_json, from_yaml])
def test_of_a_key_that_is_there_twice_the_first_counts(read: Callable[[str], Item]) -> None:
    item = read('{"a": {"x": "1"},\n "b": "2",\n "a": {"x": "3"}}')
    assert plain(item) == {"a": {"x": "1"}, "b": "2"}
    assert item.twice == (("a", 3),)


def test_a_letter_that_yaml_does_not_take_is_told_with_its_line() -> None:
    with pytest.raises(MarkedTextError, match="x0001") as refused:
        from_yaml("a: 1\nb: \x01\n")
    assert refused.value.line == 2
