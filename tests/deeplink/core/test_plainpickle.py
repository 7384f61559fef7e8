"""Pickles read as data."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from deeplink.core import plainpickle
from tests.pickled import got, pickled


class Colour(Enum):
    RED = 1


KNOWN = {(kind.__module__, kind.__name__): kind for kind in (Colour, Path)}


def test_a_member_of_a_known_enum_is_read_as_each_python_writes_it() -> None:
    for data in (got(Colour, "RED"), pickled(Colour.RED)):
        assert plainpickle.loaded(data, KNOWN) is Colour.RED


@pytest.mark.parametrize(
    ("owner", "name"), [(Path, "touch"), (Colour, "__class__"), (Colour, "mro"), (Colour, "BLUE"), (str, "format")]
)
def test_no_other_attribute_is_handed_out(owner: type, name: str) -> None:
    with pytest.raises(plainpickle.PickleError):
        plainpickle.loaded(got(owner, name), KNOWN)
