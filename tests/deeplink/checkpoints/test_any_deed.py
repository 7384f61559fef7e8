"""Whatever is done to the files, wherever the storage refuses: no whole checkpoint is lost but by retention."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from typing_extensions import override

from deeplink.checkpoints import Checkpoints, NothingWholeError
from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import CheckpointName, entries, looks_whole
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints.faults import REFUSALS, refusing
from tests.effort import examples

KEEP = 2
NEVER = 10_000
FROM_THE = st.one_of(st.just(NEVER), st.integers(0, 60))
FOR = st.sampled_from([1, 2, NEVER])


def is_whole(path: Path) -> bool:
    try:
        manifests.check(path, contents=True)
    except CheckpointDamagedError:
        return False
    return True


def content(path: Path) -> bytes:
    return (path / "state.bin").read_bytes()


class Deeds(RuleBasedStateMachine):
    """Every save has contents of its own, by which it is known wherever it lies."""

    @initialize()
    def begin(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="deeplink-deeds-"))
        self.folder = self.top / "run"
        self.relaunch = self.saves = 0
        self.named: set[str] = set()
        self.error: BaseException | None = None
        self.away: list[tuple[Path, Path]] = []
        self.checkpoints = Checkpoints(self.folder, attempt=Attempt(1, 0, 0), keep=KEEP, clock=ManualClock())

    @override
    def teardown(self) -> None:
        if hasattr(self, "top"):
            shutil.rmtree(self.top)

    # -- what we do

    @rule(first=FROM_THE, count=FOR, code=st.sampled_from([*REFUSALS, errno.ENOSPC]), from_scratch=st.booleans())
    def an_attempt_begins(self, first: int, count: int, code: int, *, from_scratch: bool) -> None:
        self.relaunch += 1
        attempt = Attempt(1, 0, self.relaunch)
        newest = max((entry for entry in entries(self.folder)), default=None)
        before = self.whole()
        self.checkpoints = Checkpoints(
            self.folder, attempt=attempt, keep=KEEP, clock=ManualClock(), from_scratch=from_scratch
        )
        found = None
        with self.looked_after(refusals=(first, count, code)):
            found = self.checkpoints.latest()
            self.named |= {item.path.name for item in self.checkpoints.skipped}
        assert self.whole() == before, "a look changes nothing"
        if found is not None:
            assert is_whole(found.path)
        elif self.error is None and not from_scratch:
            assert newest is None or all(
                not entry.counts(self.checkpoints._hold.claimed()) for entry in entries(self.folder)
            )

    @rule(first=FROM_THE, count=FOR, code=st.sampled_from([*REFUSALS, errno.ENOSPC]))
    def it_saves(self, first: int, count: int, code: int) -> None:
        self.saves += 1
        with (
            self.looked_after(refusals=(first, count, code), saves=True),
            self.checkpoints.save(step=self.saves) as draft,
        ):
            (draft / "state.bin").write_bytes(b"save %06d" % self.saves)

    @rule()
    def it_looks_again(self) -> None:
        before = self.whole()
        with self.looked_after():
            found = self.checkpoints.latest()
            self.named |= {item.path.name for item in self.checkpoints.skipped}
            if found is not None and found.path.name in self.checkpoints._hold.claimed().recognised:
                assert looks_whole(found.path)  # its checksums were read when the attempt began
            else:
                assert found is None or is_whole(found.path)
        assert self.whole() == before

    # -- what others do

    @rule(data=st.data(), how=st.sampled_from(["cut", "flip", "no manifest", "torn manifest", "no file", "empty"]))
    def somebody_damages_one(self, data: st.DataObject, how: str) -> None:
        if (path := self.any_of(data)) is None or path.is_symlink():
            return
        state, manifest = path / "state.bin", path / "manifest.json"
        if not (state.exists() and manifest.exists()):
            return
        if how == "cut":
            os.truncate(state, 3)
        elif how == "flip":
            state.write_bytes(content(path)[::-1])
        elif how == "no manifest":
            manifest.unlink()
        elif how == "torn manifest":
            os.truncate(manifest, 20)
        elif how == "no file":
            state.unlink()
        else:
            shutil.rmtree(path)
            path.mkdir()

    @rule(data=st.data(), is_linked=st.booleans())
    def somebody_moves_one_away(self, data: st.DataObject, *, is_linked: bool) -> None:
        if (path := self.any_of(data)) is None or path.is_symlink():
            return
        elsewhere = self.top / f"away-{len(self.away)}-{self.saves}-{self.relaunch}"
        if elsewhere.exists():
            return
        path.rename(elsewhere)
        self.away.append((path, elsewhere))
        if is_linked:
            path.symlink_to(self.top / "nowhere")

    @rule()
    def somebody_brings_one_back(self) -> None:
        if not self.away:
            return
        path, elsewhere = self.away.pop()
        if path.is_symlink():
            path.unlink()
        if not path.exists():
            elsewhere.rename(path)

    @rule()
    def somebody_removes_the_claims(self) -> None:
        shutil.rmtree(self.folder / "claims", ignore_errors=True)

    # -- what holds

    def any_of(self, data: st.DataObject) -> Path | None:
        there = [entry.name for entry in entries(self.folder)] if self.folder.exists() else []
        return self.folder / data.draw(st.sampled_from(there)) if there else None

    def whole(self) -> dict[bytes, Path]:
        """Return the whole checkpoints in the folder by their contents; a draft is a failed save, and is none."""
        if not self.folder.exists():
            return {}
        others = [path for path in self.folder.iterdir() if path.name != "claims"]
        return {content(path): path for path in others if not path.name.startswith(".draft-") and is_whole(path)}

    def damaged(self) -> set[str]:
        """Return the damaged ones that sizes give away, or a look has named."""
        return {
            entry.name
            for entry in entries(self.folder)
            if looks_whole(self.folder / entry.name) is False
            or (entry.name in self.named and not is_whole(self.folder / entry.name))
        }

    def looked_after(self, *, refusals: tuple[int, int, int] = (NEVER, 0, 0), saves: bool = False) -> _Watched:
        return _Watched(self, refusals, saves=saves)


class _Watched:
    """Does something while the storage refuses, and compares what was there with what is."""

    def __init__(self, deeds: Deeds, refusals: tuple[int, int, int], *, saves: bool) -> None:
        self.deeds, self.saves = deeds, saves
        self.first, self.count, self.code = refusals
        self.calls = 0

    def refused(self, _event: str, path: str) -> bool:
        if str(self.deeds.folder) not in path:
            return False
        self.calls += 1
        return self.first < self.calls <= self.first + self.count

    def __enter__(self) -> None:
        self.deeds.error = None
        self.whole, self.damaged = self.deeds.whole(), self.deeds.damaged()
        self.refusing = refusing(self.refused, code=self.code or errno.EIO)
        self.refusing.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        self.refusing.__exit__(None, None, None)
        self.deeds.error = error
        if error is not None and not isinstance(error, DeepLinkError | OSError):
            return False
        folder = self.deeds.folder
        there = self.deeds.whole()
        lost = [path for data, path in self.whole.items() if data not in there]
        assert self.saves or not lost, f"{lost} went with a look"
        looking_whole = [entry for entry in entries(folder) if looks_whole(folder / entry.name)]
        for path in lost:
            entry = CheckpointName.parse(path.name)
            newer = [one for one in looking_whole if entry is None or one > entry]
            assert len(newer) >= KEEP, f"{path} was not superseded: {newer}"
            assert any(is_whole(folder / one.name) for one in newer), f"{path} was the last whole one"
        aside = (
            [path.name for path in folder.iterdir() if path.name.startswith(".damaged-")]
            if folder.exists()
            else []
        )
        for name in self.damaged:
            kept = any(one.startswith(f".damaged-{name}-") for one in aside)
            assert kept or manifests.is_there(folder / name), f"{name} is damaged, and is gone"
        if isinstance(error, NothingWholeError):
            assert all(name in str(error) for name, _ in error.found[:5])
        return error is not None


TestDeeds = Deeds.TestCase
TestDeeds.settings = settings(
    max_examples=examples(150), stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
TestDeeds = pytest.mark.timeout(600)(TestDeeds)
