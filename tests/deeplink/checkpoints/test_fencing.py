"""A rank that has no business any more ends itself: fenced, or cut off for a lease's length."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.checkpoints import CheckpointError, Checkpoints
from deeplink.checkpoints.agents import JobAgents
from deeplink.checkpoints.fencing import (
    AgentsWitness,
    ControllerWitness,
    FencingGuard,
    FolderWitness,
    Lease,
    LeaseState,
    last_resort_of,
    other_members,
    pause,
    witnesses_of,
)
from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.types import Attempt, FencedError, JobId, NodeName
from deeplink.rpc.plain import PlainBusyError, PlainCallError, PlainStatusError, serving
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.parse import JobRow
from deeplink.scheduler.slurm.states import JobState
from tests.deeplink.checkpoints.nodes import Nodes
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.slurm.client import Slurm

FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)


# -- the lease: pure


def test_silence_of_all_for_longer_than_the_lease_ends_it() -> None:
    lease = Lease(60, renewed=1_000, witnesses=("folder", "agents"))
    for now in range(1_000, 1_061, 5):
        assert lease.standing(now) is LeaseState.HELD
    assert lease.standing(1_061) is LeaseState.EXPIRED


def test_an_answer_of_any_renews_it_and_an_older_one_does_not_shorten_it() -> None:
    lease = Lease(60, renewed=1_000, witnesses=("folder", "agents"))
    lease.renew(1_050)
    lease.renew(1_020)
    lease.looked = 1_100
    assert lease.standing(1_110) is LeaseState.HELD
    assert lease.standing(1_111) is LeaseState.EXPIRED


def test_who_has_nobody_to_ask_is_not_ended() -> None:
    assert Lease(60, renewed=0).standing(1e9) is LeaseState.HELD


def test_being_fenced_is_final_and_needs_no_silence() -> None:
    lease = Lease(60, renewed=1_000, witnesses=("folder",))
    lease.fence("17.0.1")
    lease.renew(1_001)
    assert lease.standing(1_001) is LeaseState.FENCED


def test_a_process_that_was_stopped_gets_the_time_back() -> None:
    lease = Lease(60, renewed=1_000, witnesses=("folder",))
    assert lease.standing(1_010) is LeaseState.HELD
    assert lease.standing(90_000) is LeaseState.HELD  # suspended by Slurm for a day
    assert lease.standing(90_015) is LeaseState.HELD
    assert lease.standing(90_030) is LeaseState.HELD
    assert lease.standing(90_045) is LeaseState.HELD
    assert lease.standing(90_051) is LeaseState.EXPIRED


def test_an_answer_before_the_look_after_a_stop_is_not_renewed_into_the_future() -> None:
    lease = Lease(60, renewed=1_000, witnesses=("folder",))
    assert lease.standing(1_010) is LeaseState.HELD
    lease.renew(4_600)  # suspended for an hour; the witness's thread woke first
    assert lease.standing(4_600) is LeaseState.HELD
    for now in range(4_615, 4_661, 15):
        assert lease.standing(now) is LeaseState.HELD
    assert lease.standing(4_661) is LeaseState.EXPIRED


@given(length=st.floats(0.1, 3_600), world=st.integers(1, 1_000_000))
def test_a_lease_holds_at_least_three_questions(length: float, world: int) -> None:
    assert 0 < pause(length, world) <= length / 3


# -- the guard


class Said:
    name = "somebody"

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)

    def stop(self) -> None:
        """Nothing to do."""

    def ask(self) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def guard_of(witness: Said, clock: ManualClock, ended: list[str]) -> FencingGuard:
    lease = Lease(60, clock.monotonic(), (witness.name,))
    return FencingGuard([witness], lease, world=1, clock=clock, end=ended.append)


def test_a_guard_ends_a_fenced_process_once_and_says_by_whom() -> None:
    ended: list[str] = []
    witness = Said("", OSError(5, "I/O"), "17.0.1")
    guard = guard_of(witness, ManualClock(), ended)
    for _ in range(3):
        guard.ask(witness)
        guard.judge()
    assert not guard.judge()
    assert ended == ["attempt 17.0.1 has taken over"]


def test_a_guard_ends_a_process_that_nobody_answered_and_not_after_it_was_stopped() -> None:
    ended: list[str] = []
    clock, witness = ManualClock(), Said(*[TimeoutError()] * 9)
    guard = guard_of(witness, clock, ended)
    stopped = guard_of(witness, clock, ended)
    stopped.stop()
    for _ in range(7):
        guard.ask(witness)
        guard.judge()
        stopped.judge()
        clock.sleep(10)
    assert not guard.judge()
    assert ended == ["cut off: somebody did not answer for 60 s"]


def test_the_threads_of_a_stopped_guard_end() -> None:
    before = set(threading.enumerate())
    guard = guard_of(Said(*[""] * 99), ManualClock(), [])
    guard.start()
    begun = set(threading.enumerate()) - before
    assert len(begun) == 2
    guard.stop()
    for thread in begun:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in begun)


def test_the_folder_knows_who_holds_it(tmp_path: Path) -> None:
    old = Checkpoints(tmp_path, attempt=FIRST)
    old.latest()
    assert old.guard is None  # `attempt=` was given: this is no rank of a job
    claim = old._hold.claimed()
    witness = FolderWitness(old._hold.claims, claim)
    assert witness.ask() == ""
    Checkpoints(tmp_path, attempt=SECOND).latest()
    assert witness.ask() == "17.0.1"
    assert str(tmp_path) in witness.name


def test_a_rank_asks_the_folder_and_the_other_nodes(nodes: Nodes) -> None:
    old = Checkpoints(nodes.root / "shared", attempt=FIRST)
    claim = old._hold.claimed()
    env, agents = rank_of(nodes, "n0", ["n0", "n1"])
    both = witnesses_of(env, old._hold.claims, claim, agents)
    assert [type(one) for one in both] == [FolderWitness, AgentsWitness]
    alone = witnesses_of(rank_of(nodes, "n0", ["n0"])[0], old._hold.claims, claim, agents)
    assert [type(one) for one in alone] == [FolderWitness]


def test_each_node_asks_another_one_first_and_all_of_them_in_turn() -> None:
    members = ",".join(f"n{number}=h{number}:1" for number in range(64))
    asked = [
        [member.name for member in other_members({"DEEPLINK_MEMBERS": members, "DEEPLINK_NODE": f"n{number}"})]
        for number in range(64)
    ]
    for turn in range(63):
        assert len({others[turn] for others in asked}) == 64, "nobody is asked by two nodes at once"
    for number, others in enumerate(asked):
        assert f"n{number}" not in others
        assert len(set(others)) == 63
    assert len(other_members({"DEEPLINK_MEMBERS": members, "DEEPLINK_NODE": "elsewhere"})) == 64


def test_a_full_file_system_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_folder: Path) -> list[str]:
        raise OSError(errno.ENOSPC, "full")

    old = Checkpoints(tmp_path, attempt=FIRST)
    witness = FolderWitness(old._hold.claims, old._hold.claimed())
    Checkpoints(tmp_path, attempt=SECOND)._hold.claimed()
    monkeypatch.setattr("deeplink.checkpoints.claims.fresh_names", full)
    assert witness.ask() == "17.0.1"
    monkeypatch.setattr(witness.claims, "numbers", lambda: [1])
    assert witness.ask() == ""


def test_another_job_that_only_looks_does_not_end_the_ranks_at_work(tmp_path: Path) -> None:
    training, evaluation = Checkpoints(tmp_path, attempt=FIRST), Checkpoints(tmp_path, attempt=Attempt(99, 0, 0))
    with training.save(step=1):
        pass
    witness = FolderWitness(training._hold.claims, training._hold.claimed(), leaves_sign=True)
    assert witness.ask() == ""
    found = evaluation.latest()
    assert found is not None
    assert found.step == 1
    assert witness.ask() == ""
    with training.save(step=2):  # and it is not taken over by who did not begin from there
        pass
    with pytest.raises(FencedError), evaluation.save(step=9):
        pass
    witness.stop()
    Checkpoints(tmp_path, attempt=Attempt(98, 0, 0)).latest()
    assert witness.ask() == "98.0.0"


# -- who else can be asked


def rank_of(nodes: Nodes, node: str, among: list[str], **more: str) -> tuple[dict[str, str], JobAgents]:
    env = {**nodes.env(FIRST, node, among), **more}
    agents = JobAgents.of_environment(env, nodes.root / "shared", FIRST, SystemClock())
    assert agents is not None
    return env, agents


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path, count=2)
    yield job
    job.close()


def test_another_nodes_agent_says_who_has_taken_over_without_shared_storage(nodes: Nodes) -> None:
    env, agents = rank_of(nodes, "n0", ["n0", "n1"])
    old = Checkpoints(nodes.root / "shared", attempt=FIRST)
    _, other = witnesses_of(env, old._hold.claims, old._hold.claimed(), agents)
    assert other.ask() == ""
    nodes.bulletins["n1"].learn(SECOND)
    assert other.ask() == "17.0.1"
    nodes.stop("n1")
    with pytest.raises(PlainCallError):
        other.ask()


def test_an_agent_that_has_too_much_to_do_has_answered(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, agents = rank_of(nodes, "n0", ["n0", "n1"])
    monkeypatch.setattr(serving, "_QUEUED", 0)  # not one call
    busy = nodes.members("n1")[0]
    witness = AgentsWitness([busy], agents)
    with pytest.raises(PlainBusyError):
        agents.hold(busy.address)
    assert witness.ask() == ""


def test_an_agent_that_refuses_the_question_has_answered(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, agents = rank_of(nodes, "n0", ["n0", "n1"])

    def refused(_address: str) -> None:
        raise PlainStatusError("n1", 12, "no such method")

    monkeypatch.setattr(JobAgents, "hold", lambda _self, address: refused(address))
    assert AgentsWitness(nodes.members("n1"), agents).ask() == ""


@dataclass
class Told:
    """What a controller says of the job."""

    state: JobState = JobState.RUNNING
    restarts: int = 0
    nodes: tuple[NodeName, ...] = (NodeName("n0"),)
    is_silent: bool = False

    def job(self, job: int) -> JobRow:
        if self.is_silent:
            raise JobVanishedError(job)
        return JobRow(
            id=JobId(job),
            label=str(job),
            state=self.state,
            reason="",
            restarts=self.restarts,
            requeueable=True,
            user="someone",
            nodes=self.nodes,
            batch_host=None,
            name="train",
        )


def test_the_controller_is_asked_for_a_job_of_one_node_in_slurm_alone(nodes: Nodes) -> None:
    assert last_resort_of(*rank_of(nodes, "n0", ["n0"], SLURM_JOB_ID="17"))
    assert not last_resort_of(*rank_of(nodes, "n0", ["n0"]))
    assert not last_resort_of(*rank_of(nodes, "n0", ["n0"], SLURM_JOB_ID="18"))
    assert not last_resort_of(*rank_of(nodes, "n0", ["n0", "n1"], SLURM_JOB_ID="17"))
    assert not last_resort_of({"SLURM_JOB_ID": "17"}, None)


def test_agent_and_controller_together_prove_that_nobody_else_has_begun(nodes: Nodes) -> None:
    _, agents = rank_of(nodes, "n0", ["n0"])
    told = Told()
    witness = ControllerWitness(agents, cast("Slurm", told))
    assert witness.ask() == ""
    told.restarts = 1
    assert witness.ask() == "17.1.0"
    told.restarts = 0
    for state, where in [(JobState.PENDING, ()), (JobState.RUNNING, (NodeName("n7"),)), (JobState.CANCELLED, ())]:
        told.state, told.nodes = state, where
        with pytest.raises(CheckpointError, match="Slurm has job"):
            witness.ask()
    told.state, told.nodes, told.is_silent = JobState.RUNNING, (NodeName("n0"),), True
    with pytest.raises(JobVanishedError):
        witness.ask()
    told.is_silent = False
    nodes.bulletins["n0"].learn(SECOND)  # the launcher began again
    assert witness.ask() == "17.0.1"
    nodes.stop("n0")
    with pytest.raises(PlainCallError):
        witness.ask()


def test_the_last_resort_is_asked_only_once_the_others_are_silent_for_a_third_of_the_lease() -> None:
    clock, ended = ManualClock(), list[str]()
    silent, last = Said(*[TimeoutError()] * 99), Said(*[""] * 99)
    lease = Lease(60, clock.monotonic(), ("folder", "last"))
    guard = FencingGuard([silent], lease, world=1, clock=clock, last_resort=[last], end=ended.append)
    for _ in range(30):
        for witness in (silent, last):
            if guard.is_due(witness):
                guard.ask(witness)
        assert guard.judge()
        clock.sleep(10)
    assert 9 <= 99 - len(last.answers) <= 11
    assert not ended


# -- real processes


def rank(code: str, env: dict[str, str], *prefix: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


OLD_RANK = """
import sys, threading
from deeplink.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1] if len(sys.argv) > 1 else {folder!r}, lease_s=1.5)
assert checkpoints.latest() is None
assert checkpoints.guard is not None
print("training", flush=True)
threading.Event().wait(60)
"""


@pytest.mark.slow
def test_a_rank_whose_job_was_restarted_elsewhere_ends_itself(tmp_path: Path) -> None:
    zombie = rank(OLD_RANK.format(folder=str(tmp_path)), {"DEEPLINK_ATTEMPT": "17.0.0"})
    assert zombie.stdout is not None
    assert zombie.stdout.readline() == "training\n"
    assert zombie.poll() is None
    Checkpoints(tmp_path, attempt=SECOND).latest()
    _, said = zombie.communicate(timeout=LIMIT_S)
    assert zombie.returncode == 77
    assert said == "deeplink: this rank ends: attempt 17.0.1 has taken over\n"


AGENT = """
import sys, threading
from pathlib import Path
from deeplink.agent.agent import Agent, AgentSettings
from deeplink.rpc.tokens import write_token
from deeplink.core.config import Config
from deeplink.core.types import NodeName
folder = Path({folder!r})
write_token(folder / "token", "secret")
settings = AgentSettings(
    node=NodeName("n1"), bind="10.213.7.1:0", token="secret", store=folder / "store", keeps_copies=True,
    config=Config(state=folder / "state"),
)
print(Agent(settings).start(folder / "token").address, flush=True)
threading.Event().wait(60)
"""

CUT_RANK = """
import sys, threading
from pathlib import Path
from deeplink.checkpoints.agents import JobAgents, run_of
from deeplink.checkpoints.fencing import AgentsWitness, guarded
from deeplink.core.clock import SystemClock
from deeplink.core.types import Attempt, parse_members
members, folder = parse_members("n1={address}"), Path({folder!r})
witness = AgentsWitness(members, JobAgents(
    run=run_of(folder), attempt=Attempt(17, 0, 0), node="n0", here="127.0.0.1:1", members=members,
    token_file=folder / "token", clock=SystemClock(),
))
guard = guarded([witness], 3.0, world=1, clock=SystemClock())
began = guard.lease.renewed
while guard.lease.renewed < began + 2:
    threading.Event().wait(0.05)
