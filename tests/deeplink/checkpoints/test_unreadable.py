"""Storage that refuses for a while, damaged checkpoints, folders that vanish: nothing whole is ever lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from deeplink.checkpoints import (
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    ClaimDamagedError,
    FencedError,
    FolderGoneError,
    NothingWholeError,
    StorageUnreadableError,
    ownership,
    recovery_agreement,
)
from deeplink.checkpoints.claims import Retention
from deeplink.checkpoints.copies import FORGET_S, Copies, NoRoomError
from deeplink.checkpoints.saving import tidy
from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from deeplink.scheduler.recovery.rank_failure import Clue, hints_in
from tests.deeplink.checkpoints.faults import REFUSALS, refusing
from tests.deeplink.checkpoints.nodes import Nodes
from tests.deeplink.checkpoints.test_partners import begun, restarted
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST, SECOND, THIRD = Attempt(17, 0, 0), Attempt(17, 0, 1), Attempt(17, 0, 2)


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEEPLINK_ATTEMPT", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@dataclass(slots=True)
class EventfulClock(ManualClock):
    """A clock on which something happens when `seconds` have been waited."""

    after_s: float = 0.0
    happens: Callable[[], None] = field(default=lambda: None)

    @override
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.after_s -= seconds
        if self.after_s <= 0:
            self.happens()


def save(checkpoints: Checkpoints, step: int) -> Path:
    with checkpoints.save(step=step) as draft:
        (draft / "state.bin").write_bytes(b"state" * step)
    return checkpoints.folder / f"step-{step:010d}.a{checkpoints._hold.claimed().number}"


def tear(path: Path) -> None:
    os.truncate(path / "state.bin", 3)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in folder.glob("step-*"))


def set_aside(folder: Path) -> list[str]:
    return sorted(path.name[len(".damaged-") :].rpartition("-")[0] for path in folder.glob(".damaged-*"))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder of three whole checkpoints."""
    folder = tmp_path / "run"
    first = Checkpoints(folder, attempt=FIRST)
    for step in (10, 20, 30):
        save(first, step)
    return folder


def on(*names: str) -> Callable[[str, str], bool]:
    return lambda event, path: event in {"open", "os.stat"} and Path(path).name in names and "/step-" in path


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["state.bin", "manifest.json"])
@pytest.mark.parametrize(
    "options", [{"attempt": SECOND}, {"readonly": True}, {"attempt": SECOND, "from_scratch": True}]
)
def test_what_cannot_be_read_is_no_damage_and_is_raised_as_the_storages_error(
    three: Path, code: int, what: str, options: dict[str, object]
) -> None:
    again = Checkpoints(three, clock=ManualClock(), **options)  # type: ignore[arg-type]
    with refusing(on(what), code=code), pytest.raises(StorageUnreadableError, match=os.strerror(code)) as raised:
        again.latest()
    assert "Nothing was removed" in raised.value.remedy
    assert steps(three) == [10, 20, 30]
    assert again._clock.monotonic() - ManualClock().now == pytest.approx(ownership.RETRY_S, abs=1)
    found = again.latest()
    assert found is not None
    assert found.step == 30


def test_a_save_does_not_begin_at_zero_either(three: Path) -> None:
    plain = Checkpoints(three, clock=ManualClock())  # outside of a job: it claims when it saves
    with refusing(on("state.bin")), pytest.raises(StorageUnreadableError), plain.save(step=1):
        pass
    assert steps(three) == [10, 20, 30]


def test_it_is_tried_again_for_a_while(three: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = {"state.bin"}
    clock = EventfulClock(after_s=20, happens=refused.clear)
    with refusing(lambda event, path: event == "open" and Path(path).name in refused, code=errno.ESTALE):
        found = Checkpoints(three, attempt=SECOND, clock=clock).latest()
    assert found is not None
    assert (found.step, found.skipped) == (30, ())
    assert caplog.text.count("tried again for 60 s") == 1


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOTDIR], ids=errno.errorcode.get)
def test_a_file_elsewhere_than_in_the_folders_place_is_no_reason_to_give_up(three: Path, code: int) -> None:
    refused = {"state.bin"}
    clock = EventfulClock(after_s=20, happens=refused.clear)
    with refusing(lambda event, path: event == "open" and Path(path).name in refused, code=code):
        hold = ownership.FolderOwnership(three, None, clock)
        assert hold.retried(next(three.glob("*30.a1/state.bin")).read_bytes)


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
def test_a_save_removes_nothing_that_cannot_be_looked_at_unless_it_is_superseded(three: Path, code: int) -> None:
    second = Checkpoints(three, attempt=SECOND, clock=ManualClock())
    assert second.latest()
    with refusing(lambda _event, path: "/step-0000000030" in path, code=code):
        save(second, 40)
    assert steps(three) == [10, 20, 30, 40]
    save(second, 50)
    assert steps(three) == [30, 40, 50]


