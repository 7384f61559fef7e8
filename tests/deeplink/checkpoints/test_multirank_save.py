"""Checkpoints that several ranks write: whole with all parts, else not there."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typing_extensions import override

from deeplink.checkpoints import (
    Checkpoints,
    FencedError,
    NoStateError,
    NotFiniteError,
    SaveAbandonedError,
)
from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.manifest import CheckpointWriteError
from deeplink.checkpoints.multirank_save import FOLDER, Exchange, SaveGroup
from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)
SESSION = "5e55104a" * 4


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


def ranks(folder: Path, world: int, attempt: Attempt | None = FIRST, **options: Any) -> list[Checkpoints]:
    made = []
    for rank in range(world):
        checkpoints = Checkpoints(folder, attempt=attempt, **options)
        checkpoints._states.group, checkpoints._states.session = SaveGroup(rank, world), SESSION
        if attempt is None:
            checkpoints._hold.holder = SESSION
        made.append(checkpoints)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "claims")


def outcomes(group: list[Checkpoints]) -> list[DeepLinkError | None]:
    found: list[DeepLinkError | None] = []
    for rank in group:
        try:
            rank.close()
        except DeepLinkError as problem:
            found.append(problem)
        else:
            found.append(None)
    return found


@pytest.mark.parametrize("attempt", [FIRST, None])
def test_each_rank_writes_its_part_and_one_manifest_lists_them_all(
    tmp_path: Path, attempt: Attempt | None
) -> None:
    group = ranks(tmp_path, 3, attempt)
    for rank, checkpoints in enumerate(group):
        checkpoints.save_state({"mine": torch.full((rank + 1,), float(rank))}, step=4, spread="each")
    assert outcomes(group) == [None] * 3
    found = group[0].latest()
    assert found is not None
    assert found.world == 3
    listed = {entry.path for entry in manifests.check(found.path, contents=True).files}
    assert listed == {f"{kind}-{rank:05d}.pt" for kind in ("rank", "random") for rank in range(3)}
    assert names(tmp_path) == [found.path.name]
    assert found.load(rank=2)["mine"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(NoStateError, match="rank-00003"):
        found.load(rank=3)


def test_of_replicas_the_first_writes_the_state_and_all_their_random_numbers(tmp_path: Path) -> None:
    group = ranks(tmp_path, 2)
    for step in (1, 2):
        for checkpoints in group:
            checkpoints.save_state({"w": torch.ones(1) * step}, step=step, spread="first")
    assert outcomes(group) == [None, None]
    found = group[1].latest()
    assert found is not None
    assert sorted(path.name for path in found.path.glob("*.pt")) == [
        "random-00000.pt",
        "random-00001.pt",
        "state.pt",
    ]
    assert found.load()["w"].item() == 2
    assert len(names(tmp_path)) == 2


def test_a_rank_that_dies_leaves_no_checkpoint(tmp_path: Path) -> None:
    group = ranks(tmp_path, 3)
    for checkpoints in group:
        checkpoints.save_state({"w": torch.ones(1)}, step=1, spread="each")
    assert outcomes(group) == [None] * 3
    for checkpoints in group[:2]:  # the third is dead
        checkpoints._states.patience_s = 0.2
        checkpoints.save_state({"w": torch.ones(1)}, step=2, spread="each")
    missed = outcomes(group)[0]
    assert isinstance(missed, SaveAbandonedError)
    assert "nothing from rank 2 within" in str(missed)
    assert "must save the same steps" in missed.remedy
    assert names(tmp_path) == ["step-0000000001.a1"]


def test_a_rank_that_cannot_write_is_not_waited_for(tmp_path: Path) -> None:
    group = ranks(tmp_path, 3, finite="refuse")
    for rank, checkpoints in enumerate(group):
        bad = torch.tensor([float("nan") if rank == 1 else 1.0])
        checkpoints.save_state({"w": bad}, step=1, spread="each")
    first, second, third = outcomes(group)
    assert isinstance(first, SaveAbandonedError)
    assert "rank 1 failed: step 1 is not saved: w (nan)" in str(first)
    assert isinstance(second, NotFiniteError)
    # It may find the draft given up before it began, or gone under its hands.
    assert third is None or isinstance(third, SaveAbandonedError | CheckpointWriteError)
    assert list(tmp_path.glob("step-*")) == []
    for checkpoints in group:  # a rank that began late may have left a draft: the next save clears it away
        checkpoints.save_state({"w": torch.ones(1)}, step=2, spread="each")
    assert outcomes(group) == [None] * 3
    assert names(tmp_path) == ["step-0000000002.a1"]


def test_a_late_ranks_leavings_are_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = ranks(tmp_path, 1)[0]
    late, ahead = (tmp_path / f".draft-step-0000000001.a1-{SESSION[:12]}{count:06x}" for count in (1, 3))
    other = tmp_path / ".draft-step-0000000001.a1-00ff00ff00ff000001"
    for path in (late, ahead, other):
        path.mkdir()
    checkpoints._states._clear_before(tmp_path / f".draft-step-0000000002.a1-{SESSION[:12]}000002")
    assert names(tmp_path) == sorted([ahead.name, other.name])


def test_what_is_not_finite_on_any_rank_is_in_the_manifest(tmp_path: Path) -> None:
    group = ranks(tmp_path, 2)
    for rank, checkpoints in enumerate(group):
        checkpoints.save_state({f"w{rank}": torch.tensor([float("inf")])}, step=1, spread="each")
    assert outcomes(group) == [None, None]
    found = group[0].latest()
    assert found is not None
    assert found.nonfinite == {"w0": "inf", "w1": "inf"}


def test_ranks_of_an_older_attempt_are_refused(tmp_path: Path) -> None:
    old, new = ranks(tmp_path, 2), ranks(tmp_path, 2, SECOND)
    for checkpoints in old:
        checkpoints.save_state({"w": torch.ones(1)}, step=1, spread="each")
    assert outcomes(old) == [None, None]
    assert new[0].latest() is not None
    for checkpoints in old:
        checkpoints.save_state({"w": torch.ones(1)}, step=2, spread="each")
    assert all(isinstance(problem, FencedError) for problem in outcomes(old))
    for checkpoints in new:
        checkpoints.save_state({"w": torch.ones(1)}, step=2, spread="each")
    assert outcomes(new) == [None, None]
    assert names(tmp_path) == ["step-0000000001.a1", "step-0000000002.a2"]


def test_an_attempt_that_is_fenced_while_it_waits_for_its_ranks_gives_up(tmp_path: Path) -> None:
    checked = threading.Event()

    class Ticking(ManualClock):
        @override
        def sleep(self, seconds: float) -> None:
            self.now += 10.0

    def fenced() -> None:
        checked.set()
        raise FencedError(FIRST, SECOND, str(tmp_path))

    exchange = Exchange(tmp_path / "draft", SaveGroup(0, 2), Ticking(), fenced)
    with pytest.raises(FencedError), exchange:
        exchange.gather("done")
    assert checked.is_set()
    assert not exchange.draft.exists()


def test_who_comes_after_rank_0_gave_up_is_told(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path / "draft", SaveGroup(1, 2), ManualClock(), lambda: None)
    with pytest.raises(SaveAbandonedError, match="rank 0 gave up"), exchange:
        (exchange.draft / FOLDER).rmdir()
        exchange.draft.rmdir()
        exchange.put("done", b"")
    with pytest.raises(SaveAbandonedError, match="rank 0 gave up"):
        exchange.take("plans", of=0)


def test_ranks_tell_each_other_what_they_told_and_wait_for_it(tmp_path: Path) -> None:
    from deeplink.core.clock import SystemClock

    both = [Exchange(tmp_path / "draft", SaveGroup(rank, 2), SystemClock(), lambda: None) for rank in range(2)]
    with both[0], both[1], ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(exchange.gather, "plan") for exchange in both]
        both[1].put("plan", b"one")
        both[0].put("plan", b"zero")
        assert [future.result(30) for future in waiting] == [[b"zero", b"one"]] * 2


# -- real processes: torch.distributed.checkpoint over gloo, saved by two ranks and loaded by three


class Model:
    def __init__(self, weight: Any) -> None:
        self.weight, self.note = weight, "none"

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "replica": torch.ones(3), "note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.note = state["weight"], state["note"]


def distributed(rank: int, world: int, meeting: str, attempt: str) -> Any:
    """Set up a rank's process; return a sharded tensor of 0 to 63 and one of zeros."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "DEEPLINK_ATTEMPT": attempt}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(64.0).reshape(16, 4)
    return [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (full, torch.zeros(16, 4))]


