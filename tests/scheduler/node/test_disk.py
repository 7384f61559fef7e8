"""Disks that are really full, read-only or failing; and the judge over made-up readings."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import Look
from deeplink.scheduler.node.disk import (
    DiskCheck,
    DiskReading,
    Hang,
    completed,
    judge_disk,
    judge_hang,
    read_disk,
    state_of,
)
from deeplink.scheduler.node.reading import HighWaterMarks
from deeplink.scheduler.node.settings import DiskSettings
from tests.faults.disks import disk_in_memory, disk_on_loop
from tests.waiting import LIMIT_S

SETTINGS = DiskSettings(min_free_bytes=1 << 20)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


def judged(folder: Path, settings: DiskSettings = SETTINGS, *, was_there: bool = True) -> dict[str, Severity]:
    return told(judge_disk(read_disk(folder, SystemClock()), str(folder), settings, was_there=was_there))


def told(look: Look) -> dict[str, Severity]:
    return {complaint.subject: complaint.severity for complaint in look.complaints}


def test_a_disk_that_is_well_says_nothing_and_keeps_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_the_disk_that_is_full_is_told(tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "disk", 4 << 20) as disk:
        assert judged(disk.path) == {}
        disk.fill()
        assert judged(disk.path) == {"space": Severity.WARNING}


@needs_root
def test_the_disk_that_nears_its_end_is_told(tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "disk", 4 << 20) as disk:
        assert judged(disk.path, DiskSettings(min_free_bytes=5 << 20)) == {"space": Severity.WARNING}


@needs_root
def test_the_disk_that_takes_no_writes_is_to_be_drained(tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "disk", 4 << 20) as disk:
        disk.refuse_writes()
        assert judged(disk.path) == {"read-only": Severity.ERROR}


@needs_root
def test_the_disk_that_fails_is_to_be_drained(tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "disk", 8 << 20) as disk:
        (disk.path / "store").mkdir()
        assert judged(disk.path / "store") == {}
        # Mounted again, it has nothing in memory that would answer for the disk.
        subprocess.run(["umount", disk.path], check=True)
        subprocess.run(["mount", "-o", "loop,errors=continue", str(disk.image), disk.path], check=True)
        disk.fail()
        assert judged(disk.path / "store") == {"error": Severity.ERROR}


@needs_root
def test_the_disk_whose_writes_get_lost_is_told_though_it_has_room(tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "disk", 8 << 20) as disk:
        assert judged(disk.path) == {}
        disk.fail()
        look = judge_disk(read_disk(disk.path, SystemClock()), "/ssd", SETTINGS, was_there=True)
        (told_,) = look.complaints
        assert told_.severity in {Severity.WARNING, Severity.ERROR}


def test_a_folder_that_was_there_and_is_gone_is_told_and_one_that_never_was_is_not(tmp_path: Path) -> None:
    assert judged(tmp_path / "store") == {"gone": Severity.ERROR}
    assert judged(tmp_path / "store", was_there=False) == {}


@pytest.mark.parametrize(
    ("reading", "found"),
    [
        (DiskReading(free_bytes=1 << 30, probe_s=0.1), {}),
        (DiskReading(free_bytes=1 << 30, probe_s=3.0), {"slow": Severity.NOTE}),
        (DiskReading(free_bytes=1 << 30, probe_s=5.0), {"slow": Severity.WARNING}),
        (DiskReading(free_bytes=1 << 30, probe_s=0.1, differs=True), {"differs": Severity.ERROR}),
        (DiskReading(free_bytes=1 << 30, error=errno.EIO), {"error": Severity.ERROR}),
        (DiskReading(free_bytes=1 << 30, error=errno.EROFS), {"read-only": Severity.ERROR}),
        (DiskReading(free_bytes=1 << 30, error=errno.EDQUOT), {"space": Severity.WARNING}),
        (DiskReading(free_bytes=1 << 30, files_free=0), {"space": Severity.WARNING}),
        (DiskReading(error=errno.ENXIO), {"error": Severity.ERROR}),
        (
            DiskReading(free_bytes=0, read_only=True),
            {"read-only": Severity.ERROR, "space": Severity.WARNING},
        ),
    ],
)
def test_what_a_reading_asks_for(reading: DiskReading, found: dict[str, Severity]) -> None:
    look = judge_disk(reading, "/ssd", SETTINGS, was_there=True)
    assert told(look) == found
    assert look.unknown == ""


def test_a_folder_that_we_may_not_enter_is_unknown() -> None:
    look = judge_disk(DiskReading(error=errno.EACCES), "/ssd", SETTINGS, was_there=True)
    assert (told(look), look.unknown) == ({}, "/ssd: Permission denied")


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Have every write to the file system of a folder wait, in the kernel, until the end of the block."""
    subprocess.run(["fsfreeze", "--freeze", folder], check=True, timeout=LIMIT_S)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=True, timeout=LIMIT_S)


