"""Saves that go to this node's disk first: copied to the shared folder under the fence, found after a restart."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed as dist
from typing_extensions import override

from deeplink.checkpoints import (
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    FencedError,
    StorageUnreadableError,
    mirror,
)
from deeplink.checkpoints.claims import APART_GAP, NO_CLAIM, fresh_names
from deeplink.checkpoints.mirror import UploadBarrier
from deeplink.checkpoints.ownership import FolderOwnership
from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints import trainings
from tests.deeplink.checkpoints.test_resuming import run
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST, SECOND, THIRD = Attempt(17, 0, 0), Attempt(17, 0, 1), Attempt(17, 0, 2)


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEEPLINK_ATTEMPT", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step=step) as draft:
        (draft / "deep").mkdir()
        (draft / "deep" / "state.bin").write_bytes(b"state" * step)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in folder.glob("step-*"))


def found_step(checkpoints: Checkpoints) -> tuple[int, Path] | None:
    found = checkpoints.latest()
    return None if found is None else (found.step, found.path.parent)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds copies to the shared folder up until it is set."""
    opened = threading.Event()
    copy = mirror.copy_entry

    def slow(source: Path, final: Path, check: Callable[[], None] = lambda: None, **more: Any) -> None:
        assert opened.wait(LIMIT_S)
        copy(source, final, check, **more)

    monkeypatch.setattr(mirror, "copy_entry", slow)
    yield opened
    opened.set()


def test_a_save_is_whole_here_at_once_and_there_soon(tmp_path: Path, held: threading.Event) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    checkpoints = Checkpoints(shared, attempt=FIRST, local=local)
    save(checkpoints, 1)
    assert (steps(local), steps(shared)) == ([1], [])
    assert found_step(checkpoints) == (1, local)
    held.set()
    checkpoints.close()
    assert (steps(local), steps(shared)) == ([1], [1])
    assert found_step(Checkpoints(shared, readonly=True)) == (1, shared)


def test_what_waits_to_be_copied_gives_way_to_what_is_newer(tmp_path: Path, held: threading.Event) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    checkpoints = Checkpoints(shared, attempt=FIRST, local=local, keep=5)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    held.set()
    checkpoints.close()
    assert steps(shared)[-1] == 4
    assert len(steps(shared)) <= 3
    assert steps(local) == [3, 4]  # the newest two


def test_a_zombies_copy_is_refused_before_it_appears(tmp_path: Path, held: threading.Event) -> None:
    shared = tmp_path / "shared"
    old = Checkpoints(shared, attempt=FIRST, local=tmp_path / "ssd0")
    save(old, 1)
    newer = Checkpoints(shared, attempt=SECOND, local=tmp_path / "ssd1")
    assert newer.latest() is None
    held.set()
    with pytest.raises(FencedError):
        old.close()
    assert steps(shared) == []
    with pytest.raises(FencedError):
        save(old, 2)
    # The same disk again, under the next attempt: what the fenced one left there alone does not count.
    third = Checkpoints(shared, attempt=THIRD, local=tmp_path / "ssd0")
    assert third.latest() is None
    save(third, 5)
    save(third, 6)
    third.close()
    assert steps(tmp_path / "ssd0") == [5, 6]


def test_a_restart_brings_in_what_this_node_alone_holds(
    tmp_path: Path, held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    first = Checkpoints(shared, attempt=FIRST, local=local)
    save(first, 7)  # and then it is killed, before the copy
    held.set()
    first.close()
    shutil.rmtree(shared / "step-0000000007.a1")
    again = Checkpoints(shared, attempt=SECOND, local=local)
    assert found_step(again) == (7, local)
    assert steps(shared) == [7]
    assert "was on this node alone" in caplog.text
    elsewhere = Checkpoints(shared, attempt=SECOND, local=tmp_path / "other")
    assert found_step(elsewhere) == (7, shared)


def test_a_damaged_local_copy_is_passed_over(tmp_path: Path) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    with Checkpoints(shared, attempt=FIRST, local=local) as first:
        save(first, 1)
        save(first, 2)
    (local / "step-0000000002.a1" / "deep" / "state.bin").write_bytes(b"statexxxxx")
    assert found_step(Checkpoints(shared, attempt=SECOND, local=local)) == (2, shared)
    shutil.rmtree(shared / "step-0000000002.a1")
    again = Checkpoints(shared, attempt=THIRD, local=local)
    with pytest.raises(Exception, match="is missing"):
        Checkpoints(shared, attempt=SECOND, local=local).latest()
    assert found_step(again) == (1, local)


def test_shared_storage_that_refuses_is_told_and_the_next_copy_may_do_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    checkpoints = Checkpoints(shared, attempt=FIRST, local=local)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(mirror, "copy_entry", full)
        save(checkpoints, 1)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            checkpoints.wait()
    assert found_step(checkpoints) == (1, local)
    save(checkpoints, 2)
    checkpoints.close()
    assert steps(shared) == [2]


def test_a_local_save_goes_on_while_the_shared_folder_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: threading.Event
) -> None:
    checkpoints = Checkpoints(tmp_path / "shared", attempt=FIRST, local=tmp_path / "ssd")
    checkpoints.latest()

    def silent() -> int:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints._hold.claims, "newest_number", silent)
        save(checkpoints, 1)
    assert steps(tmp_path / "ssd") == [1]
    held.set()
    checkpoints.close()
    assert steps(tmp_path / "shared") == [1]


