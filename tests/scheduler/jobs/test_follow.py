"""Following a job's output from before it starts, over a requeue and a silent Slurm, to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.jobs.follow import OutputFollower
from deeplink.scheduler.jobs.job_folder import Tail
from deeplink.scheduler.jobs.job_names import JobNameError
from deeplink.scheduler.jobs.job_view import Viewer
from deeplink.scheduler.slurm.cached import CachedRunner
from tests.scheduler.jobs.left import launched
from tests.scheduler.jobs.programs import job
from tests.scheduler.jobs.test_job_view import Slurm


class Play(ManualClock):
    """A clock that lets things happen at their times."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[tuple[float, Callable[[], object]]] = []

    @override
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for act in [act for act in self.acts if act[0] <= self.now]:
            self.acts.remove(act)
            act[1]()


@pytest.fixture
def clock() -> Play:
    return Play()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    slurm = Slurm()
    slurm.jobs = [job(7, STDOUT=f"{tmp_path}/out-%j")]
    return slurm


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def follower(tmp_path: Path, slurm: Slurm, clock: Play, said: list[str]) -> OutputFollower:
    asked = CachedRunner(folder=tmp_path / "answers", run=slurm, clock=clock, env={})
    viewer = Viewer(asked=asked, state=tmp_path / "state", clock=clock, user="eve")
    return OutputFollower(viewer=viewer, word="7", clock=clock, say=said.append)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_from_the_queue_over_a_requeue_to_the_end(
    tmp_path: Path, slurm: Slurm, clock: Play, follower: OutputFollower, said: list[str]
) -> None:
    out = tmp_path / "out-7"
    slurm.jobs = [job(7, "PENDING", Reason="Resources", STDOUT=f"{tmp_path}/out-%j")]
    running, again, ended = (
        [job(7, state, STDOUT=f"{tmp_path}/out-%j")] for state in ("RUNNING", "PENDING", "COMPLETED")
    )
    begin = clock.now
    clock.acts = [
        (begin + 10, partial(setattr, slurm, "jobs", running)),
        (begin + 11, partial(append, out, "one\n")),
        (begin + 20, partial(setattr, slurm, "jobs", again)),
        (begin + 30, partial(setattr, slurm, "silent", True)),
        (begin + 40, partial(append, out, "two\n")),
        (begin + 50, partial(setattr, slurm, "silent", False)),
        (begin + 50, partial(setattr, slurm, "jobs", ended)),
        (begin + 51, partial(append, out, "last")),
    ]
    path = follower.output(wait=True)
    assert path == out
    assert said[0] == f"job 7 is PENDING (Resources: no suitable nodes are free); waiting for {out}"
    before = len(said)
    tail = Tail(path)
    seen = tail.last(10)

    def write(pieces: Iterable[bytes]) -> None:
        seen.extend(pieces)

    follower.follow([tail], write)
    assert b"".join(seen) == b"one\ntwo\nlast"
    assert said[before:] == ["Slurm does not answer; following on"]
    assert clock.now - begin < 60


def test_a_file_begun_anew_is_said(
    tmp_path: Path, slurm: Slurm, clock: Play, follower: OutputFollower, said: list[str]
) -> None:
    out = tmp_path / "out-7"
    out.write_text("a long line of the first run\n")
    tail = Tail(out)
    tail.last(1)
    clock.acts = [
        (clock.now + 1, lambda: out.write_text("new\n")),
        (clock.now + 3, partial(setattr, slurm, "jobs", [job(7, "FAILED")])),
    ]
    seen: list[bytes] = []
    follower.follow([tail], seen.extend)
    assert (b"".join(seen), said) == (b"new\n", [f"{out} was begun again"])


def test_without_following_a_job_without_output_is_said_at_once(follower: OutputFollower) -> None:
    with pytest.raises(DeepLinkError, match="the job is RUNNING"):
        follower.output(wait=False)


def test_an_output_that_is_no_file_is_said(slurm: Slurm, follower: OutputFollower) -> None:
    slurm.jobs = [job(7, STDOUT="/dev/null")]
    with pytest.raises(DeepLinkError, match="no file that could be read again"):
        follower.output(wait=True)


def test_a_vanished_job_without_a_note_is_told_where_to_look(
    tmp_path: Path, slurm: Slurm, clock: Play, follower: OutputFollower
) -> None:
    slurm.jobs = []
    with pytest.raises(JobNameError, match="holds nothing of it"):
        follower.output(wait=True)
    launched(tmp_path / "state", 7, clock.unix())
    clock.sleep(5.0)
    with pytest.raises(DeepLinkError) as told:
        follower.output(wait=True)
    assert "sacct" in told.value.remedy


def test_ranks_of_a_node_are_those_of_the_newest_attempt(
    tmp_path: Path, clock: Play, follower: OutputFollower
) -> None:
    launched(tmp_path / "state", 7, clock.unix())
    keep = follower.keep(None, "n0")
    assert keep is not None
    assert [line for line in (b"1: a", b"2: b", b"3: c", b"4: d") if keep(line)] == [b"2: b", b"3: c"]
    one = follower.keep(3, "n0")
    assert one is not None
    assert not one(b"2: b")
    for rank, node in ((None, "n2"), (1, "n0")):
        with pytest.raises(JobNameError, match=r"runs no ranks"):
            follower.keep(rank, node)


def test_attempts_have_short_names(follower: OutputFollower) -> None:
    assert (follower.attempt("0.1"), follower.attempt("7.1.0")) == ("7.0.1", "7.1.0")
