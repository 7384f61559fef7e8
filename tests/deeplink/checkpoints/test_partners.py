"""Copies on a partner node's disk: who keeps them, and what a restart makes of them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from deeplink.agent import checkpoint_replicas
from deeplink.checkpoints import (
    CheckpointDamagedError,
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    FencedError,
    StorageSilentError,
    recovery_agreement,
)
from deeplink.checkpoints.agents import There, partners
from deeplink.checkpoints.claims import Claim, Claims, claim_of, claim_text
from deeplink.checkpoints.copies import FORGET_S, Copies, NoRoomError
from deeplink.checkpoints.manifest import FileEntry, Manifest, manifest_of, manifest_text
from deeplink.checkpoints.saving import withdraw_if_late
from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.config import Config
from deeplink.core.types import Attempt, Member, NodeName
from deeplink.v1 import keep_pb2
from tests.deeplink.checkpoints.nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.checkpoints import Checkpoint

FIRST, SECOND, THIRD = Attempt(17, 0, 0), Attempt(17, 0, 1), Attempt(17, 1, 0)
ALL = ["n0", "n1", "n2", "n3"]
DATA = b"the state of a model" * 1000


# -- who keeps them: pure


@given(
    domains=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    known=st.booleans(),
)
def test_everybody_keeps_for_one_and_where_it_can_be_in_another_domain(domains: list[int], *, known: bool) -> None:
    members = [
        Member(NodeName(f"n{number}"), f"h{number}:1", 1, f"leaf{domain}" if known else "")
        for number, domain in enumerate(domains)
    ]
    chosen = {member.name: partners(member.name, members) for member in members}
    for name, others in chosen.items():
        assert sorted(other.name for other in others) == sorted(one.name for one in members if one.name != name)
    if len(members) < 2:
        return
    firsts = [others[0].name for others in chosen.values()]
    assert len(set(firsts)) == len(members), "nobody keeps for two"
    largest = max(sum(one.domain == other.domain for one in members) for other in members)
    if 2 * largest <= len(members):
        assert all(others[0].domain != by.domain for by, others in zip(members, chosen.values(), strict=True))


def test_another_list_another_partner_and_the_order_of_the_list_does_not_matter() -> None:
    four = [Member(NodeName(name), f"{name}:1", 1, leaf) for name, leaf in zip("abcd", "xxyy", strict=True)]
    assert partners(NodeName("a"), four)[0].name == "c"
    assert partners(NodeName("a"), four[::-1]) == partners(NodeName("a"), four)
    assert partners(NodeName("a"), [one for one in four if one.name != "c"])[0].name == "d"


# -- what becomes of them


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path)
    yield job
    job.close()


def begun(nodes: Nodes, attempt: Attempt, node: str, among: list[str], **more: object) -> Checkpoints:
    """Return the checkpoints of a rank on a node, as its environment has it; the other nodes are spares."""
    spares = tuple(other for other in nodes.servers if other not in among)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.env(attempt, node, among, spares=spares).items():
            patch.setenv(name, value)
        options = {"lease_s": None, "local": nodes.local(node), **more}
        return Checkpoints(nodes.root / "shared", **options)  # type: ignore[arg-type]


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step=step) as draft:
        (draft / "deep").mkdir()
        (draft / "deep" / "state.bin").write_bytes(DATA + bytes([step]))


def restarted(nodes: Nodes, attempt: Attempt, among: list[str]) -> dict[str, Checkpoint | None]:
    """Return what each rank of an attempt finds, all of them at the same time."""
    ranks = {node: begun(nodes, attempt, node, among) for node in among}
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(Checkpoints.latest, ranks.values()), strict=True))


def lose(nodes: Nodes, *lost: str) -> None:
    """The machine is gone, and its disk."""
    for node in lost:
        nodes.stop(node)
        shutil.rmtree(nodes.root / node, ignore_errors=True)


def withhold(nodes: Nodes) -> None:
    """Shared storage cannot be used: its mount is gone, and a file is in its place."""
    shared = nodes.root / "shared"
    if shared.exists():
        shared.rename(nodes.root / "withheld")
    shared.write_text("not mounted")


def give_back(nodes: Nodes) -> None:
    (nodes.root / "shared").unlink()
    (nodes.root / "withheld").rename(nodes.root / "shared")


def test_a_save_is_on_a_partners_disk_soon_and_two_stay_there(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    for step in (1, 2, 3):
        save(checkpoints, step)
        checkpoints.wait()
    checkpoints.close()
    assert nodes.copies("n2") == ["from-n0/step-0000000002.a1", "from-n0/step-0000000003.a1"]
    assert not any(nodes.copies(node) for node in ("n0", "n1", "n3")), "n2 is on the other leaf, and first there"
    copy = next(nodes.store("n2").glob("checkpoints/*/from-n0/step-0000000003.a1"))
    assert (copy / "deep" / "state.bin").read_bytes() == DATA + b"\3"


def test_where_the_partner_is_dead_another_keeps_the_copy(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    assert checkpoints.latest() is None
    lose(nodes, "n2")
    save(checkpoints, 1)
    checkpoints.close()
    assert nodes.copies("n3") == ["from-n0/step-0000000001.a1"]


@pytest.mark.parametrize("is_withheld", [True, False], ids=["no shared storage", "older on shared storage"])
def test_a_node_dies_with_the_newest_checkpoint_and_its_copy_is_gone_on_from(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, *, is_withheld: bool
) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.wait()
    save(checkpoints, 2)
    checkpoints.close()
    shutil.rmtree(nodes.root / "shared" / "step-0000000002.a1")  # it did not get there in time
    if is_withheld:
        withhold(nodes)
    lose(nodes, "n0")
    caplog.set_level(logging.INFO)
    found = restarted(nodes, SECOND, ["n1", "n2", "n3"])
    for node, checkpoint in found.items():
        assert checkpoint is not None
        assert checkpoint.step == 2
        assert checkpoint.path.parent == nodes.local(node)
        assert (checkpoint.path / "deep" / "state.bin").read_bytes() == DATA + b"\2"
        assert checkpoint.origin == "n2's copy for n0" or "'s disk" in checkpoint.origin
    assert "on n2's copy for n0" in caplog.text
    assert ("cannot be used now" if is_withheld else "newer than all in the shared folder") in caplog.text


def test_without_shared_storage_the_job_goes_on_saves_and_restarts_and_then_it_is_made_up_for(
    nodes: Nodes,
) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.close()
    withhold(nodes)
    lose(nodes, "n0")
    survivors = ["n1", "n2", "n3"]
    found = restarted(nodes, SECOND, survivors)
    assert {one.step for one in found.values() if one} == {1}
    second = begun(nodes, SECOND, "n1", ["n1"])
    assert second.latest()
    save(second, 2)
    with pytest.raises(CheckpointWriteError):
        second.close()  # the copy to shared storage
    assert any("step-0000000002" in name for node in survivors for name in nodes.copies(node))
    # And once more, from what the second attempt left on disks.
    again = Attempt(17, 0, 2)
    found = restarted(nodes, again, survivors)
    assert {one.step for one in found.values() if one} == {2}
    give_back(nodes)
    third = begun(nodes, again, "n1", ["n1"])
    found_again = third.latest()
    assert found_again is not None
    assert found_again.step == 2
    save(third, 3)
    third.close()
    outside = Checkpoints(nodes.root / "shared", readonly=True).latest()
    assert outside is not None
    assert outside.step == 3
    # The first attempt is fenced in the shared folder, though its claim's number is the next to the newest there.
    with pytest.raises(FencedError):
        save(checkpoints, 9)


def test_a_torn_copy_is_passed_over_and_said(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.wait()
    save(checkpoints, 2)
    checkpoints.close()
    withhold(nodes)
    lose(nodes, "n0")
    torn = next(nodes.store("n2").glob("checkpoints/*/from-n0/step-0000000002.a1"))
    (torn / "deep" / "state.bin").write_bytes(b"x" * len(DATA + b"\2"))
    found = restarted(nodes, SECOND, ["n1", "n2", "n3"])
    assert {one.step for one in found.values() if one} == {1}
    skipped = next(one for one in found.values() if one).skipped
    assert [(one.path.name, one.reason) for one in skipped] == [
        ("step-0000000002.a1", "n2's copy for n0: deep/state.bin is not what was saved")
    ]
    assert "skipped" in caplog.text


def test_an_older_attempts_copy_is_refused_by_the_partner(nodes: Nodes) -> None:
    old = begun(nodes, FIRST, "n0", ["n0"])
    save(old, 1)
    old.wait()
    # The launcher told the agents that the next attempt has begun; the old rank does not know yet.
    for node in ("n1", "n2", "n3"):
        nodes.bulletins[node].learn(SECOND)
    save(old, 2)
    with pytest.raises(FencedError):
        old.close()
    assert nodes.copies("n2") == ["from-n0/step-0000000001.a1"]


def test_a_rank_is_refused_by_its_own_agent_while_shared_storage_does_not_answer(nodes: Nodes) -> None:
    old = begun(nodes, FIRST, "n0", ["n0"])
    save(old, 1)
    old.wait()
    withhold(nodes)
    nodes.bulletins["n0"].learn(SECOND)
    with pytest.raises(FencedError):
        save(old, 2)
    assert [path.name for path in nodes.local("n0").glob("step-*")] == ["step-0000000001.a1"]


def test_what_was_published_late_is_taken_back_unless_the_newer_attempt_goes_on_from_it(nodes: Nodes) -> None:
    old = begun(nodes, FIRST, "n0", ["n0"])
    save(old, 1)
    old.wait()
    step, local = "step-0000000002.a1", nodes.local("n0")

    def stood_still(name: str) -> bool:
        """The old rank published this, stood still, and now looks whether it may; tell whether it stays."""
        with pytest.raises(FencedError):
            withdraw_if_late(local / name, old._hold, old._saver.check)
        return (local / name).exists()

    save(old, 2)
    old.wait()
    for node in ALL:
        nodes.bulletins[node].learn(SECOND)
    assert stood_still(step), "a newer attempt has begun, and may go on from it: it has not claimed yet"
    withhold(nodes)
    shutil.rmtree(next(nodes.store("n2").glob(f"checkpoints/*/from-n0/{step}")))
    found = restarted(nodes, SECOND, ["n1", "n0"])["n1"]
    assert found is not None
    assert (found.step, found.origin) == (2, "n0's disk")
    # Its claim lies with the agents alone.
    shutil.copytree(local / step, local / "step-0000000003.a1")
    assert not stood_still("step-0000000003.a1"), "on no list"
    give_back(nodes)
    assert stood_still(step), "the shared folder answers again, and knows of no claim but the old one"
    assert not list(local.glob(".draft*"))


def test_what_the_old_attempt_removes_while_the_nodes_agree_is_not_what_they_go_on_from(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, shared = begun(nodes, FIRST, "n0", ["n0"]), nodes.root / "shared"
    for step in (1, 2):
        save(old, step)
        old.wait()
    first, second = (shared / f"step-000000000{step}.a1" for step in (1, 2))
    second.rename(nodes.root / second.name)
    shutil.rmtree(nodes.local("n0"))
    for copies in nodes.root.glob("*/store/checkpoints/*/from-*"):
        shutil.rmtree(copies)
    publish = Claims.publish

    def saved_once_more(claims: Claims, claim: Claim) -> bool:
        if claims.folder.is_relative_to(shared) and first.exists():
            (nodes.root / second.name).rename(second)
            shutil.rmtree(first)
        return publish(claims, claim)

    monkeypatch.setattr(Claims, "publish", saved_once_more)
    found = restarted(nodes, SECOND, ["n0"])["n0"]
    assert found is not None
    assert found.step == 2
    assert restarted(nodes, SECOND, ["n0"])["n0"] == found


@pytest.mark.parametrize("listed", [None, True, False])
def test_a_copy_published_late_is_taken_back_unless_the_newer_attempt_may_go_on_from_it(
    tmp_path: Path, listed: bool | None
) -> None:
    copies, run, name = Copies(tmp_path), "0" * 32, "step-0000000001.a1"
    own = Claim(number=1, attempt=FIRST, holder="old", recognised=(), skipped=(), created_unix=0.0)
    names = (name,) if listed else ()
    newer = Claim(number=2, attempt=SECOND, holder="new", recognised=names, skipped=(), created_unix=0.0)
    manifest = Manifest(step=1, attempt=str(FIRST), claim=1, created_unix=0.0, files=(), meta={})
    there = There("n0", "h0:1", name, "own", manifest, manifest_text(manifest), frozenset())
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) > 1:  # this process stood still before the rename
            if listed is not None:  # else the newer attempt has begun, and has not claimed yet
                copies.learn(run, newer)
            raise FencedError(FIRST, SECOND, "job 17")

    copies.learn(run, own)
    with pytest.raises(FencedError):
        copies.keep(run, there, own, lambda _files, _into: None, check)
    kept = [path.name for path in tmp_path.glob(f"{run}/from-n0/*")]
    assert kept == ([] if listed is False else [name])


def test_what_does_not_fit_is_not_kept_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Nodes(tmp_path, config=Config(copies_bytes=len(DATA) // 2))
    checkpoints = begun(job, FIRST, "n0", ["n0"])
    for step in (1, 2):
        save(checkpoints, step)
        checkpoints.wait()
    checkpoints.close()
    job.close()
    assert not any(job.copies(node) for node in ALL)
    assert caplog.text.count("is on no other node") == 1
    assert Checkpoints(tmp_path / "shared", readonly=True).latest()


def there_is(step: int) -> There:
    """Return a checkpoint on n0: one file with `DATA`."""
    entry = FileEntry("state.bin", len(DATA), xxhash.xxh3_64_hexdigest(DATA))
    manifest = Manifest(step=step, attempt=str(FIRST), claim=1, created_unix=0.0, files=(entry,), meta={})
    name = f"step-{step:010d}.a1"
    return There("n0", "h0:1", name, "own", manifest, manifest_text(manifest), frozenset())


def test_the_newest_copy_of_another_job_stays_until_nobody_comes_back_to_it(tmp_path: Path) -> None:
    """Two jobs of one user share a node; or one waits in the queue, and what it goes on from lies here alone."""
    waiting, at_work = "a" * 32, "b" * 32
    copies = Copies(tmp_path / "checkpoints", int(len(DATA) * 2.7))
    claim = Claim(number=1, attempt=FIRST, holder="h", recognised=(), skipped=(), created_unix=0.0)

    def keep(run: str, step: int) -> None:
        def fetch(_files: object, into: Path) -> None:
            (into / "state.bin").write_bytes(DATA)

        copies.keep(run, there_is(step), claim, fetch, lambda: None)

    def kept(run: str) -> list[str]:
        return sorted(path.name for path in copies.root.glob(f"{run}/from-n0/step-*"))

    for step in (1, 2):
        keep(waiting, step)
    keep(at_work, 1)
    assert kept(waiting) == ["step-0000000002.a1"], "what is superseded gives way"
    with pytest.raises(NoRoomError, match="do not fit"):
        keep(at_work, 2)
    assert kept(waiting) == ["step-0000000002.a1"]
    assert kept(at_work) == ["step-0000000001.a1"]
    long_ago = time.time() - FORGET_S - 60
    for path in (copies.root / waiting, copies.root / waiting / "from-n0"):
        os.utime(path, (long_ago, long_ago))
    keep(at_work, 2)
    assert kept(waiting) == []
    assert kept(at_work) == ["step-0000000001.a1", "step-0000000002.a1"]


def test_room_for_one_copy_alone_keeps_the_newest(tmp_path: Path) -> None:
    job = Nodes(tmp_path, config=Config(copies_bytes=int(len(DATA) * 2.5)))
    checkpoints = begun(job, FIRST, "n0", ["n0"])
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
        checkpoints.wait()
    checkpoints.close()
    kept = job.copies("n2")
    job.close()
    assert "from-n0/step-0000000004.a1" in kept
    assert len(kept) <= 2


def test_an_agent_that_began_anew_knows_what_its_disk_has(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 5)
    checkpoints.close()
    shutil.rmtree(nodes.root / "shared")
    lose(nodes, "n0")
    nodes.stop("n2")
    nodes.start("n2")
    nodes.stop("n1")
    nodes.start("n1")
    found = restarted(nodes, THIRD, ["n1", "n2", "n3"])
    assert {one.step for one in found.values() if one} == {5}


def test_the_agents_folders_hold_nothing_of_others(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.close()
    secret = nodes.root / "secret"
    secret.write_text("not a checkpoint's")
    from deeplink.checkpoints.agents import run_of

    copies = Copies(nodes.store("n2") / "checkpoints")
    run = run_of(nodes.root / "shared")
    with copies.open(run, "step-0000000001.a1", "from-n0", "deep/state.bin") as file:
        assert file.read() == DATA + b"\1"
    for name, origin, path in [
        ("step-0000000001.a1", "from-n0", "../../../../../secret"),
        ("step-0000000001.a1", "../..", "deep/state.bin"),
        ("..", "from-n0", "secret"),
        ("step-0000000001.a1", "from-n0", "manifest.json"),
    ]:
        with pytest.raises(LookupError, match="names nothing here"):
            copies.open(run, name, origin, path)
    with pytest.raises(LookupError, match="names nothing here"):
        copies.open("../" + run, "step-0000000001.a1", "from-n0", "deep/state.bin")
    state = nodes.store("n2") / "checkpoints" / run / "from-n0" / "step-0000000001.a1" / "deep" / "state.bin"
    state.unlink()
    state.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        copies.open(run, "step-0000000001.a1", "from-n0", "deep/state.bin")
    assert not nodes.store("n1").exists(), "an agent writes nothing where it keeps nothing"


def test_what_is_kept_for_others_is_its_users_alone(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.close()
    kept = nodes.store("n2") / "checkpoints"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


@pytest.mark.parametrize("path", ["../../outside", "/tmp/outside", "deep//x", "deep/./x", "", "x\0y"])
def test_a_manifest_of_another_node_names_nothing_outside_of_its_checkpoint(tmp_path: Path, path: str) -> None:
    manifest = Manifest(
        step=1,
        attempt="",
        claim=1,
        created_unix=0.0,
        files=(FileEntry("deep/state.bin", 1, "0" * 16), FileEntry(path, 1, "0" * 16)),
        meta={},
    )
    with pytest.raises(CheckpointDamagedError, match="outside of it"):
        manifest_of(manifest_text(manifest), tmp_path)


def test_a_claim_of_another_node_names_checkpoints_alone() -> None:
    claim = Claim(number=1, attempt=FIRST, holder="h", recognised=("../x",), skipped=(), created_unix=0.0)
    with pytest.raises(ValueError, match="no checkpoint's name"):
        claim_of(claim_text(claim))


def test_a_disk_that_fills_in_the_middle_of_a_copy_is_left_as_it_was(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.wait()
    before = {node: nodes.copies(node) for node in ("n1", "n2", "n3")}
    assert sum(map(len, before.values())) == 1

    def full(_there: object, _files: object, into: Path, **_more: object) -> None:
        (into / "half").write_bytes(b"x" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_replicas, "fetch_files", full)
    save(checkpoints, 2)
    checkpoints.close()
    assert {node: nodes.copies(node) for node in before} == before
    assert not list(nodes.root.glob("*/store/checkpoints/**/.draft*"))


def test_a_copy_that_no_thread_could_be_begun_for_is_taken_when_asked_for_again(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    keeper = checkpoint_replicas.KeepServicer(
        NodeName("n1"), copies, "token", lambda attempt: attempt, clock=SystemClock(), bytes_per_s=1e9
    )
    request = keep_pb2.TakeRequest(run="0" * 32, name="step-0000000001.a1", node="n0", source="127.0.0.1:1")
    before = threading.stack_size(1 << 46)  # no machine has so much room for one
    try:
        with pytest.raises(RuntimeError, match="thread"):
            next(keeper.Take(request, None))  # type: ignore[arg-type]
    finally:
        threading.stack_size(before)
    said = list(keeper.Take(request, None))  # type: ignore[arg-type]
    assert said[-1].outcome == keep_pb2.TAKE_OUTCOME_FAILED, "and not under way for ever"


def test_a_shared_folder_that_stands_still_while_an_attempts_own_checkpoints_are_looked_at_is_given_up(
    nodes: Nodes,
) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.wait()
    shutil.rmtree(nodes.local("n0") / "step-0000000001.a1")
    pipe = nodes.root / "shared" / "step-0000000001.a1" / "manifest.json"  # holds up whoever reads it
    pipe.unlink()
    os.mkfifo(pipe)
    checkpoints._hold._looking.patience_s = 0.3
    try:
        with pytest.raises(StorageSilentError):
            checkpoints.latest()
    finally:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def test_copies_of_a_run_that_was_still_for_long_are_forgotten_and_no_others(tmp_path: Path) -> None:
    clock = ManualClock()
    copies, now = Copies(tmp_path / "checkpoints", clock=clock), clock.unix()
    still, at_work = "a" * 32, "b" * 32
    for run, age_s in [(still, FORGET_S + 60), (at_work, FORGET_S - 60)]:
        kept = copies.root / run / "from-n0"
        kept.mkdir(parents=True)
        (kept / "step-0000000001.a1").mkdir()
        for path in (kept, kept.parent):
            os.utime(path, (now - age_s, now - age_s))
    (copies.root / "not-a-run").mkdir()
    copies.forget()
    assert sorted(path.name for path in copies.root.iterdir()) == [at_work, "not-a-run"]


def test_a_node_whose_ranks_are_silent_is_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery_agreement, "GATHER_S", 0.2)
    assert begun(nodes, FIRST, "n0", ["n0", "n1"]).latest() is None
    assert "n1 did not say within 0.2 s where checkpoints lie" in caplog.text


def test_ranks_that_all_take_themselves_for_the_first_agree_without_shared_storage(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.close()
    withhold(nodes)
    ranks = []
    for node in ("n0", "n1", "n2"):
        env = nodes.env(SECOND, node, ["n0", "n1", "n2"], spares=("n3",))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                if name not in {"RANK", "GROUP_RANK", "LOCAL_RANK"}:
                    patch.setenv(name, value)
            ranks.append(Checkpoints(nodes.root / "shared", local=nodes.local(node), lease_s=None))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(Checkpoints.latest, ranks))
    assert {one.step for one in found if one} == {1}
    assert len({rank._hold.claimed().holder for rank in ranks}) == 1


def test_a_node_whose_disk_refuses_agrees_all_the_same(nodes: Nodes) -> None:
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.close()
    nodes.store("n1").parent.mkdir(exist_ok=True)
    nodes.store("n1").write_text("no folder can be made here")
    found = restarted(nodes, SECOND, ["n1", "n3"])
    assert {one.step for one in found.values() if one} == {1}


@pytest.mark.parametrize("attempt", [Attempt(17, 1, 0), Attempt(18, 0, 0)], ids=["requeued", "another job"])
def test_nodes_that_may_have_missed_newer_ones_do_not_decide_without_shared_storage(
    nodes: Nodes, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_agreement, "PERSIST_S", 1.0)
    checkpoints = begun(nodes, FIRST, "n0", ["n0"])
    save(checkpoints, 1)
    checkpoints.close()
    withhold(nodes)
    with pytest.raises(CheckpointError, match="may have newer ones"):
        begun(nodes, attempt, "n1", ["n1"]).latest()
    give_back(nodes)
    found = begun(nodes, attempt, "n1", ["n1"]).latest()
    assert found is not None
    assert found.step == 1