def leave() -> None:
    """End a rank's process once all it had to show was shown.

    Not by the interpreter's own end: a thread of gloo's that still drops a tensor aborts the process then.
    """
    from torch import distributed as dist

    dist.destroy_process_group()
    os._exit(0)


def save_sharded(rank: int, world: int, meeting: str, folder: Path, attempt: str) -> None:
    whole, _ = distributed(rank, world, meeting, attempt)
    model = Model(whole)
    model.note = "saved"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save_state({"model": model}, step=1, spread="sharded")
        checkpoints.save_state({"model": model}, step=2, spread="sharded")
        model.note = "later"
    leave()


def load_sharded(rank: int, world: int, meeting: str, folder: Path, attempt: str) -> None:
    whole, zeros = distributed(rank, world, meeting, attempt)
    model = Model(zeros)
    found = Checkpoints(folder, lease_s=None).latest()
    assert found is not None
    assert (found.step, found.world) == (2, 2)
    with pytest.raises(NoStateError, match="sharded"):
        found.load()
    found.restore(rank=rank, model=model)
    assert torch.equal(model.weight.full_tensor(), whole.full_tensor())
    assert model.note == "saved"
    leave()


def run_ranks(target: Any, world: int, folder: Path, attempt: str) -> list[int | None]:
    spawn = multiprocessing.get_context("spawn")
    # Not over a port: a free one may be somebody else's a moment later.
    meeting = f"file://{folder.with_name(folder.name + target.__name__)}"
    processes = [
        spawn.Process(target=target, args=(rank, world, meeting, folder, attempt), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(3 * LIMIT_S)
    return [process.exitcode for process in processes]


@pytest.mark.slow
def test_sharded_tensors_saved_by_two_ranks_outside_of_a_job_are_loaded_by_three_in_one(tmp_path: Path) -> None:
    assert run_ranks(save_sharded, 2, tmp_path, "") == [0, 0]
    assert names(tmp_path) == ["step-0000000001.a1", "step-0000000002.a1"]
    assert run_ranks(load_sharded, 3, tmp_path, "9.0.1") == [0, 0, 0]


# -- a real older process


def older(folder: Path, spread: str, began: Event, go_on: Event) -> None:
    from deeplink.checkpoints import tensors

    write = tensors.write_state

    def slow(state: Any, path: Path) -> None:
        began.set()
        assert go_on.wait(LIMIT_S)
        write(state, path)

    tensors.write_state = slow
    checkpoints = Checkpoints(folder, attempt=FIRST)
    how: Any = spread
    checkpoints.save_state({"w": torch.zeros(8)}, step=50, spread=how)
    try:
        checkpoints.close()
    except FencedError:
        sys.exit(77)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["alone", "sharded"])
def test_a_real_older_process_cannot_publish_what_it_was_writing(tmp_path: Path, spread: str) -> None:
    with Checkpoints(tmp_path, attempt=FIRST) as before:
        before.save_state({"w": torch.ones(1)}, step=10)
    spawn = multiprocessing.get_context("spawn")
    began, go_on = spawn.Event(), spawn.Event()
    zombie = spawn.Process(target=older, args=(tmp_path, spread, began, go_on), daemon=True)
    zombie.start()
    assert began.wait(LIMIT_S)
    newer = Checkpoints(tmp_path, attempt=SECOND)
    found = newer.latest()
    assert found is not None
    assert found.step == 10
    go_on.set()
    zombie.join(LIMIT_S)
    assert zombie.exitcode == 77
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000010.a1"]
    with newer:
        newer.save_state({"w": torch.ones(1)}, step=11)
    assert names(tmp_path) == ["step-0000000010.a1", "step-0000000011.a2"]