def test_a_damaged_shared_copy_is_mended_by_the_nodes_own(tmp_path: Path) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    with Checkpoints(shared, attempt=FIRST, local=local) as first:
        save(first, 1)
    (shared / "step-0000000001.a1" / "deep" / "state.bin").write_bytes(b"STATE")  # as many bytes
    assert found_step(Checkpoints(shared, attempt=SECOND, local=local)) == (1, local)
    assert found_step(Checkpoints(shared, readonly=True)) == (1, shared)


def test_what_a_fenced_attempt_left_on_the_disk_is_not_brought_in(tmp_path: Path, held: threading.Event) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    old = Checkpoints(shared, attempt=FIRST, local=local)
    old.latest()
    other = Checkpoints(shared, attempt=SECOND, local=tmp_path / "other")
    assert other.latest() is None
    with pytest.MonkeyPatch.context() as blind:  # it cannot see that it is fenced
        blind.setattr(old._saver, "check", lambda: None)
        save(old, 3)
    assert steps(local) == [3]
    assert Checkpoints(shared, attempt=THIRD, local=local).latest() is None
    held.set()
    with pytest.raises(FencedError):
        old.close()
    assert steps(shared) == []


# -- the nodes of an attempt


def env(node: int, nodes: int, local_rank: int = 0) -> dict[str, str]:
    return {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes), "LOCAL_RANK": str(local_rank)}


def test_who_claims_waits_until_each_node_has_brought_in_what_it_has(tmp_path: Path) -> None:
    shared, clock = tmp_path / "shared", ManualClock()
    with Checkpoints(shared, attempt=FIRST) as first:
        save(first, 1)
        save(first, 2)
    shutil.move(shared / "step-0000000002.a1", tmp_path / "ssd1" / "step-0000000002.a1")
    hold = FolderOwnership(shared, SECOND, clock)
    newest = hold.claims.newest()

    class Late(ManualClock):
        @override
        def sleep(self, seconds: float) -> None:
            self.now += seconds
            if self.now > 1_001:  # the other node comes
                UploadBarrier(hold, tmp_path / "ssd1", env(1, 2), clock).wait(newest)

    clock.sleep(0)
    UploadBarrier(hold, tmp_path / "ssd0", env(0, 2), Late()).wait(newest)
    assert steps(shared) == [1, 2]
    assert hold.claimed().recognised[0] == "step-0000000002.a1"


def resumed_apart(rank: int, world: int, meeting: str, folder: Path) -> None:
    trainings.joined(rank, world, meeting)
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(world)}
    for name, attempt in {"alone": None, "attempt": SECOND}.items():
        model = torch.nn.Linear(1, 1)
        checkpoints = Checkpoints(folder / name, local=folder / f"ssd-{name}{rank}", attempt=attempt)
        found = checkpoints.resume(model=model)
        assert found is not None
        assert (found.step, model.bias.item()) == (2, 2.0)
        checkpoints.close()
    (folder / "file").touch()
    with pytest.raises(CheckpointError, match=r"nobody said which checkpoint .* rank 0: "):
        Checkpoints(folder / "file", local=folder / f"ssd{rank}").resume(model=torch.nn.Linear(1, 1))
    dist.destroy_process_group()


def test_a_whole_copy_that_another_process_made_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path / "here") as checkpoints:
        save(checkpoints, 1)
    source = next((tmp_path / "here").glob("step-*"))
    final = tmp_path / "shared" / source.name
    final.parent.mkdir()
    copied = mirror._copy_file

    def overtaken(*args: Any) -> Path:
        """While it copies, another process publishes the same."""
        monkeypatch.setattr(mirror, "_copy_file", copied)
        mirror.copy_entry(source, final)
        return copied(*args)

    monkeypatch.setattr(mirror, "_copy_file", overtaken)
    mirror.copy_entry(source, final)
    assert [path.name for path in final.parent.iterdir()] == [source.name]


