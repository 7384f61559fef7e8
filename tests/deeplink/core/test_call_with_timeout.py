"""What may hang is waited for no longer than was said."""

from __future__ import annotations

import threading

import pytest

from deeplink.core.timeouts import call_with_timeout


def test_what_comes_of_it_is_had() -> None:
    assert call_with_timeout(lambda: 7, 60) == 7


def test_its_error_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        call_with_timeout(lambda: (_ for _ in ()).throw(FileNotFoundError("gone")), 60)


def test_what_hangs_is_left_behind() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError):
        call_with_timeout(over.wait, 0.01)
    over.set()
