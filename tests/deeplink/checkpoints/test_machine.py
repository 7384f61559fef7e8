"""Claims, saves and zombies in any order, against a model that is a few lines long; and real processes at once."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from deeplink.checkpoints import Checkpoint, Checkpoints, FencedError
from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.saving import Save
from deeplink.core.types import Attempt
from tests.effort import examples
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

Answer: TypeAlias = "tuple[str, int, int | str | None]"


def publish_behind_its_back(checkpoints: Checkpoints, step: int) -> None:
    """What a machine does that stood still between its check and its rename."""
    claim = checkpoints._hold.claim
    assert claim is not None
    name = f"step-{step:010d}.a{claim.number}"
    draft = checkpoints.folder / f".draft-{name}-00"
    draft.mkdir()
    (draft / "state.bin").write_bytes(b"zombie")
    save = Save(step=step, meta={}, began=0.0)
    checkpoints._saver._seal(draft, save, claim, manifests.list_files(draft))
    if (checkpoints.folder / name).exists():
        shutil.rmtree(draft)  # the rename of a folder onto one that holds files fails
    else:
        draft.rename(checkpoints.folder / name)


def looked_at(folder: Path) -> Checkpoint | None:
    return Checkpoints(folder, readonly=True, from_scratch=True).latest()


class Fencing(RuleBasedStateMachine):
    """Model: `trajectory` holds the steps of the surviving trajectory, oldest first."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="deeplink-fencing-"))
        self.attempts: list[Checkpoints] = []
        self.restart = 0
        self.step = 0
        self.trajectory: list[int] = []
        self.damaged: set[int] = set()

    @override
    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @property
    def newest(self) -> Checkpoints:
        return self.attempts[-1]

    def whole(self) -> list[int]:
        return [step for step in self.trajectory if step not in self.damaged]

    @rule(ranks=st.integers(1, 3))
    def a_new_attempt_begins(self, ranks: int) -> None:
        self.restart += 1
        attempt = Attempt(1, self.restart, 0)
        group = [Checkpoints(self.folder, attempt=attempt, from_scratch=True) for _ in range(ranks)]
        found = [rank.latest() for rank in group]
        expected = max(self.whole(), default=None)
        assert [item.step if item else None for item in found] == [expected] * ranks
        self.trajectory = [step for step in self.trajectory if step not in self.damaged]
        self.damaged.clear()
        self.attempts.append(group[0])

    @precondition(lambda self: self.attempts)
    @rule()
    def the_newest_saves(self) -> None:
        self.step += 1
        with self.newest.save(step=self.step) as draft:
            (draft / "state.bin").write_bytes(b"state")
        self.trajectory.append(self.step)
        good = self.whole()[-self.newest.retention.keep :]
        self.trajectory = [s for s in self.trajectory if s >= good[0]]

    @precondition(lambda self: len(self.attempts) > 1)
    @rule(data=st.data())
    def a_zombie_saves_and_is_refused(self, data: st.DataObject) -> None:
        zombie = data.draw(st.sampled_from(self.attempts[:-1]))
        with pytest.raises(FencedError), zombie.save(step=self.step + 100) as draft:
            (draft / "state.bin").write_bytes(b"zombie")

    @precondition(lambda self: len(self.attempts) > 1)
    @rule(data=st.data(), ahead=st.integers(1, 5))
    def a_zombies_rename_arrives_late(self, data: st.DataObject, ahead: int) -> None:
        zombie = data.draw(st.sampled_from(self.attempts[:-1]))
        publish_behind_its_back(zombie, self.step + ahead)

    @precondition(lambda self: self.attempts and self.whole())
    @rule()
    def the_newest_save_is_torn(self) -> None:
        own = sorted(self.folder.glob(f"step-{self.whole()[-1]:010d}.a*"))
        victims = [path for path in own if b"state" in (path / "state.bin").read_bytes()]
        (victims[-1] / "state.bin").write_bytes(b"st")
        self.damaged.add(self.whole()[-1])

    @rule()
    def someone_looks_from_outside(self) -> None:
        found = Checkpoints(self.folder, from_scratch=True).latest()
        assert (found.step if found else None) == max(self.whole(), default=None)

    @invariant()
    def what_is_found_was_written_by_the_surviving_trajectory(self) -> None:
        if hasattr(self, "folder") and (found := looked_at(self.folder)):
            assert (found.path / "state.bin").read_bytes() == b"state"
            assert manifests.check(found.path, contents=True).step == found.step


TestFencing = Fencing.TestCase
TestFencing.settings = settings(max_examples=examples(60), stateful_step_count=25)


def claim_at_once(folder: Path, attempt: str, barrier: Barrier, answers: Queue[Answer]) -> None:
    checkpoints = Checkpoints(folder, attempt=Attempt.parse(attempt))
    barrier.wait(LIMIT_S)
    try:
        found = checkpoints.latest()
    except FencedError as fenced:
        answers.put((attempt, 0, str(fenced.newest)))
    else:
        claim = checkpoints._hold.claim
        assert claim is not None
        answers.put((attempt, claim.number, found.step if found else None))


@pytest.mark.slow
def test_processes_that_claim_at_the_same_moment_agree(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path, attempt=Attempt(1, 0, 0))
    with first.save(step=5) as draft:
        (draft / "state.bin").write_bytes(b"x" * 100_000)
    spawn = multiprocessing.get_context("spawn")
    attempts = ["1.1.0"] * 4 + ["1.2.0"] * 4
    barrier, answers = spawn.Barrier(len(attempts)), spawn.Queue()
    processes = [
        spawn.Process(target=claim_at_once, args=(tmp_path, name, barrier, answers), daemon=True)
        for name in attempts
    ]
    for process in processes:
        process.start()
    said = [answers.get(timeout=LIMIT_S) for _ in attempts]
    for process in processes:
        process.join(LIMIT_S)
    newer = [(number, step) for name, number, step in said if name == "1.2.0"]
    older = [(number, step) for name, number, step in said if name == "1.1.0"]
    assert len(set(newer)) == 1
    assert newer[0][1] == 5
    # An older one either claimed before the newer, or was refused because of it; never after.
    assert all(
        (number == newer[0][0] - 1 and step == 5) or (number, step) == (0, "1.2.0") for number, step in older
    )
    assert len([path for path in (tmp_path / "claims").iterdir() if path.name.startswith("claim-")]) <= 3
