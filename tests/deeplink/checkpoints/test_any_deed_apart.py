"""The twin of `test_any_deed` for nodes' disks: copies at partners, parts on nodes, two jobs on the same nodes.

Whatever fails while ranks save, nothing whole is lost but for something newer, and what rank 0 calls whole is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from typing_extensions import override

from deeplink.checkpoints import Checkpoints, recovery_agreement
from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.agents import run_of
from deeplink.checkpoints.claims import CheckpointName, entries
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.checkpoints.multirank_save import Board, SaveGroup
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from deeplink.rpc.plain import PlainSilentError
from deeplink.v1 import keep_pb2
from tests.deeplink.checkpoints.nodes import Nodes

ALL = ["n0", "n1", "n2"]
JOBS = [17, 18]
NUMBERS, PATIENCE_S = 8_000, 0.5
BUDGET = int(2.5 * 4 * NUMBERS)
"""Room for two copies: a job's second one takes the other job's place, if that gives way."""
SILENCES = st.none() | st.tuples(
    st.integers(0, len(ALL) - 1), st.sampled_from(["manifest", "published", "whole"]), st.booleans()
)
"""Which rank loses the first node's agent, at which word, and whether the word gets there all the same."""


class Apart(RuleBasedStateMachine):
    """Every job has a folder on each node's disk; its shared folder is gone once it has claimed, or stays."""

    @initialize(keep=st.sampled_from([1, 2]), is_parted=st.booleans())
    def begin(self, keep: int, *, is_parted: bool) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="deeplink-apart-"))
        self.nodes = Nodes(self.top, count=len(ALL), config=Config(copies_bytes=BUDGET))
        self.keep, self.is_parted = keep, is_parted
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(recovery_agreement, "PERSIST_S", 0.5)  # the shared folder does not come back
        self.patch.setattr(recovery_agreement, "AGREE_S", 2.0)  # nor does a first rank that has refused
        self.relaunch, self.step = dict.fromkeys(JOBS, -1), 0
        self.ranks: dict[int, list[Checkpoints]] = {}
        for job in JOBS:
            self.an_attempt_begins(job)
            if is_parted:  # where a node does not copy its part, the others wait for long
                self.shared(job).rename(self.top / f"withheld-{job}")
                self.shared(job).write_text("not mounted")

    @override
    def teardown(self) -> None:
        if hasattr(self, "top"):
            for ranks in self.ranks.values():
                self.side_by_side(Checkpoints.close, ranks)
            self.nodes.close()
            self.patch.undo()
            shutil.rmtree(self.top)

    # -- what we do

    @rule(job=st.sampled_from(JOBS))
    def an_attempt_begins(self, job: int) -> None:
        self.relaunch[job] += 1
        attempt, ranks = Attempt(job, 0, self.relaunch[job]), []
        for rank, node in enumerate(ALL):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self.nodes.env(attempt, node, ALL).items():
                    patch.setenv(name, value)
                local = self.local(node, job)
                checkpoints = Checkpoints(self.shared(job), local=local, keep=self.keep, lease_s=None)
            states = checkpoints._states
            states.group, states.session = SaveGroup(rank, len(ALL)), f"{job:02x}{self.relaunch[job]:06x}" * 4
            states.patience_s = PATIENCE_S
            ranks.append(checkpoints)
        with self.looked_after():
            self.side_by_side(Checkpoints.latest, ranks)
        if job in self.ranks:
            self.side_by_side(Checkpoints.close, self.ranks[job])
        self.ranks[job] = ranks

    @rule(job=st.sampled_from(JOBS), silence=SILENCES)
    def it_saves(self, job: int, silence: tuple[int, str, bool] | None) -> None:
        self.step += 1
        ranks = self.ranks[job]
        with self.looked_after(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Board, "_called", lost(silence))
            if self.is_parted:
                for rank, checkpoints in enumerate(ranks):
                    state = {"mine": torch.full((NUMBERS,), float(10 * self.step + rank))}
                    checkpoints.save_state(state, step=self.step, spread="each", random=False)
                failed = self.side_by_side(lambda one: one._states.background.wait(), ranks)
            else:
                state = {"all": torch.full((NUMBERS,), float(10 * self.step))}
                ranks[0].save_state(state, step=self.step, random=False)
                failed = self.side_by_side(lambda one: one._states.background.wait(), ranks[:1])
            self.side_by_side(Checkpoints.wait, ranks)
        if failed[0] is None:
            saved = entries(self.local("n0", job))[0]
            assert saved.step == self.step
            assert saved in self.whole(job), "rank 0 called it whole, and a part of it is gone"

    # -- what others do

    @rule(job=st.sampled_from(JOBS), node=st.sampled_from(ALL))
    def somebody_clears_a_disk(self, job: int, node: str) -> None:
        shutil.rmtree(self.local(node, job), ignore_errors=True)

    @rule(which=st.integers(0, 999))  # not of the files: how many there are is a matter of time
    def somebody_damages_a_file(self, which: int) -> None:
        if files := sorted(self.top.glob("**/step-*/*.pt")):
            path = files[which % len(files)]
            path.write_bytes(path.read_bytes()[::-1])

    # -- what holds

    def shared(self, job: int) -> Path:
        return self.top / f"shared-{job}"

    def local(self, node: str, job: int) -> Path:
        return self.top / node / f"run-{job}"

    def places(self, job: int) -> list[Path]:
        """Return every folder in which checkpoints of a job may lie."""
        copies = self.top.glob(f"*/store/checkpoints/{run_of(self.shared(job))}/from-*")
        own = [self.local(node, job) for node in ALL]
        return [*own, *copies, *([] if self.is_parted else [self.shared(job)])]

    def whole(self, job: int) -> list[CheckpointName]:
        """Return what a job could go on from, the oldest first: all files are as saved, wherever each lies."""
        found: dict[CheckpointName, set[str]] = {}
        wanted: dict[CheckpointName, set[str]] = {}
        for folder in self.places(job):
            for entry in entries(folder):
                path = folder / entry.name
                try:
                    manifest = manifests.read_manifest(path)
                except CheckpointDamagedError:
                    continue
                wanted[entry] = {file.path for file in manifest.files}
                for file in manifest.files:
                    try:
                        manifests.check_files(path, [file], contents=True)
                    except CheckpointDamagedError:
                        continue
                    found.setdefault(entry, set()).add(file.path)
        return sorted(entry for entry, files in wanted.items() if files == found.get(entry))

    def copies(self, *, contents: bool) -> dict[Path, list[CheckpointName]]:
        """Return the copies that each node keeps, the oldest first: whole ones, or all of the right sizes."""
        folders = [folder for job in JOBS for folder in self.places(job) if folder.name.startswith("from-")]
        return {
            folder: sorted(
                entry for entry in entries(folder) if is_as_kept(folder / entry.name, contents=contents)
            )
            for folder in folders
        }

    @contextmanager
    def looked_after(self) -> Iterator[None]:
        whole, copies = {job: self.whole(job) for job in JOBS}, self.copies(contents=True)
        yield
        for job, before in whole.items():
            assert not before or max(self.whole(job), default=before[0]) >= before[-1], f"{before[-1]} is lost"
            assert not before or self.whole(job), f"{before} are lost"
        after = self.copies(contents=False)  # who makes room does not read what somebody has altered
        for folder, kept in copies.items():
            assert not kept or any(entry >= kept[-1] for entry in after.get(folder, [])), f"{folder}: {kept[-1]}"

    @staticmethod
    def side_by_side(work: Any, ranks: list[Checkpoints]) -> list[DeepLinkError | None]:
        """Do something on all ranks; return what failed on each."""

        def tried(checkpoints: Checkpoints) -> DeepLinkError | None:
            try:
                work(checkpoints)
            except DeepLinkError as problem:
                return problem
            return None

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(tried, ranks))


def is_as_kept(path: Path, *, contents: bool) -> bool:
    try:
        manifests.check_part(path, contents=contents)
    except CheckpointDamagedError:
        return False
    return True


def lost(silence: tuple[int, str, bool] | None) -> Any:
    """Return `Board._called` as it is where a rank hears nothing of the first node's agent from one word on."""
    called = Board._called

    def silent(board: Board, method: str, request: keep_pb2.TellRequest | keep_pb2.HearRequest) -> bytes:
        if silence is not None:
            rank, kind, is_delivered = silence
            is_told = method == "Tell"
            if board.group.rank == rank and request.kind == kind:
                if is_delivered and is_told:
                    called(board, method, request)
                raise PlainSilentError("n0", "away")
        return called(board, method, request)

    return silent


TestApart = Apart.TestCase
TestApart.settings = settings(
    max_examples=12,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ],  # steps take real time: nothing is shrunk
)
TestApart = pytest.mark.timeout(600)(TestApart)
