"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import deeplink

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(deeplink.__path__, "deeplink.")
    if not found.name.endswith("__main__") and not found.name.startswith("deeplink.v1")
)


@pytest.mark.slow
def test_every_example_gives_what_it_says() -> None:
    tried = 0
    for name in MODULES:
        result = doctest.testmod(importlib.import_module(name))
        assert result.failed == 0, f"{name}: {result.failed} of {result.attempted} examples"
        tried += result.attempted
    assert tried > 20
