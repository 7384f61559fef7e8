"""A disk that is really written and read, in a folder of the test's."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.scheduler.node.disk import measured_disk

SIZE = 8 << 20


def test_a_file_is_written_read_and_gone(tmp_path: Path) -> None:
    disk = measured_disk(tmp_path, SIZE, SystemClock())
    assert (disk.problem, disk.written) == ("", SIZE)
    assert min(disk.write_s, disk.read_s, disk.random_s) > 0
    assert disk.random_reads > 0
    assert list(tmp_path.iterdir()) == []


def test_where_files_must_have_names_none_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def without_tmpfile(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    disk = measured_disk(tmp_path, SIZE, SystemClock())
    assert (disk.written, disk.cold) == (SIZE, False)
    assert list(tmp_path.iterdir()) == []


def test_it_ends_when_the_time_is_up(tmp_path: Path) -> None:
    clock = _Hurried()
    disk = measured_disk(tmp_path, SIZE, clock, longest_s=1.0)
    assert disk.written < SIZE


class _Hurried(ManualClock):
    @override
    def monotonic(self) -> float:
        self.now += 0.6
        return self.now


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    assert "No such file" in measured_disk(tmp_path / "none", SIZE, SystemClock()).problem
    assert "too little room" in measured_disk(tmp_path, 1 << 60, SystemClock()).problem