print("answered", flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def two_nodes() -> Iterator[tuple[list[str], list[str]]]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = [f"dlguard{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=LIMIT_S)

    try:
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if number:
                ip("-n", names[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", name)
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
        inside = [["ip", "netns", "exec", name] for name in names]
        yield inside[0], inside[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=LIMIT_S, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_rank_that_is_cut_off_from_all_others_ends_itself_after_its_lease(
    tmp_path: Path, two_nodes: tuple[list[str], list[str]]
) -> None:
    there, here = two_nodes
    agent = rank(AGENT.format(folder=str(tmp_path)), {}, *there)
    assert agent.stdout is not None
    cut = None
    try:
        address = agent.stdout.readline().strip()
        cut = rank(CUT_RANK.format(folder=str(tmp_path), address=address), {}, *here)
        assert cut.stdout is not None
        assert cut.stdout.readline() == "answered\n"
        assert cut.poll() is None
        subprocess.run([*here, "ip", "link", "set", "veth0", "down"], check=True, timeout=LIMIT_S)
        began = time.monotonic()
        _, said = cut.communicate(timeout=LIMIT_S)
        assert time.monotonic() - began > 1  # not at the first silence
        assert cut.returncode == 77
        assert said == "deeplink: this rank ends: cut off: the other nodes' agents did not answer for 3 s\n"
    finally:
        for process in (agent, cut):
            if process is not None:
                process.kill()
                process.communicate(timeout=LIMIT_S)
