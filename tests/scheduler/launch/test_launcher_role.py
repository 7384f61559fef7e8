"""Who may take the launcher's role: of the halves of a cut network never both; what the next one is told."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.launcher_role import (
    FILE,
    LauncherPlace,
    RoleClaims,
    is_undisputed,
    launcher_on,
    left_role,
    may_take,
    run_of,
    slurms,
)

RUN = run_of("secret")


def place(host: str = "n0", *, term: int = 0, monotonic: float = 5.0, unix: float = 1000.0) -> LauncherPlace:
    return LauncherPlace(
        host=host,
        term=term,
        command=("python", "run"),
        folder="/home",
        env={"SLURM_JOB_ID": "7", "SLURMD_NODENAME": host},
        output=("/out", ""),
        monotonic=monotonic,
        unix=unix,
    )


@dataclass
class Half:
    """One side of a cut: its nodes, of which none dies, and the launcher where it is there."""

    nodes: int
    has_launcher: bool

    def acts(self, of: int, claims: set[str], name: str) -> bool:
        """Whether a launcher of this side starts ranks; the job's folder is the same for both."""
        if self.has_launcher and is_undisputed(of, self.nodes):
            return True
        if not self.has_launcher and not may_take(of, self.nodes):
            return False
        if claims:
            return False
        claims.add(name)
        return True


@given(
    sizes=st.lists(st.integers(0, 12), min_size=2, max_size=4).filter(any),
    first=st.integers(0, 3),
    order=st.permutations(range(4)),
)
def test_of_the_parts_of_a_cut_network_one_at_most_has_the_role(
    sizes: list[int], first: int, order: list[int]
) -> None:
    whose = first % len(sizes)
    sizes[whose] = max(1, sizes[whose])
    claims: set[str] = set()
    parts = [Half(size, number == whose) for number, size in enumerate(sizes)]
    acting = [
        number for number in order if number < len(parts) and parts[number].acts(sum(sizes), claims, f"{number}")
    ]
    assert len(acting) <= 1


@given(nodes=st.integers(1, 1024), heard=st.integers(0, 1024))
def test_a_launcher_that_needs_no_claim_hears_more_than_half(nodes: int, heard: int) -> None:
    heard = min(heard, nodes)
    assert is_undisputed(nodes, heard) is (2 * heard > nodes)
    assert not (is_undisputed(nodes, heard) and may_take(nodes, nodes - heard))


def test_two_of_three_are_enough_and_one_of_three_is_not() -> None:
    assert may_take(3, 2)
    assert may_take(2, 1), "the claim decides"
    assert not may_take(3, 1)


def test_a_term_is_claimed_once(tmp_path: Path) -> None:
    claims = RoleClaims(tmp_path, RUN)
    assert claims.newest() == 0
    assert claims.claim(1, "n1")
    assert not claims.claim(1, "n2")
    assert claims.claim(2, launcher_on("n1"))
    RoleClaims(tmp_path, run_of("another run's")).claim(9, "n3")
    assert (claims.newest(), claims.claimant(1), claims.claimant(2)) == (2, "n1", "n1 launcher")


def test_the_end_of_a_run_is_heard(tmp_path: Path) -> None:
    claims = RoleClaims(tmp_path, RUN)
    assert claims.hear_end() is None
    assert not claims.is_heard()
    claims.leave_end(7)
    assert not claims.is_heard()
    assert RoleClaims(tmp_path, RUN).hear_end() == 7
    assert claims.is_heard()


def test_the_role_is_left_for_agents_of_this_run(tmp_path: Path) -> None:
    nodes = {"n2": "10.0.0.2:1", "n0": "10.0.0.0:1"}
    (tmp_path / FILE).write_text(json.dumps({"run": RUN, "launcher": place().as_json(), "nodes": nodes}))
    left = left_role(tmp_path, RUN)
    assert left is not None
    assert (left.place, left.nodes) == (place(), nodes)
    assert left_role(tmp_path, "other") is None


@pytest.mark.parametrize("kept", [{"run": RUN}, {"run": RUN, "launcher": {"host": 1}, "nodes": {"n0": ""}}, []])
def test_what_is_no_role_is_an_error(kept: object, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=FILE):
        left_role(tmp_path, RUN)


def test_before_the_first_attempt_there_is_no_role(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"run": RUN, "launcher": place().as_json(), "nodes": {}}))
    assert left_role(tmp_path, RUN) is None


def test_a_launcher_elsewhere_has_the_scripts_environment_and_its_own_node() -> None:
    step = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SRUN_X": "1", "SLURMD_NODENAME": "n1"}
    assert place().environment(step, "n1") == {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


def test_moments_of_another_host_are_told_by_this_ones_clock() -> None:
    # There it was 5.0 at 1000 o'clock; here it is 90.0 at 1010. What was at 7.0 there was 8 s ago.
    assert place().here_s(90.0, 1010.0) + 7.0 == pytest.approx(82.0)


def test_the_place_of_this_process() -> None:
    here = LauncherPlace.of_this_process(NodeName("n1"), 2)
    assert (here.host, here.term, here.command[0]) == ("n1", 2, sys.executable)
    assert LauncherPlace.of(json.loads(json.dumps(here.as_json()))) == here


def test_a_claim_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = RoleClaims(tmp_path, RUN)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            claims.claim(1, "n1")
    assert (claims.newest(), [*tmp_path.iterdir()]) == (0, [])
    assert claims.claim(1, "n1")


def test_a_claim_of_ones_own_is_ones_own(tmp_path: Path) -> None:
    claims = RoleClaims(tmp_path, RUN)
    assert claims.claim(1, "n1")
    assert claims.claim(1, "n1"), "the answer to the first try was lost"
    (tmp_path / f"launcher.{RUN}.1").write_text("n1\nanother process\n")
    assert not claims.claim(1, "n1")


def test_an_empty_claim_is_nobodys(tmp_path: Path) -> None:
    claims = RoleClaims(tmp_path, RUN)
    (tmp_path / f"launcher.{RUN}.1").touch()
    with pytest.raises(OSError, match="does not say"):
        claims.claim(1, "n1")
    with pytest.raises(OSError, match="does not say"):
        claims.claimant(1)


def test_the_end_is_heard_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = RoleClaims(tmp_path, RUN)
    claims.leave_end(7)

    def frozen(_path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", frozen)
    assert claims.hear_end() == 7


def test_no_secret_of_slurm_is_left() -> None:
    assert slurms({"SLURM_JOB_ID": "7", "SLURM_JWT": "secret"}) == {"SLURM_JOB_ID": "7"}
    assert place().environment({"SLURM_JWT": "own"}, "n1")["SLURM_JWT"] == "own"
