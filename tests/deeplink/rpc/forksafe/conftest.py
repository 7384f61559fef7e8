"""Ports come again: what one test's server said at one is nothing to the next test."""

from __future__ import annotations

import pytest

from deeplink.core.admission import STRANGERS


@pytest.fixture(autouse=True)
def _nobody_is_a_stranger_yet() -> None:
    STRANGERS.forget()
