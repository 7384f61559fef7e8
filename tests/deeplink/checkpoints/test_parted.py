"""Saves of several ranks that go to their nodes' own disks first: in parts, copied to partners and shared."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deeplink.checkpoints import Checkpoints, SaveAbandonedError, inspection, multirank_save
from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.multirank_save import Board, SaveGroup
from deeplink.checkpoints.saving import Saver
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from deeplink.rpc.plain import PlainSilentError
from tests.deeplink.checkpoints.nodes import Nodes
from tests.deeplink.checkpoints.test_multirank_save import Model, distributed, leave
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.checkpoints import Checkpoint

FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)
ALL = ["n0", "n1", "n2", "n3"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path)
    yield job
    job.close()


def begun(nodes: Nodes, attempt: Attempt, among: list[str], **more: Any) -> list[Checkpoints]:
    """Return the checkpoints of one rank on each node."""
    spares = tuple(other for other in nodes.servers if other not in among)
    made = []
    for rank, node in enumerate(among):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in nodes.env(attempt, node, among, spares=spares).items():
                patch.setenv(name, value)
            checkpoints = Checkpoints(nodes.root / "shared", local=nodes.local(node), lease_s=None, **more)
        checkpoints._states.group, checkpoints._states.session = SaveGroup(rank, len(among)), "5e55104a" * 4
        made.append(checkpoints)
    return made


def side_by_side(work: Any, ranks: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def latest(ranks: list[Checkpoints]) -> list[Checkpoint | None]:
    return side_by_side(Checkpoints.latest, ranks)


def saved(ranks: list[Checkpoints], step: int, spread: Any = "each") -> None:
    for rank, checkpoints in enumerate(ranks):
        state = {"mine": torch.full((1000,), float(step * 10 + rank))}
        checkpoints.save_state(state, step=step, spread=spread)
    side_by_side(lambda checkpoints: checkpoints._states.background.wait(), ranks)


def lose(nodes: Nodes, *lost: str) -> None:
    for node in lost:
        nodes.stop(node)
        shutil.rmtree(nodes.root / node, ignore_errors=True)


def withhold(nodes: Nodes) -> None:
    (nodes.root / "shared").rename(nodes.root / "withheld")
    (nodes.root / "shared").write_text("not mounted")


def close(ranks: list[Checkpoints]) -> None:
    side_by_side(Checkpoints.close, ranks)


def test_each_nodes_part_lies_on_its_disk_at_its_partner_and_all_in_the_shared_folder(nodes: Nodes) -> None:
    ranks = begun(nodes, FIRST, ALL)
    assert latest(ranks) == [None] * 4
    saved(ranks, 1)
    name = "step-0000000001.a1"
    for rank, node in enumerate(ALL):
        here = nodes.local(node) / name
        assert sorted(path.name for path in here.glob("*.pt")) == [f"random-{rank:05d}.pt", f"rank-{rank:05d}.pt"]
        assert len(manifests.check_part(here, contents=True).files) == 8
    close(ranks)
    assert {node: nodes.copies(node) for node in ALL} == {
        "n2": [f"from-n0/{name}"],
        "n3": [f"from-n1/{name}"],
        "n0": [f"from-n2/{name}"],
        "n1": [f"from-n3/{name}"],
    }
    (part,) = inspection.look(nodes.local("n1"), inspection.chosen(nodes.local("n1")), contents=True)
    assert (part.state, part.reason) == (inspection.CheckpointState.WHOLE, "2 of 8 files, a node's part")
    outside = Checkpoints(nodes.root / "shared", readonly=True).latest()
    assert outside is not None
    assert len(manifests.check(outside.path, contents=True).files) == 8
    assert outside.load(rank=2)["mine"][0] == 12
    assert not list((nodes.root / "shared").glob(".draft*"))


@pytest.mark.parametrize("is_withheld", [True, False], ids=["without shared storage", "with shared storage"])
def test_a_node_dies_and_its_part_is_had_from_its_partner(nodes: Nodes, *, is_withheld: bool) -> None:
    ranks = begun(nodes, FIRST, ALL)
    latest(ranks)
    for step in (1, 2, 3):
        saved(ranks, step)
    close(ranks)
    if is_withheld:
        withhold(nodes)
    else:
        shutil.rmtree(nodes.root / "shared" / "step-0000000003.a1")
    lose(nodes, "n1")
    again = begun(nodes, SECOND, ["n2", "n0", "n3"])  # another order, and another world
    found = latest(again)
    for rank, checkpoint in enumerate(found):
        assert checkpoint is not None
        assert checkpoint.step == 3
        assert checkpoint.load(rank=rank)["mine"].tolist() == [30.0 + rank] * 1000
    assert found[1] is not None
    assert found[1].load(rank=3)["mine"][0] == 33
    if is_withheld:
        (nodes.root / "shared").unlink()
        (nodes.root / "withheld").rename(nodes.root / "shared")
    for checkpoints in again:
        checkpoints._states.session = "11e55104" * 4
    saved(again, 4)
    close(again)
    outside = Checkpoints(nodes.root / "shared", readonly=True).latest()
    assert outside is not None
    assert outside.step == 4


def test_rank_0s_state_and_all_random_numbers_of_a_data_parallel_job(nodes: Nodes) -> None:
    ranks = begun(nodes, FIRST, ALL)
    latest(ranks)
    saved(ranks, 5, "first")
    close(ranks)
    withhold(nodes)
    lose(nodes, "n0")
    found = latest(begun(nodes, SECOND, ["n1", "n2", "n3"]))
    for node, checkpoint in zip(["n1", "n2", "n3"], found, strict=True):
        assert checkpoint is not None
        assert checkpoint.path.parent == nodes.local(node)
        assert checkpoint.load()["mine"][0] == 50
        assert (checkpoint.path / "random-00000.pt").exists()


def test_two_nodes_die_a_node_and_its_partner_and_the_step_before_is_gone_back_to(nodes: Nodes) -> None:
    ranks = begun(nodes, FIRST, ALL)
    latest(ranks)
    for step in (1, 2):
        saved(ranks, step)
        side_by_side(Checkpoints.wait, ranks)
    close(ranks)
    shutil.rmtree(nodes.root / "shared" / "step-0000000002.a1")
    lose(nodes, "n0", "n2")
    (found, other) = latest(begun(nodes, SECOND, ["n1", "n3"]))
    assert found is not None
    assert other is not None
    assert found.step == other.step == 1
    assert [(one.path.name, one.reason) for one in found.skipped] == [
        ("step-0000000002.a1", "parts of it are on no node that answers")
    ]
    assert found.load(rank=0)["mine"][0] == 10


def test_a_rank_that_dies_leaves_no_part_anywhere(nodes: Nodes) -> None:
    ranks = begun(nodes, FIRST, ALL)
    latest(ranks)
    saved(ranks, 1)
    problems = []
    for rank, checkpoints in enumerate(ranks[:3]):  # the fourth is dead
        # Rank 0 misses the dead one; the others hear so from it, however busy the machine is.
        checkpoints._states.patience_s = 5.0 if rank == 0 else 60.0
        checkpoints.save_state({"mine": torch.full((10,), float(rank))}, step=2, spread="each")
    for checkpoints in ranks[:3]:
        try:
            checkpoints._states.background.wait()
        except DeepLinkError as problem:
            problems.append(problem)
    assert len(problems) == 3
    assert any("nothing from rank 3 within" in str(problem) for problem in problems)
    assert all(isinstance(problem, SaveAbandonedError) for problem in problems)
    for node in ALL:
        assert [path.name for path in nodes.local(node).iterdir()] == ["step-0000000001.a1"]
    close(ranks)


def test_a_part_stays_where_a_node_does_not_hear_that_all_are_there(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, is_told = begun(nodes, FIRST, ALL, keep=1), threading.Event()
    latest(ranks)
    saved(ranks, 1)
    side_by_side(Checkpoints.wait, ranks)
    withhold(nodes)
    take = Board.take

    def took_late(board: Board, kind: str, *, of: int) -> bytes:
        if kind == "whole" and board.group.rank == 3:
            assert is_told.wait(LIMIT_S)
        return take(board, kind, of=of)

    monkeypatch.setattr(Board, "take", took_late)
    monkeypatch.setattr(multirank_save, "_RETRY_S", 0.0)
    for rank, checkpoints in enumerate(ranks):
        checkpoints.save_state({"mine": torch.full((10,), 20.0 + rank)}, step=2, spread="each")
    for checkpoints in ranks[:3]:
        checkpoints._states.background.wait()
    assert [path.name for path in nodes.local("n0").glob("step-*")] == ["step-0000000002.a1"]
    nodes.stop("n0")
    is_told.set()
    with pytest.raises(PlainSilentError):
        ranks[3]._states.background.wait()
    nodes.start("n0")
    found = latest(begun(nodes, SECOND, ALL))
    assert [one and one.load(rank=rank)["mine"][0] for rank, one in enumerate(found)] == [20, 21, 22, 23]


def test_parts_are_taken_back_where_a_rank_could_not_publish_its_own(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = begun(nodes, FIRST, ALL)
    latest(ranks)
    saved(ranks, 1)
    publish = Saver.publish_part

    def published(saver: Saver, draft: Path, final: Path, text: str) -> None:
        if saver.folder == nodes.local("n3"):
            until(lambda: all((nodes.local(node) / final.name).exists() for node in ALL[:3]), LIMIT_S)
            raise OSError(errno.EIO, "a disk that fails")
        publish(saver, draft, final, text)

    monkeypatch.setattr(Saver, "publish_part", published)
    for checkpoints in ranks:
        checkpoints.save_state({"mine": torch.zeros(10)}, step=2, spread="each")
    for checkpoints in ranks:
        with pytest.raises(DeepLinkError, match="a disk that fails"):
            checkpoints._states.background.wait()
    for node in ALL:
        assert [path.name for path in nodes.local(node).iterdir()] == ["step-0000000001.a1"]
    close(ranks)


def test_a_torn_part_is_had_from_the_partner_and_a_torn_copy_besides_is_passed_over(nodes: Nodes) -> None:
    ranks = begun(nodes, FIRST, ALL)
    latest(ranks)
    for step in (1, 2):
        saved(ranks, step)
        side_by_side(Checkpoints.wait, ranks)
    close(ranks)
    withhold(nodes)
    part = nodes.local("n1") / "step-0000000002.a1" / "rank-00001.pt"
    part.write_bytes(b"x" * part.stat().st_size)
    found = latest(begun(nodes, SECOND, ALL))
    assert {one.step for one in found if one} == {2}
    assert found[1] is not None
    assert found[1].load(rank=1)["mine"][0] == 21
    assert "n1's disk: rank-00001.pt is not what was saved" in {one.reason for one in found[1].skipped}
    part.write_bytes(b"x" * part.stat().st_size)
    copy = next(nodes.store("n3").glob("checkpoints/*/from-n1/step-0000000002.a1/rank-00001.pt"))
    copy.write_bytes(b"y" * copy.stat().st_size)
    found = latest(begun(nodes, Attempt(17, 0, 2), ALL))
    assert {one.step for one in found if one} == {1}


# -- real processes: torch.distributed.checkpoint over gloo


def save_sharded(rank: int, world: int, meeting: str, folder: Path, env: dict[str, str]) -> None:
    os.environ |= env
    whole, _ = distributed(rank, world, meeting, env["DEEPLINK_ATTEMPT"])
    model = Model(whole)
    model.note = "saved"
    with Checkpoints(folder / "shared", local=folder / env["DEEPLINK_NODE"] / "run", lease_s=None) as checkpoints:
        checkpoints.latest()
        checkpoints.save_state({"model": model}, step=1, spread="sharded")
    leave()


def load_sharded(rank: int, world: int, meeting: str, folder: Path, env: dict[str, str]) -> None:
    os.environ |= env
    whole, zeros = distributed(rank, world, meeting, env["DEEPLINK_ATTEMPT"])
    model = Model(zeros)
    found = Checkpoints(folder / "shared", local=folder / env["DEEPLINK_NODE"] / "run", lease_s=None).latest()
    assert found is not None
    assert (found.step, found.world) == (1, 2)
    found.restore(rank=rank, model=model)
    assert torch.equal(model.weight.full_tensor(), whole.full_tensor())
    assert model.note == "saved"
    leave()


def run_ranks(target: Any, nodes: Nodes, among: list[str], attempt: Attempt) -> list[int | None]:
    spawn = multiprocessing.get_context("spawn")
    meeting = f"file://{nodes.root}/{target.__name__}"
    spares = tuple(other for other in nodes.servers if other not in among)
    processes = [
        spawn.Process(
            target=target,
            args=(rank, len(among), meeting, nodes.root, nodes.env(attempt, node, among, spares=spares)),
            daemon=True,
        )
        for rank, node in enumerate(among)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(3 * LIMIT_S)
    return [process.exitcode for process in processes]


@pytest.mark.slow
def test_sharded_tensors_of_two_nodes_are_loaded_by_three_others_from_copies_alone(nodes: Nodes) -> None:
    assert run_ranks(save_sharded, nodes, ["n0", "n1"], FIRST) == [0, 0]
    part = nodes.local("n1") / "step-0000000001.a1"
    assert len(list(part.glob("*.distcp"))) == 1
    withhold(nodes)
    lose(nodes, "n0")
    assert run_ranks(load_sharded, nodes, ["n3", "n2", "n1"], SECOND) == [0, 0, 0]