def test_an_old_one_that_cannot_be_looked_at_stops_nobody_and_counts_later(three: Path) -> None:
    with refusing(lambda _event, path: "/step-0000000020" in path):
        found = Checkpoints(three, attempt=SECOND, clock=ManualClock()).latest()
    assert found is not None
    assert found.step == 30
    tear(three / "step-0000000030.a1")
    again = Checkpoints(three, attempt=THIRD).latest()
    assert again is not None
    assert again.step == 20


def test_when_all_are_torn_it_says_so_removes_nothing_and_begins_at_zero_only_when_told(
    three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torn = sorted(three.glob("step-*"))
    for path in torn:
        tear(path)
    for options in ({"attempt": SECOND}, {"readonly": True}, {}):
        with pytest.raises(NothingWholeError, match=r"step-0000000030\.a1: state\.bin has 3 bytes") as refused:
            Checkpoints(three, **options).latest()
        assert [name for name, _ in refused.value.found] == [path.name for path in reversed(torn)]
    with pytest.raises(NothingWholeError), Checkpoints(three).save(step=1):
        pass
    (torn[0] / "state.bin").write_bytes(b"state" * 10)  # mended by hand: none of the refused made it count less
    found = Checkpoints(three, attempt=SECOND).latest()
    assert found is not None
    assert found.step == 10
    tear(torn[0])
    fresh = Checkpoints(three, attempt=THIRD, from_scratch=True)
    assert fresh.latest() is None
    save(fresh, 1)
    assert steps(three) == [1]
    assert set_aside(three) == [path.name for path in torn]
    assert f"{torn[0]} is damaged, and is kept as .damaged-step-0000000010.a1-" in caplog.text


def test_what_a_look_found_damaged_is_set_aside_by_the_next_save(three: Path) -> None:
    newest = three / "step-0000000030.a1"
    (newest / "state.bin").write_bytes(b"STATE" * 30)  # of the right size
    second = Checkpoints(three, attempt=SECOND)
    found = second.latest()
    assert found is not None
    assert found.step == 20
    save(second, 21)
    assert steps(three) == [10, 20, 21]
    assert set_aside(three) == [newest.name]


def test_what_another_thread_suspects_meanwhile_is_no_error_of_a_save(three: Path) -> None:
    suspected: set[Path] = set()

    class Changing(type(three)):  # type: ignore[misc]
        """A path at whose look another thread suspects one more."""

        @property
        def parent(self) -> Path:
            suspected.add(three.with_name("other") / f"step-{len(suspected):010d}.a1")
            return three

    newest = three / "step-0000000030.a1"
    tear(newest)
    suspected.add(Changing(newest))
    claim = Checkpoints(three, attempt=FIRST)._hold.claimed()
    tidy(three, claim, Retention(), lambda: None, proved="", suspected=suspected)
    assert set_aside(three) == [newest.name]


def test_what_counted_and_is_gone_is_not_begun_without(three: Path) -> None:
    assert Checkpoints(three, attempt=SECOND).latest()
    for path in three.glob("step-*"):
        shutil.rmtree(path)
    for attempt in (SECOND, THIRD):
        with pytest.raises(
            Exception, match=r"step-0000000030\.a1.* missing|step-0000000030\.a1: .*not there any more"
        ):
            Checkpoints(three, attempt=attempt).latest()
    assert Checkpoints(three, attempt=THIRD, from_scratch=True).latest() is None


def test_a_folder_that_vanished_says_so(three: Path) -> None:
    second = Checkpoints(three, attempt=SECOND, clock=ManualClock())
    assert second.latest()
    away = three.with_name("away")
    three.rename(away)
    with pytest.raises(FolderGoneError, match=rf"^{three} is not there any more"), second.save(step=40):
        pass
    with pytest.raises(FolderGoneError, match=rf"^{three} is not there"):
        second.latest()
    assert not three.exists(), "nothing is made where storage is not mounted"
    away.rename(three)
    save(second, 40)


def test_claims_that_were_removed_are_said_and_the_next_attempt_goes_on_from_the_newest(
    three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = Checkpoints(three, attempt=SECOND, clock=ManualClock())
    save(second, 40)
    shutil.rmtree(three / "claims")
    with pytest.raises(FolderGoneError, match=rf"^{three}/claims is not there") as gone, second.save(step=50):
        pass
    assert "Never remove `claims`" in gone.value.remedy
    third = Checkpoints(three, attempt=THIRD)
    found = third.latest()
    assert found is not None
    assert found.step == 40
    assert "`claims` was removed" in caplog.text
    save(third, 41)
    after = Checkpoints(three, attempt=Attempt(17, 0, 3)).latest()
    assert after is not None
    assert after.step == 41, "its claim stands above the checkpoints that were there"
    with pytest.raises(FencedError), second.save(step=50):
        pass


@pytest.mark.parametrize("has_local", [False, True], ids=["to the shared folder", "to the node's disk"])
def test_claims_that_were_removed_are_said_by_what_saves_in_the_background(
    three: Path, *, has_local: bool
) -> None:
    second = Checkpoints(three, attempt=SECOND, local=three.with_name("ssd") if has_local else None)
    assert second.latest()
    shutil.rmtree(three / "claims")
    with pytest.raises(FolderGoneError, match=rf"^{three}/claims is not there") as gone:
        second.save_state({"step": 40}, step=40)
        second.wait()
    assert "Never remove `claims`" in gone.value.remedy


def test_a_claim_that_cannot_be_read_is_not_called_damaged(three: Path) -> None:
    again = Checkpoints(three, attempt=SECOND, clock=ManualClock())
    with refusing(lambda _event, path: path.endswith("claim.json")), pytest.raises(StorageUnreadableError):
        again.latest()
    assert again.latest()
    (three / "claims" / "claim-0000000002" / "claim.json").write_text("{")
    with pytest.raises(ClaimDamagedError):
        Checkpoints(three, attempt=THIRD).latest()


def test_what_leads_nowhere_is_damaged_and_what_a_link_leads_to_is_not_removed(three: Path) -> None:
    (three / "step-0000000030.a1").rename(three.with_name("archived"))
    (three / "step-0000000030.a1").symlink_to("../archived")
    (three / "step-0000000010.a1").rename(three.with_name("lost"))
    (three / "step-0000000010.a1").symlink_to("../not-mounted")
    second = Checkpoints(three, attempt=SECOND, keep=1)
    found = second.latest()
    assert found is not None
    assert found.step == 30
    save(second, 40)
    assert steps(three) == [40]
    assert set_aside(three) == ["step-0000000010.a1"]
    assert (three.with_name("archived") / "manifest.json").exists()


STRANGER = """
import os, sys
from deeplink.checkpoints import Checkpoints
from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder, relaunch = sys.argv[1], int(sys.argv[2])
checkpoints = Checkpoints(folder, attempt=Attempt(17, 0, relaunch), clock=ManualClock())
try:
    found = checkpoints.latest()
except DeepLinkError as problem:
    print(type(problem).__name__, problem)
    sys.exit(3)
print("step", found and found.step)
with checkpoints.save(step=(found.step if found else 0) + 10) as draft:
    (draft / "state.bin").write_bytes(b"state")
"""


@pytest.mark.parametrize("denied", ["state.bin", "manifest.json", ".", ".."])
def test_a_real_process_that_may_not_read_begins_nothing_and_removes_nothing(tmp_path: Path, denied: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = Path(tempfile.mkdtemp(prefix="deeplink-denied-")) / "run"  # not below pytest's, which is root's alone
    folder.mkdir()
    try:
        for path in (folder.parent, folder):
            os.chown(path, 65534, 65534)

        def run(relaunch: int) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", STRANGER, str(folder), str(relaunch)]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=3 * LIMIT_S, check=False, cwd="/"
            )

        for relaunch in (0, 1, 2):
            assert run(relaunch).returncode == 0
        assert steps(folder) == [10, 20, 30]
        closed = {(path / denied).resolve() for path in folder.glob("step-*")}
        modes = {path: path.stat().st_mode for path in closed}
        for path in closed:
            path.chmod(0)
        done = run(3)
        assert (done.returncode, done.stdout.split()[0]) == (3, "StorageUnreadableError"), done.stderr
        assert "Permission denied" in done.stdout
        for path, mode in modes.items():
            path.chmod(mode)
        assert steps(folder) == [10, 20, 30]
        assert "step 30" in run(3).stdout
    finally:
        shutil.rmtree(folder.parent)


# -- on several nodes


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(recovery_agreement, "PERSIST_S", 1.0)
    monkeypatch.setattr(recovery_agreement, "GATHER_S", 1.0)
    monkeypatch.setattr(ownership, "RETRY_S", 1.0)
    job = Nodes(tmp_path, count=2)
    yield job
    job.close()


@pytest.mark.parametrize("relaunch", [Attempt(17, 0, 1), Attempt(17, 1, 0)], ids=["relaunched", "requeued"])
def test_ranks_of_nodes_that_cannot_read_do_not_all_begin_at_zero(nodes: Nodes, relaunch: Attempt) -> None:
    with begun(nodes, FIRST, "n0", ["n0"], keep=2) as first:
        for step in (1, 2):
            save(first, step)
            first.wait()
    for options in ({}, {"from_scratch": True}):
        with refusing(on("state.bin")), pytest.raises((CheckpointError, StorageUnreadableError), match="denied"):
            begun(nodes, relaunch, "n0", ["n0"], **options).latest()
    assert steps(nodes.root / "shared") == [1, 2]
    assert steps(nodes.local("n0")) == [1, 2]
    found = restarted(nodes, Attempt(17, 2, 0), ["n0", "n1"])
    assert [one.step if one else None for one in found.values()] == [2, 2]


def test_one_node_that_cannot_read_its_disk_goes_on_from_what_the_others_have(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(nodes, FIRST, "n0", ["n0"]) as first:
        save(first, 1)
    caplog.set_level(logging.WARNING)
    with refusing(lambda _event, path: str(nodes.root / "n0") in path and "/step-" in path, code=errno.EIO):
        found = begun(nodes, SECOND, "n1", ["n1"]).latest()
    assert found is not None
    assert found.step == 1
    assert steps(nodes.local("n0")) == [1]


def unread_shared(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the shared folder hold steps 1 and 2, and the node's disk step 1 alone."""
    monkeypatch.setattr(recovery_agreement, "PERSIST_S", 5.0)
    with begun(nodes, FIRST, "n0", ["n0"]) as first:
        for step in (1, 2):
            save(first, step)
            first.wait()
    for path in nodes.root.rglob("step-0000000002.a1"):
        if path.parent != nodes.root / "shared":
            shutil.rmtree(path)


def test_a_moments_error_of_the_shared_folder_loses_nothing_that_lies_there_alone(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread_shared(nodes, monkeypatch)
    newest, errors = str(nodes.root / "shared" / "step-0000000002.a1" / "state.bin"), [1]
    with refusing(lambda event, path: event == "open" and path == newest and bool(errors and errors.pop())):
        found = begun(nodes, SECOND, "n0", ["n0"]).latest()
    assert not errors
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("listing", ["listed", "listed at first"])
def test_what_the_shared_folder_alone_has_and_does_not_give_is_not_gone_on_without(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    unread_shared(nodes, monkeypatch)
    monkeypatch.setattr(recovery_agreement, "PERSIST_S", 1.0)
    shared, is_begun = str(nodes.root / "shared"), []

    def is_refused(event: str, path: str) -> bool:
        if event == "open" and path == f"{shared}/step-0000000002.a1/state.bin":
            is_begun.append(path)
            return True
        return bool(is_begun) and listing == "listed at first" and event == "os.listdir" and path == shared

    with refusing(is_refused, code=errno.EIO), pytest.raises(CheckpointError, match="Input/output error"):
        begun(nodes, SECOND, "n0", ["n0"]).latest()
    assert steps(nodes.root / "shared") == [1, 2]
    found = begun(nodes, THIRD, "n0", ["n0"]).latest()
    assert found is not None
    assert found.step == 2


def test_a_rank_alone_that_met_a_moments_error_of_the_shared_folder_reads_it_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(nodes, FIRST, "n0", ["n0"]) as first:
        save(first, 1)
    for path in nodes.root.rglob("step-0000000001.a1"):
        if path.parent != nodes.root / "shared":
            shutil.rmtree(path)
    assert begun(nodes, SECOND, "n0", ["n0"]).latest()
    assert steps(nodes.local("n0")) == [], "the node's first rank brought nothing"
    env = nodes.env
    monkeypatch.setattr(nodes, "env", lambda *args, **more: env(*args, **more) | {"RANK": "1", "LOCAL_RANK": "1"})
    manifest, errors = str(nodes.root / "shared" / "step-0000000001.a1" / "manifest.json"), [1, 2]
    clock = ManualClock()
    with refusing(lambda event, path: event == "open" and path == manifest and bool(errors and errors.pop())):
        found = begun(nodes, SECOND, "n0", ["n0"], clock=clock).latest()
    assert not errors
    assert found is not None
    assert found.path.parent == nodes.root / "shared"


def test_a_torn_run_is_refused_by_all_and_named_by_place(nodes: Nodes) -> None:
    with begun(nodes, FIRST, "n0", ["n0"]) as first:
        save(first, 1)
    for path in nodes.root.rglob("step-*"):
        tear(path)
    with pytest.raises(NothingWholeError, match="n0's disk"):
        begun(nodes, SECOND, "n0", ["n0"]).latest()
    fresh = begun(nodes, SECOND, "n0", ["n0"], from_scratch=True)
    assert fresh.latest() is None
    save(fresh, 1)
    fresh.close()
    assert set_aside(nodes.root / "shared") == ["step-0000000001.a1"]
    assert set_aside(nodes.local("n0")) == ["step-0000000001.a1"]


def test_without_agents_a_node_that_cannot_read_its_disk_says_so_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    with Checkpoints(shared, attempt=FIRST, local=local) as first:
        save(first, 1)
    shutil.rmtree(shared / "step-0000000001.a1")  # its copy had not got there
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    ranks = []
    for node in (0, 1):
        monkeypatch.setenv("GROUP_RANK", str(node))
        disk = local if node == 0 else tmp_path / "other"
        ranks.append(Checkpoints(shared, attempt=SECOND, local=disk, clock=ManualClock()))
    with refusing(lambda _event, path: str(local) in path and path.endswith("state.bin")):
        with pytest.raises(StorageUnreadableError, match="ssd"):
            ranks[0].latest()
        with pytest.raises(CheckpointError, match=r"node 0: .*Permission denied"):
            ranks[1].latest()
    assert Checkpoints(shared, readonly=True, from_scratch=True).latest() is None
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    found = Checkpoints(shared, attempt=THIRD, local=local).latest()
    assert found is not None
    assert found.step == 1


class SharedClock(ManualClock):
    """A clock of several threads, which moves on when all of them wait: to the one that is due first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._running = count
        self._due: list[float] = []
        self._moved = threading.Condition()

    @override
    def sleep(self, seconds: float) -> None:
        with self._moved:
            due = self.now + seconds
            self._due.append(due)
            self._move_on()
            assert self._moved.wait_for(lambda: self.now >= due, LIMIT_S)

    def end(self) -> None:
        with self._moved:
            self._running -= 1
            self._move_on()

    def _move_on(self) -> None:
        if len(self._due) == self._running and self._due:
            self.now = min(self._due)
            self._due = [due for due in self._due if due > self.now]
            self._moved.notify_all()


def latest_of_all(ranks: list[Checkpoints], clock: SharedClock) -> list[Exception | int | None]:
    """Return the step that each rank finds, or why it finds none."""
    found: list[Exception | int | None] = [None] * len(ranks)

    def look(number: int) -> None:
        try:
            newest = ranks[number].latest()
            found[number] = None if newest is None else newest.step
        except DeepLinkError as problem:
            found[number] = problem
        finally:
            clock.end()

    threads = [threading.Thread(target=look, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def ranks_of(
    shared: Path, disks: list[Path], attempt: Attempt, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> list[Checkpoints]:
    """Return the first rank of each node, without agents."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(len(disks)))
    ranks = []
    for node, disk in enumerate(disks):
        monkeypatch.setenv("GROUP_RANK", str(node))
        ranks.append(Checkpoints(shared, attempt=attempt, local=disk, clock=clock))
    return ranks


def test_without_agents_the_others_wait_for_a_node_that_tries_to_read_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disks = tmp_path / "shared", [tmp_path / "ssd0", tmp_path / "ssd1"]
    with Checkpoints(shared, attempt=FIRST, local=disks[1]) as first:
        save(first, 1)
        save(first, 2)
    for path in shared.glob("step-*"):
        shutil.rmtree(path)  # no copy had got there
    clock = SharedClock(2)
    ranks = ranks_of(shared, disks, SECOND, clock, monkeypatch)
    with refusing(lambda _event, path: str(disks[1]) in path and path.endswith("state.bin"), code=errno.EIO):
        found = latest_of_all(ranks, clock)
    assert [type(one) for one in found] == [CheckpointError, StorageUnreadableError], found
    assert "node 1: " in str(found[0])
    clock = SharedClock(2)
    assert latest_of_all(ranks_of(shared, disks, THIRD, clock, monkeypatch), clock) == [2, 2]


def test_without_agents_a_node_that_never_comes_is_not_gone_without_where_nothing_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disks = tmp_path / "shared", [tmp_path / "ssd0", tmp_path / "ssd1"]
    with Checkpoints(shared, attempt=FIRST, local=disks[1]) as first:
        save(first, 1)
    (shared / "step-0000000001.a1").rename(tmp_path / "away")
    alone = ranks_of(shared, disks, SECOND, ManualClock(), monkeypatch)[0]
    with pytest.raises(CheckpointError, match="1 of 2 nodes did not say"):
        alone.latest()
    (tmp_path / "away").rename(shared / "step-0000000001.a1")
    found = alone.latest()
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("refused", ["ssd", "shared"])
def test_what_only_a_nodes_disk_has_is_not_passed_over_for_an_older_one(tmp_path: Path, refused: str) -> None:
    shared, local = tmp_path / "shared", tmp_path / "ssd"
    with Checkpoints(shared, attempt=FIRST, local=local) as first:
        save(first, 1)
        save(first, 2)
    shutil.rmtree(shared / "step-0000000002.a1")  # its copy had not got there

    def is_refused(_event: str, path: str) -> bool:
        return "step-0000000002" in path and str(tmp_path / refused) in path and path.endswith("state.bin")

    code, error = (errno.EIO, StorageUnreadableError) if refused == "ssd" else (errno.EDQUOT, CheckpointWriteError)
    second = Checkpoints(shared, attempt=SECOND, local=local, clock=ManualClock())
    with refusing(is_refused, code=code), pytest.raises(error):
        second.latest()
    found = second.latest()
    assert found is not None
    assert found.step == 2


# -- copies that are kept for others


def test_copies_whose_age_is_not_known_are_not_forgotten(tmp_path: Path) -> None:
    clock = ManualClock(now=FORGET_S / 2)
    copies, now = Copies(tmp_path / "checkpoints", clock=clock), clock.epoch
    kept = copies.root / ("a" * 32) / "from-n0"
    kept.mkdir(parents=True)
    for path in (kept, kept.parent):
        os.utime(path, (now, now))
    with refusing(lambda event, path: event == "os.stat" and ("a" * 32) in path, code=errno.EIO):
        copies.forget()
    assert kept.exists()


def test_a_copy_that_cannot_be_looked_at_does_not_give_way(nodes: Nodes, tmp_path: Path) -> None:
    with begun(nodes, FIRST, "n0", ["n0"]) as first:
        save(first, 1)
        first.wait()
        save(first, 2)
    store = nodes.store("n1") / "checkpoints"
    run = next(path for path in store.iterdir() if len(path.name) == 32)
    kept = run / "from-n0"
    assert steps(kept) == [1, 2]
    tight = Copies(store, budget=sum(path.stat().st_size for path in kept.rglob("*")))
    with (
        refusing(lambda _event, path: "/from-n0/step-0000000002" in path, code=errno.EIO),
        pytest.raises(NoRoomError),
    ):
        tight._make_room(kept, 1 << 20)
    assert 2 in steps(kept)


# -- what is said of it


def test_the_storages_error_is_not_called_the_applications() -> None:
    said = (
        b"deeplink.checkpoints.found.StorageUnreadableError: checkpoints in /x cannot be read: [Errno 13] denied"
    )
    assert Clue.IO_ERROR in hints_in(said)
    assert Clue.IO_ERROR in hints_in(b"deeplink.checkpoints.found.FolderGoneError: /x is not there any more")
    assert not hints_in(b"deeplink.checkpoints.found.NothingWholeError: nothing in /x is whole")
