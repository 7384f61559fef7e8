from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.errors import SourceError
from deeplink.cache.format.names import MOST_KEY_BYTES, NameCollector, Names

PART = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda part: part not in {".", ".."}
)
PATH = st.lists(PART, min_size=1, max_size=4).map("/".join)


def gathered(paths: list[str]) -> tuple[Names, np.ndarray, np.ndarray]:
    found = NameCollector()
    found.add("", paths, range(len(paths)), range(len(paths)))
    return found.finished()


@given(st.sets(PATH, max_size=20))
def test_keys_come_in_the_order_of_their_bytes_or_collide(paths: set[str]) -> None:
    folders = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
    given_order = list(paths)
    if folders & paths:
        with pytest.raises(SourceError, match=r"twice in the source|also a folder"):
            gathered(given_order)
    else:
        names, sizes, marks = gathered(given_order)
        assert [key.encode() for key in names] == sorted(path.encode() for path in paths)
        assert [given_order[place] for place in sizes] == list(names)
        assert sizes.tolist() == marks.tolist()


@pytest.mark.parametrize("paths", [["a", "b", "a"], ["a", "a-b", "a/b"], ["a/b", "a-b", "a"], ["x/y", "x/y/z"]])
def test_two_files_of_one_name_are_refused(paths: list[str]) -> None:
    with pytest.raises(SourceError, match=r"twice in the source|also a folder"):
        gathered(paths)


@pytest.mark.parametrize("bad", ["caf\udce9.png", "a\0b", "/".join(["x" * 250] * 17)])
def test_a_name_that_cannot_be_a_key_is_refused_by_name(bad: str) -> None:
    with pytest.raises(SourceError, match="cannot be packed") as refused:
        NameCollector().add("train/", ["good", bad, "too"], [0] * 3, [0] * 3)
    assert refused.value.key == f"train/{bad}"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), st.data())
def test_names_are_a_list_of_strings(texts: list[str], data: st.DataObject) -> None:
    start, stop = (data.draw(st.integers(-len(texts) - 2, len(texts) + 2)) for _ in range(2))
    names, chosen = Names.of(texts)[start:stop], texts[start:stop]
    assert list(names) == [names[row] for row in range(len(names))] == chosen == names.arrow.to_pylist()
    assert names == chosen
    assert names.joined() == "".join(chosen).encode()
    assert b"".join(names.terminated()) == b"".join(text.encode() + b"\0" for text in chosen)
    assert names.lengths.tolist() == [len(text.encode()) for text in chosen]


def test_runs_of_very_many_names_fit_together() -> None:
    texts = [f"{number:06d}" for number in range(70_000)]
    names = Names.of(texts)
    assert list(names) == texts
    assert b"".join(names.terminated()) == "".join(f"{text}\0" for text in texts).encode()


def lengths(texts: list[bytes]) -> np.ndarray:
    return np.array([len(text) for text in texts], np.uint16)


@pytest.mark.parametrize(
    "texts",
    [
        [b"../x"],
        [b"/etc/passwd"],
        [b"b", b"a"],
        [b"a", b"a"],
        [b"a", b"a/b"],
        [b"\xff"],
        [b""],
        [b"a" * (MOST_KEY_BYTES + 1)],
    ],
)
def test_names_that_came_from_elsewhere_are_checked(texts: list[bytes]) -> None:
    with pytest.raises(SourceError):
        Names.checked(b"".join(texts), lengths(texts))
    with pytest.raises(SourceError):
        Names.checked(b"abc", lengths([b"ab"]))
    assert list(Names.checked(b"a/bc", lengths([b"a/b", b"c"]))) == ["a/b", "c"]
