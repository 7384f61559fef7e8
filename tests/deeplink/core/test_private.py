"""A private folder is this user's alone, whatever another one did before; files below a folder follow no link."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.cache.store.store import Store
from deeplink.core.private import PrivateFolderError, open_beneath, private_folder
from deeplink.scheduler.slurm.command import finish

ALICE, MALLORY = 64_101, 64_102
IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts as two other users")


@pytest.fixture
def ssd() -> Iterator[Path]:
    """A disk on which everybody may make folders, as node-local ones are."""
    folder = Path(tempfile.mkdtemp(prefix="deeplink-ssd-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_user(uid: int, program: str, *arguments: object) -> str:
    """Run a program as another user; return what it says of its end."""
    argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", sys.executable, "-c", program]
    done = finish([*argv, *map(str, arguments)], timeout_s=120)
    return done.stdout + done.stderr


MAKE = """
import sys
from pathlib import Path
from deeplink.core.private import private_folder
private_folder(Path(sys.argv[1]))
"""
JOURNAL = """
import os, sys
from pathlib import Path
from deeplink.scheduler.journal.journal import Journal
os.umask(0o022)
Journal(Path(sys.argv[1])).close()
"""
STORE = """
import sys
from pathlib import Path
from deeplink.cache.store.store import Store
store = Store(Path(sys.argv[1]))
shard = "0" * 40
(Path(sys.argv[1]) / f"{shard}.mdb").write_bytes(b"damaged")
print("quarantined", store.quarantine(shard, "a test"))
"""


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert private_folder(made) == made


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o2775])
def test_a_folder_that_others_may_write_to_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PrivateFolderError, match="others may write to it") as refused:
        private_folder(folder)
    assert f"chmod go-w {folder}" in refused.value.remedy
    with pytest.raises(PrivateFolderError):
        Store(folder)
    folder.chmod(mode & ~0o022)
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", [0o002, 0o000])
def test_parents_that_are_made_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        private_folder(tmp_path / "state" / "jobs" / "7")
    finally:
        os.umask(before)
    for made in ("state", "state/jobs", "state/jobs/7"):
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o700


def test_a_place_where_everybody_may_put_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PrivateFolderError, match="everybody may put something else in its place") as refused:
        private_folder(tmp_path / "open" / "store")
    assert "chmod +t" in refused.value.remedy
    assert list((tmp_path / "open").iterdir()) == []
    (tmp_path / "open").chmod(0o1777)
    assert private_folder(tmp_path / "open" / "store").is_dir()


def test_a_group_reads_only_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o750)
    assert stat.S_IMODE(private_folder(folder, group_reads=True).stat().st_mode) == 0o750
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700


def test_links_of_this_user_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert private_folder(tmp_path / "link" / "below").is_dir()
    assert private_folder(tmp_path / "link") == tmp_path / "link"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        private_folder(tmp_path / "loop")


@IS_ROOT
def test_a_folder_that_another_user_made_first_is_refused(ssd: Path) -> None:
    folder = ssd / "deeplink-alice"
    assert as_user(MALLORY, MAKE, folder) == ""
    assert f"{folder}: it belongs to user {MALLORY}" in as_user(ALICE, MAKE, folder)
    assert f"{folder}: it belongs to user {MALLORY}" in as_user(ALICE, STORE, folder)
    assert list(folder.iterdir()) == []


@IS_ROOT
def test_a_journal_that_another_user_laid_is_not_written_to(ssd: Path) -> None:
    journal = ssd / "journal.sqlite"
    assert as_user(MALLORY, JOURNAL, journal) == ""
    assert f"{journal}: it belongs to user {MALLORY}" in as_user(ALICE, JOURNAL, journal)
    shutil.chown(journal, ALICE, ALICE)
    journal.chmod(0o666)
    assert "others may write to it (mode 0666)" in as_user(ALICE, JOURNAL, journal)
    journal.chmod(0o644)
    assert as_user(ALICE, JOURNAL, journal) == ""
    (ssd / "link").symlink_to(journal)
    os.chown(ssd / "link", MALLORY, MALLORY, follow_symlinks=False)
    assert f"is a link of user {MALLORY}" in as_user(ALICE, JOURNAL, ssd / "link")


@IS_ROOT
def test_a_link_that_another_user_laid_leads_nowhere(ssd: Path) -> None:
    results = ssd / "results"
    results.mkdir(mode=0o700)
    for name in "abcdefg":
        (results / name).write_text(name)
    shutil.chown(results, ALICE, ALICE)
    (ssd / "deeplink-alice").symlink_to(results)
    os.chown(ssd / "deeplink-alice", MALLORY, MALLORY, follow_symlinks=False)
    said = as_user(ALICE, STORE, ssd / "deeplink-alice")
    assert f"is a link of user {MALLORY}" in said
    # One step further in: her folder was open to all for a while, and he laid the link there.
    store = ssd / "store"
    store.mkdir(mode=0o700)
    (store / "quarantine").symlink_to(results)
    os.chown(store / "quarantine", MALLORY, MALLORY, follow_symlinks=False)
    shutil.chown(store, ALICE, ALICE)
    assert "quarantined False" in as_user(ALICE, STORE, store)
    assert "quarantined True" in as_user(ALICE, STORE, ssd / "a-store-of-her-own")
    assert sorted(path.name for path in results.iterdir()) == list("abcdefg")


def test_a_file_below_a_folder_is_opened_and_no_link_on_its_way(tmp_path: Path) -> None:
    folder, secret = tmp_path / "checkpoint", tmp_path / "secret"
    (folder / "deep").mkdir(parents=True)
    secret.write_text("key")
    (folder / "deep" / "state").write_text("weights")
    with open_beneath(folder, "deep/state") as file:
        assert file.read() == b"weights"
    (folder / "link").symlink_to(secret)
    (folder / "away").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    for path in (
        "link",
        "away/secret",
        "../secret",
        "deep/../../secret",
        "deep",
        "pipe",
        "",
        "/etc/passwd",
        "gone",
    ):
        with pytest.raises(OSError):  # noqa: PT011 - each has an error of its own
            open_beneath(folder, path)
