"""Checkpoints: whole or not there, from the newest attempt alone."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.checkpoints import (
    CheckpointDamagedError,
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    Claim,
    ClaimDamagedError,
    FencedError,
)
from deeplink.checkpoints.saving import retire
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


def save(checkpoints: Checkpoints, step: int) -> Path:
    with checkpoints.save(step=step, meta={"step": step}) as draft:
        (draft / "state.bin").write_bytes(b"state" * step)
        (draft / "ranks").mkdir()
        (draft / "ranks" / "0.bin").write_bytes(b"rank" * step)
    found = checkpoints.latest()
    assert found is not None
    return found.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "claims")


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent").latest() is None
    assert not (tmp_path / "absent").exists()
    assert Checkpoints(tmp_path / "made", attempt=FIRST).latest() is None


def test_what_was_saved_is_found_with_step_attempt_and_meta(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST, clock=ManualClock())
    save(checkpoints, 10)
    found = Checkpoints(tmp_path, attempt=SECOND).latest()
    assert found is not None
    assert (found.step, found.attempt, found.meta, found.skipped) == (10, FIRST, {"step": 10}, ())
    assert (found.path / "state.bin").read_bytes() == b"state" * 10
    assert (found.path / "ranks" / "0.bin").read_bytes() == b"rank" * 10
    manifest = json.loads((found.path / "manifest.json").read_text())
    assert manifest["created_unix"] == ManualClock().unix()
    assert [entry["path"] for entry in manifest["files"]] == ["ranks/0.bin", "state.bin"]


def test_the_newest_are_kept_and_older_ones_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST, keep=2)
    for step in (10, 20, 30, 40):
        save(checkpoints, step)
    assert names(tmp_path) == ["step-0000000030.a1", "step-0000000040.a1"]


def test_a_step_saved_again_replaces_the_first_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    save(checkpoints, 10)
    assert save(checkpoints, 10).name == "step-0000000010.a1-1"
    assert names(tmp_path) == ["step-0000000010.a1-1"]


def test_a_save_that_fails_leaves_nothing_and_the_last_one_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    before = save(checkpoints, 10)
    with pytest.raises(RuntimeError, match="out of memory"), checkpoints.save(step=20) as draft:
        (draft / "half.bin").write_bytes(b"half")
        raise RuntimeError("out of memory")
    assert names(tmp_path) == [before.name]


def truncate(path: Path) -> None:
    os.truncate(path / "state.bin", 7)


def lose_a_file(path: Path) -> None:
    (path / "ranks" / "0.bin").unlink()


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "state.bin").read_bytes())
    data[3] ^= 1
    (path / "state.bin").write_bytes(data)


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def tear_the_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 40)


def alter_the_meta(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 30', '"step": 31', 1))


@pytest.mark.parametrize(
    ("tear", "says"),
    [
        (truncate, "state.bin has 7 bytes, saved were 150"),
        (lose_a_file, "ranks/0.bin is missing"),
        (flip_a_bit, "state.bin was altered"),
        (lose_the_manifest, "manifest.json is missing"),
        (tear_the_manifest, "manifest.json is no manifest"),
        (alter_the_meta, "manifest.json was altered"),
    ],
)
def test_a_torn_newest_save_is_skipped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tear: Callable[[Path], None], says: str
) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    save(checkpoints, 20)
    torn = save(checkpoints, 30)
    tear(torn)
    for reader in (checkpoints, Checkpoints(tmp_path), Checkpoints(tmp_path, attempt=SECOND)):
        with caplog.at_level(logging.WARNING):
            found = reader.latest()
        assert found is not None
        assert found.step == 20
        assert [item.path for item in found.skipped] == [torn]
        assert says in found.skipped[0].reason
        assert reader.skipped == found.skipped
        assert says in caplog.text
        caplog.clear()


def test_damaged_ones_do_not_push_whole_ones_out(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST, keep=1)
    whole = save(checkpoints, 10)
    with checkpoints.save(step=20) as draft:
        (draft / "state.bin").write_bytes(b"x" * 99)
    assert not whole.exists()
    later = Checkpoints(tmp_path, attempt=SECOND, keep=2)
    save(later, 30)
    truncate(save(later, 40))
    with later.save(step=50) as draft:
        (draft / "state.bin").write_bytes(b"x" * 99)
    assert {"step-0000000030.a2", "step-0000000050.a2"} <= set(names(tmp_path))


def test_a_zombie_is_refused_before_it_writes(tmp_path: Path) -> None:
    zombie = Checkpoints(tmp_path, attempt=FIRST)
    save(zombie, 10)
    assert Checkpoints(tmp_path, attempt=SECOND).latest() is not None
    wrote = False
    with pytest.raises(FencedError) as refused, zombie.save(step=20):
        wrote = True
    assert not wrote
    assert (refused.value.attempt, refused.value.newest) == (FIRST, SECOND)
    with pytest.raises(FencedError):
        zombie.latest()


def test_a_zombie_is_refused_at_the_rename(tmp_path: Path) -> None:
    zombie = Checkpoints(tmp_path, attempt=FIRST)
    save(zombie, 10)
    with pytest.raises(FencedError), zombie.save(step=20) as draft:
        (draft / "state.bin").write_bytes(b"late")
        Checkpoints(tmp_path, attempt=SECOND).latest()
    assert names(tmp_path) == ["step-0000000010.a1"]


def test_what_a_zombie_publishes_after_the_claim_is_ignored_said_and_removed_once_superseded(
    tmp_path: Path,
) -> None:
    zombie = Checkpoints(tmp_path, attempt=FIRST)
    good = save(zombie, 10)
    newer = Checkpoints(tmp_path, attempt=SECOND)
    newer.latest()
    # Its check passed before the claim, its rename arrived after: so slow a machine cannot be prevented.
    late = tmp_path / "step-0000000020.a1"
    shutil.copytree(good, late)
    third = Checkpoints(tmp_path, attempt=Attempt(17, 1, 0))
    for reader in (newer, third):
        if reader is third:
            shutil.copytree(good, tmp_path / "step-0000000030.a1")
        found = reader.latest()
        assert found is not None
        assert found.path == good
    assert "fenced attempt" in third.skipped[0].reason
    save(third, 40)
    save(third, 50)
    assert len(names(tmp_path)) == 5, "it looks like one that somebody brought back"
    save(third, 60)
    assert names(tmp_path) == [f"step-00000000{step}.a3" for step in (40, 50, 60)]


def test_a_zombies_late_save_does_not_remove_what_the_newer_attempt_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie, newer = (Checkpoints(tmp_path, attempt=attempt, keep=1) for attempt in (FIRST, SECOND))
    save(zombie, 10)
    check = zombie._saver.check
    checks = iter(range(9))

    def stands_still() -> None:  # after the last look, before the rename
        check()
        if next(checks) == 1:
            newer.latest()

    monkeypatch.setattr(zombie._saver, "check", stands_still)
    with pytest.raises(FencedError), zombie.save(step=20):
        pass
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000010.a1"], "it is taken back"
    for attempt in (SECOND, Attempt(17, 0, 2)):
        found = Checkpoints(tmp_path, attempt=attempt).latest()
        assert found is not None
        assert found.step == 10


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_is_removed_while_a_newer_attempt_claims_is_not_what_it_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    # The older attempt saves once more between the newer one's look at the folder and the appearance of its claim;
    # it looks for claims before that claim appears, or after.
    older, newer = (Checkpoints(tmp_path, attempt=attempt, keep=1) for attempt in (FIRST, SECOND))
    save(older, 10)
    publish, refuse = newer._hold.claims.publish, older._hold.refuse_if_fenced
    looks = iter(range(9))

    def hidden() -> None:
        refuse()
        if is_seen and next(looks) == 4:  # begin, before and after the rename, before hiding, after it
            publish(claims[0])
            refuse()

    claims: list[Claim] = []

    def slow(claim: Claim) -> bool:
        if not claims:
            claims.append(claim)
            with older.save(step=20):
                pass
        return publish(claim)

    monkeypatch.setattr(newer._hold.claims, "publish", slow)
    monkeypatch.setattr(older._hold, "refuse_if_fenced", hidden)
    found = newer.latest()
    assert found is not None
    assert found.step == (10 if is_seen else 20)
    save(newer, 30)
    assert names(tmp_path) == [f"step-0000000030.a{2 if is_seen else 3}"]


def test_what_could_not_all_be_hidden_is_as_it_was(tmp_path: Path) -> None:
    both = ["step-0000000001.a1", "x" * 250]  # the name that hides the second one would be too long
    for name in both:
        (tmp_path / name).mkdir()
    with pytest.raises(OSError, match="too long"):
        retire(tmp_path, both, lambda: None)
    assert names(tmp_path) == both


def test_a_zombies_unfinished_save_is_removed_and_it_learns_why(tmp_path: Path) -> None:
    zombie = Checkpoints(tmp_path, attempt=FIRST)
    save(zombie, 10)
    newer = Checkpoints(tmp_path, attempt=SECOND)
    with pytest.raises(FencedError), zombie.save(step=20) as draft:
        save(newer, 20)
        assert not draft.exists()
        (draft / "state.bin").write_bytes(b"late")
    assert names(tmp_path) == ["step-0000000010.a1", "step-0000000020.a2"]


def test_an_older_attempt_cannot_claim_after_a_newer_one(tmp_path: Path) -> None:
    Checkpoints(tmp_path, attempt=SECOND).latest()
    with pytest.raises(FencedError) as refused:
        Checkpoints(tmp_path, attempt=FIRST).latest()
    assert refused.value.newest == SECOND
    # Also when another job has claimed since.
    Checkpoints(tmp_path, attempt=Attempt(3, 0, 0)).latest()
    with pytest.raises(FencedError):
        Checkpoints(tmp_path, attempt=FIRST).latest()


def test_between_jobs_the_latest_claim_wins(tmp_path: Path) -> None:
    one, other = Checkpoints(tmp_path, attempt=Attempt(20, 0, 0)), Checkpoints(tmp_path, attempt=Attempt(9, 0, 0))
    save(one, 10)
    save(other, 20)
    with pytest.raises(FencedError):
        save(one, 30)
    with pytest.raises(FencedError):  # not even as a rank that comes late
        Checkpoints(tmp_path, attempt=Attempt(20, 0, 0)).latest()
    assert save(Checkpoints(tmp_path, attempt=Attempt(20, 0, 1)), 30).name == "step-0000000030.a3"


def test_all_ranks_of_an_attempt_resume_from_the_same_checkpoint(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path, attempt=FIRST)
    save(first, 10)
    save(first, 20)
    ranks = [Checkpoints(tmp_path, attempt=SECOND) for _ in range(3)]
    assert {found.path for rank in ranks if (found := rank.latest())} == {tmp_path / "step-0000000020.a1"}
    assert len(list((tmp_path / "claims").iterdir())) == 2


def test_a_rank_that_finds_the_agreed_checkpoint_damaged_does_not_go_its_own_way(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path, attempt=FIRST)
    save(first, 10)
    agreed = save(first, 20)
    Checkpoints(tmp_path, attempt=SECOND).latest()
    truncate(agreed)
    with pytest.raises(CheckpointDamagedError, match=r"state\.bin has 7 bytes"):
        Checkpoints(tmp_path, attempt=SECOND).latest()
    found = Checkpoints(tmp_path, attempt=Attempt(17, 0, 2)).latest()
    assert found is not None
    assert found.step == 10


def test_outside_of_a_job_looking_disturbs_nobody_and_saving_takes_over(tmp_path: Path) -> None:
    job = Checkpoints(tmp_path, attempt=FIRST)
    save(job, 10)
    plain = Checkpoints(tmp_path)
    assert plain.latest() is not None
    save(job, 20)
    found = plain.latest()
    assert found is not None
    assert found.step == 20
    save(plain, 30)
    with pytest.raises(FencedError):
        save(job, 40)
    assert plain.latest() is not None
    other = Checkpoints(tmp_path)
    save(other, 40)
    with pytest.raises(FencedError):
        save(plain, 50)


def test_readonly_looks_from_within_a_job_without_claiming(tmp_path: Path) -> None:
    job = Checkpoints(tmp_path, attempt=FIRST)
    save(job, 10)
    viewer = Checkpoints(tmp_path, attempt=Attempt(99, 0, 0), readonly=True)
    assert viewer.latest() is not None
    with pytest.raises(CheckpointError, match="readonly=True"), viewer.save(step=1):
        pass
    save(job, 20)


def test_a_folder_of_copied_checkpoints_without_claims_is_taken_as_it_is(tmp_path: Path) -> None:
    original = save(Checkpoints(tmp_path / "a", attempt=FIRST), 10)
    shutil.copytree(original, tmp_path / "b" / original.name)
    for attempt in (None, SECOND):
        found = Checkpoints(tmp_path / "b", attempt=attempt).latest()
        assert found is not None
        assert found.step == 10


def test_the_attempt_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_ATTEMPT", "17.0.1")
    assert Checkpoints(tmp_path).attempt == SECOND


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    before = save(checkpoints, 10)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with (
            pytest.raises(CheckpointWriteError, match="No space left") as refused,
            checkpoints.save(step=20) as draft,
        ):
            (draft / "state.bin").write_bytes(b"x")
    assert "room" in refused.value.remedy
    assert names(tmp_path) == [before.name]
    save(checkpoints, 20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True, timeout=LIMIT_S)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True, timeout=LIMIT_S)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def test_a_disk_that_is_really_full_leaves_the_last_checkpoint_and_room_for_smaller_ones(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk, attempt=FIRST)
    before = save(checkpoints, 10)
    with pytest.raises(OSError, match="No space left"), checkpoints.save(step=20) as draft:
        (draft / "state.bin").write_bytes(b"x" * (1 << 20))
    # What the block writes fits, the manifest does not.
    with pytest.raises(CheckpointWriteError, match="No space left"), checkpoints.save(step=20) as draft:
        fill(draft / "state.bin")
    assert names(small_disk) == [before.name]
    save(checkpoints, 20)


def test_a_claim_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, attempt=FIRST), 10)
    (tmp_path / "claims" / "claim-0000000001" / "claim.json").write_text("{")
    with pytest.raises(ClaimDamagedError, match=r"claim-0000000001"):
        Checkpoints(tmp_path, attempt=SECOND).latest()


def test_two_ranks_saving_one_step_at_once_is_told(tmp_path: Path) -> None:
    one, other = Checkpoints(tmp_path, attempt=FIRST), Checkpoints(tmp_path, attempt=FIRST)
    with (
        pytest.raises(CheckpointError, match=r"10\.a1 was saved by another") as refused,
        one.save(step=10) as draft,
    ):
        (draft / "state.bin").write_bytes(b"x")
        save(other, 10)
    assert "one rank only" in refused.value.remedy


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": {1, 2}}])
def test_meta_that_is_not_json_is_refused_before_anything_is_written(
    tmp_path: Path, meta: dict[str, object]
) -> None:
    with (
        pytest.raises(CheckpointError, match="meta is not JSON"),
        Checkpoints(tmp_path, attempt=FIRST).save(step=1, meta=meta),
    ):
        raise AssertionError("the block must not be entered")
    assert names(tmp_path) == []


def test_a_link_or_a_file_with_the_manifests_name_cannot_be_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    with pytest.raises(ValueError, match="link cannot be part"), checkpoints.save(step=1) as draft:
        (draft / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"manifest\.json cannot be part"), checkpoints.save(step=1) as draft:
        (draft / "manifest.json").write_text("{}")
    assert names(tmp_path) == []


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    checkpoints = Checkpoints(tmp_path, attempt=FIRST, keep=1)
    save(checkpoints, 10)
    save(checkpoints, 20)
    assert names(tmp_path) == ["notes.txt", "step-0000000020.a1", "step-5"]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)
