from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.errors import SourceError
from deeplink.cache.format.names import MOST_KEY_BYTES, MOST_NAME_BYTES, checked_key

PART = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda part: part not in {".", ".."}
)
PATH = st.lists(PART, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a\0b",
        "x" * (MOST_NAME_BYTES + 1),
        "/".join(["abc"] * (MOST_KEY_BYTES // 4 + 1)),
        "caf\udce9.png",
    ],
)
def test_a_path_with_tricks_is_refused_by_name(path: str) -> None:
    with pytest.raises(SourceError, match="cannot be packed") as refused:
        checked_key(path)
    assert refused.value.key == path
    assert refused.value.remedy


@given(PATH)
def test_an_ordinary_path_is_its_own_key(path: str) -> None:
    assert checked_key(path) == path
