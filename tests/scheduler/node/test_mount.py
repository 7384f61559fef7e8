from __future__ import annotations

import os
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock
from deeplink.scheduler.node.check_result import Look
from deeplink.scheduler.node.disk import MountCheck, ask_statfs, judge_mount, watched_mounts
from deeplink.scheduler.node.settings import MountSettings
from tests.faults.disks import disk_in_memory

INFO = """\
36 35 98:0 / / rw - ext4 /dev/sda rw
40 36 0:50 / /home rw,relatime shared:1 - nfs4 server:/home rw
41 36 0:51 / /scratch rw - lustre mgs@o2ib:/s rw
42 36 0:52 / /tmp rw - tmpfs none rw
43 36 0:53 / /local rw - ext4 /dev/sdb rw
"""


def check(tmp_path: Path, hangs: Path | None = None, **settings: object) -> MountCheck:
    """Return a check of made-up mounts whose children answer at once, but for /home's while `hangs` is there."""
    info = tmp_path / "mountinfo"
    info.write_text(INFO)

    def command(path: str) -> list[str]:
        if path == "/home" and hangs is not None:
            return ["sh", "-c", f"echo >>{hangs}.asked; while [ -e {hangs} ]; do sleep 0.02; done"]
        return ["true"]

    return MountCheck(MountSettings(**settings), SystemClock(), info, command)  # type: ignore[arg-type]


def said(look: Look) -> dict[str, str]:
    return {complaint.subject: complaint.problem for complaint in look.complaints}


def test_shared_file_systems_are_found_and_the_site_adds_and_leaves_out() -> None:
    assert watched_mounts(INFO, MountSettings()) == ["/home", "/scratch"]
    hidden = "44 36 0:54 / /home ro - tmpfs tmpfs ro\n"
    assert watched_mounts(INFO + hidden, MountSettings()) == ["/scratch"]
    assert watched_mounts(INFO, MountSettings(paths=("/local",), skip=("/scratch",))) == ["/local", "/home"]


def test_one_that_hangs_is_told_and_others_are_not_and_it_is_found_again(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.touch()
    mounts = check(tmp_path, hangs, deadline_s=0.8)
    assert mounts.look().complaints[0].subject == "/home"
    second = mounts.look()
    assert list(said(second)) == ["/home"]
    assert "has not answered for" in said(second)["/home"]
    assert Path(f"{hangs}.asked").read_text() == "\n", "a second child was started beside the one that hangs"
    hangs.unlink()
    mounts.settings = MountSettings(deadline_s=20.0)
    assert mounts.look() == Look()
    mounts.close()


def test_one_that_hangs_is_told_also_when_it_was_unmounted_by_force(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.touch()
    mounts = check(tmp_path, hangs, deadline_s=0.8)
    mounts.look()
    (tmp_path / "mountinfo").write_text("36 35 98:0 / / rw - ext4 /dev/sda rw\n")
    assert list(said(mounts.look())) == ["/home"]
    mounts.close()
    assert mounts.look() == Look()


def test_what_the_site_names_must_be_mounted(tmp_path: Path) -> None:
    assert said(check(tmp_path, paths=("/projects",)).look()) == {"/projects": "/projects is not mounted"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_the_disk_that_is_mounted_answers_and_is_missed_when_it_is_not(tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "shared", 1 << 20) as disk:
        mounts = MountCheck(MountSettings(paths=(str(disk.path),)), SystemClock())
        assert mounts.look().complaints == ()
    assert said(mounts.look()) == {str(disk.path): f"{disk.path} is not mounted"}


def test_the_real_command_asks_and_says_in_english(tmp_path: Path) -> None:
    mounts = check(tmp_path)
    mounts.command = ask_statfs
    mounts.settings = MountSettings(paths=("/", "/local"), skip=("/home", "/scratch"))
    assert set(said(mounts.look())) <= {"/local"}


@pytest.mark.parametrize(
    ("code", "stderr", "broken"),
    [
        (0, "", False),
        (1, "stat: cannot read file system information for '/home': Stale file handle\n", True),
        (1, "stat: cannot read file system information for '/m': Transport endpoint is not connected", True),
        (1, "stat: cannot read file system information for '/m': Permission denied", False),
        (127, "env: 'stat': No such file or directory\n", False),
        (-9, "", False),
    ],
)
def test_only_broken_storage_is_bad(code: int, stderr: str, broken: bool) -> None:
    text, bad = judge_mount("/home", code, stderr)
    assert bad is broken
    assert bool(text) is bool(code)


def test_without_a_list_of_mounts_it_cannot_tell(tmp_path: Path) -> None:
    mounts = MountCheck(MountSettings(), SystemClock(), tmp_path / "nothing")
    assert mounts.look().unknown