def both(names: list[str], do: Callable[[str, Callable[[str], list[str]]], None]) -> list[str]:
    """Have ranks do something that gathers texts, each in a thread; return what they raised."""
    said, meeting, raised = dict.fromkeys(names, ""), threading.Barrier(len(names)), dict.fromkeys(names, "")

    def rank(name: str) -> None:
        def gathered(text: str) -> list[str]:
            said[name] = text
            meeting.wait(LIMIT_S)
            answers = list(said.values())
            meeting.wait(LIMIT_S)
            return answers

        try:
            do(name, gathered)
        except (DeepLinkError, threading.BrokenBarrierError) as problem:
            raised[name] = str(problem)

    threads = [threading.Thread(target=rank, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return list(raised.values())


def test_one_rank_of_those_on_a_disk_brings_in_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[Path] = []
    monkeypatch.setattr(mirror, "rescue", lambda local, *_: brought.append(local))

    def bring(name: str, gathered: Any) -> None:
        disk, rank = tmp_path / f"ssd{name[0]}", int(name[1])
        mirror.bring_together(disk, FolderOwnership(tmp_path / "shared", None, SystemClock()), rank, gathered)

    assert both(["a0", "a1", "b2", "b3"], bring) == [""] * 4
    assert sorted(brought) == [tmp_path / "ssda", tmp_path / "ssdb"]


def test_what_the_look_of_one_rank_raises_the_others_do_not_wait_for(tmp_path: Path) -> None:
    def resume(name: str, gathered: Any) -> None:
        checkpoints = Checkpoints(tmp_path / "shared", local=tmp_path / name)
        if name == "1":
            refused = StorageUnreadableError(tmp_path, OSError(5, "broken"), 60)
            checkpoints.latest = Mock(side_effect=refused)  # type: ignore[method-assign]
        checkpoints._found_together(tmp_path / name, int(name), gathered)

    other, own = both(["0", "1"], resume)
    assert "nobody said which checkpoint" in other
    assert "rank 1: " in other
    assert own
    assert "nobody said" not in own


@pytest.mark.slow
def test_without_agents_all_ranks_go_on_from_what_one_node_alone_has(tmp_path: Path) -> None:
    for name in ("alone", "attempt"):
        with Checkpoints(tmp_path / name, attempt=FIRST) as first:
            for step in (1, 2):
                state = {"weight": torch.ones(1, 1), "bias": torch.tensor([float(step)])}
                first.save_state({"model": state}, step=step)
        here = tmp_path / f"ssd-{name}1"
        here.mkdir(mode=0o700)
        shutil.move(tmp_path / name / "step-0000000002.a1", here / "step-0000000002.a1")
    run(resumed_apart, 2, tmp_path)


def test_a_claim_made_without_the_folder_is_put_there_by_two_threads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = FolderOwnership(tmp_path, FIRST, ManualClock())
    claim = hold.claim = dataclasses.replace(hold.claimed(), number=1 + APART_GAP)
    shutil.rmtree(hold.claims.folder)
    hold.is_apart = True
    look = hold.claims.newest_number

    def overtaken() -> int:
        """The copying thread looks, finds no claim, and is overtaken by the one that saves."""
        found = look()
        monkeypatch.setattr(hold.claims, "newest_number", look)
        hold.refuse_if_fenced()
        return found

    monkeypatch.setattr(hold.claims, "newest_number", overtaken)
    hold.refuse_if_fenced()
    assert hold.claims.newest() == claim


def test_a_node_that_never_comes_is_not_waited_for_longer_than_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    hold = FolderOwnership(tmp_path / "shared", FIRST, clock)
    hold.folder.mkdir()
    UploadBarrier(hold, tmp_path / "ssd", env(0, 3), clock).wait(NO_CLAIM)
    assert 60 <= clock.now - 1_000 < 62
    assert "2 of 3 nodes did not say" in caplog.text
    assert "offer-17.0.0-00000" in fresh_names(hold.claims.folder)


def test_what_nodes_of_earlier_attempts_said_at_their_meeting_goes(tmp_path: Path) -> None:
    hold, clock = FolderOwnership(tmp_path / "shared", SECOND, ManualClock()), ManualClock()
    hold.claims.folder.mkdir(parents=True)
    for name in (
        "offer-17.0.0-00000",
        "offer-17.0.2-00000",
        "offer-16.0.0-00000",
        "offer-17.0.1-00001",
        "offer-x",
    ):
        (hold.claims.folder / name).touch()
    UploadBarrier(hold, tmp_path / "ssd", env(0, 2), clock).wait(NO_CLAIM)
    left = sorted(fresh_names(hold.claims.folder))
    assert left == [
        "offer-16.0.0-00000",
        "offer-17.0.1-00000",
        "offer-17.0.1-00001",
        "offer-17.0.2-00000",
        "offer-x",
    ]


def test_the_other_ranks_of_a_node_wait_for_its_first_or_for_the_claim(tmp_path: Path) -> None:
    clock = ManualClock()
    hold, other = (
        FolderOwnership(tmp_path / "shared", FIRST, clock),
        FolderOwnership(tmp_path / "shared", FIRST, clock),
    )
    hold.folder.mkdir()
    other.claimed()
    UploadBarrier(hold, tmp_path / "ssd", env(0, 1, local_rank=3), clock).wait(NO_CLAIM)
    assert clock.now == 1_000