@needs_root
def test_a_disk_that_really_hangs_is_to_be_drained_after_minutes_and_not_before(tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "disk", 8 << 20) as disk:
        check = DiskCheck(disk.path, SETTINGS, SystemClock(), HighWaterMarks())
        assert told(check.hung(500.0)) == {}  # no look has begun
        threads: list[int] = []
        seen: list[Look] = []

        def look() -> None:
            threads.append(threading.get_native_id())
            seen.append(check.look())

        with frozen(disk.path):
            thread = threading.Thread(target=look)
            thread.start()
            deadline = time.monotonic() + LIMIT_S
            while not (threads and state_of(threads[0]) == "D") and time.monotonic() < deadline:
                time.sleep(0.01)
            assert told(check.hung(15.0)) == {"slow": Severity.WARNING}
            assert told(check.hung(179.0)) == {"slow": Severity.WARNING}
            assert told(check.hung(200.0)) == {"hangs": Severity.ERROR}
        thread.join(LIMIT_S)
        assert [told(look) for look in seen] == [{}]
        late = check.hung(500.0)  # its thread is gone: nothing can be told
        assert (told(late), bool(late.unknown)) == ({}, True)


@pytest.mark.parametrize(
    ("hang", "shared", "found"),
    [
        (Hang(age_s=600.0, state="D", goes_on=False), False, {"hangs": Severity.ERROR}),
        (Hang(age_s=600.0, state="S", goes_on=False), False, {"hangs": Severity.ERROR}),
        (Hang(age_s=600.0, state="D", goes_on=False), True, {"hangs": Severity.WARNING}),
        # Whether its disk serves others cannot be told.
        (Hang(age_s=600.0, state="D"), False, {"hangs": Severity.WARNING}),
        # Slow by all that others write: however long it takes.
        (Hang(age_s=600.0, state="D", goes_on=True), False, {"slow": Severity.WARNING}),
        (Hang(age_s=100.0, state="D", goes_on=False), False, {"slow": Severity.WARNING}),
        # We are the ones who do not get on.
        (Hang(age_s=600.0, state="D", starved_s=450.0), False, {"slow": Severity.WARNING}),
        (Hang(age_s=600.0, state="R"), False, {}),
        (Hang(age_s=600.0, state="T"), False, {}),
        (Hang(age_s=600.0, state=""), False, {}),
    ],
)
def test_what_a_look_that_does_not_end_asks_for(hang: Hang, shared: bool, found: dict[str, Severity]) -> None:
    look = judge_hang(hang, "/ssd", SETTINGS, shared=shared)
    assert told(look) == found
    assert "/ssd" in look.unknown  # whatever else was wrong with it stays told


@needs_root
def test_a_disk_that_works_is_seen_to_go_on(tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "disk", 8 << 20) as disk:
        device = disk.path.stat().st_dev
        before = completed(device)
        with (disk.path / "file").open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        after = completed(device)
    assert before is not None
    assert after is not None
    assert after > before
    assert completed(os.makedev(0, 1)) is None
