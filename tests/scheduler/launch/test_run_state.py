"""The state of a run that a next launcher goes on with: what is left is found, and only by its own run."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.backend import Backend, HeldRole, LaunchError, RankStep
from deeplink.scheduler.launch.environment import Launch, NodeFacts
from deeplink.scheduler.launch.history import Progress
from deeplink.scheduler.launch.launcher_process import ParentLink
from deeplink.scheduler.launch.launcher_role import (
    FILE,
    LauncherPlace,
    RoleClaims,
    launcher_on,
    left_role,
    run_of,
)
from deeplink.scheduler.launch.process import EndedRanks, StartedAgents, StartedSlots
from deeplink.scheduler.launch.run_state import AttemptState, Handover, RunState, RunStateFile
from deeplink.scheduler.recovery.rank_failure import Cause, Setback
from deeplink.scheduler.recovery.records import Incident, Moment
from deeplink.scheduler.recovery.relaunch import NextMove, Silence
from tests.waiting import LIMIT_S, until

PLACE = LauncherPlace(
    host="n0",
    term=1,
    command=("python", "run"),
    folder="/home",
    env={"SLURM_JOB_ID": "7"},
    output=("/out", "/out"),
    monotonic=500.0,
    unix=1e9,
)
AGENTS = StartedAgents((41, 42), "/state/7/announced-x", 17)
STEPS = st.none() | st.integers(0, 1 << 40)


def facts(node: str) -> NodeFacts:
    return NodeFacts(node=node, address=f"{node}:7411", store="/ssd", domain="leaf0")


@st.composite
def started_slots(draw: st.DrawFn, node: str) -> StartedSlots:
    steps = draw(st.lists(st.tuples(st.integers(2, 1 << 22), st.just({NodeName(node): 2})), max_size=2))
    return StartedSlots(draw(st.integers(0, 1 << 50)), draw(st.booleans()), tuple(steps))


@st.composite
def attempts(draw: st.DrawFn) -> AttemptState:
    names = draw(st.lists(st.from_regex(r"n[0-9]{1,3}", fullmatch=True), min_size=3, max_size=6, unique=True))
    attempt = Attempt(7, draw(st.integers(0, 3)), draw(st.integers(0, 9)))
    launch = Launch(
        attempt=attempt,
        nodes=(facts(names[0]), facts(names[1])),
        spares=(facts(names[2]),),
        ranks=(2, 2),
        master_port=20_000,
        passed_on={"DEEPLINK_CATALOG": "/c"},
    )
    incident = Incident(
        id="7.0.0-node-silent-n1",
        kind="node-silent",
        began_unix=1.5,
        detected_unix=2.5,
        attempt=attempt,
        node=NodeName("n1"),
        evidence=draw(st.text(max_size=20)),
        timeline=(Moment(1.5, "first sign of it"),),
    )
    return AttemptState(
        launch=launch,
        runs=draw(st.booleans()),
        slots=tuple(draw(st.lists(started_slots(names[0]), max_size=2))),
        began=draw(st.floats(0, 1e9)),
        begun=draw(st.integers(1, 9)),
        code=draw(st.none() | st.integers(0, 255)),
        others=tuple(map(facts, names[3:])),
        restarted=tuple(draw(st.lists(st.integers(2, 99)))),
        usable=tuple(map(NodeName, names)),
        has_lost=draw(st.booleans()),
        boots={NodeName(name): f"boot of {name}" for name in names},
        relaunches=draw(st.integers(0, 9)),
        setbacks=tuple(draw(st.lists(st.builds(Setback, st.sampled_from(Cause), st.integers(0, 255))))),
        progress=Progress(best=draw(STEPS), first=draw(STEPS), fruitless=draw(st.integers(0, 3))),
        incident=draw(st.sampled_from([None, incident])),
    )


@given(attempt=st.none() | attempts())
def test_what_is_left_is_read(attempt: AttemptState | None, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("job")
    left = RunState(AGENTS, attempt, PLACE)
    RunStateFile(folder, "a").write(left)
    assert RunStateFile(folder, "a").read() == left
    assert RunStateFile(folder, "b").read() is None, "another run of the script"
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "a"}', '{"run": "a", "agents": 3, "attempt": null}'])
def test_a_state_that_cannot_be_read_is_none(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(content)
    assert RunStateFile(tmp_path, "a").read() is None
    assert FILE in caplog.text


def test_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert RunStateFile(tmp_path, "a").read() is None
    assert not caplog.text


def test_it_holds_no_secret_and_a_folder_that_is_gone_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunStateFile(tmp_path, "a").write(RunState(AGENTS))
    assert json.loads((tmp_path / FILE).read_text()).keys() == {*("run", "agents", "attempt", "launcher", "nodes")}
    RunStateFile(tmp_path / "gone", "a").write(RunState(AGENTS))
    assert "gone" in caplog.text


@given(attempt=attempts())
def test_on_another_host_no_process_of_the_first_one_is_known_and_moments_are_of_its_clock(
    attempt: AttemptState,
) -> None:
    left = RunState(AGENTS, replace(attempt, began=490.0), PLACE)
    assert left.seen_from(NodeName("n0"), ManualClock()) is left
    clock = ManualClock(now=30.0, epoch=1e9 + 5 - 30.0)
    seen = left.seen_from(NodeName("n1"), clock)
    assert seen.agents == StartedAgents((), AGENTS.said, AGENTS.log_start)
    assert seen.attempt is not None
    assert seen.attempt.began == pytest.approx(15.0), "15 s ago"
    assert not seen.attempt.restarted
    assert {pid for one in seen.attempt.slots for pid, _ in one.steps} <= {0}
    assert [dict(counts) for one in seen.attempt.slots for _, counts in one.steps] == [
        dict(counts) for one in attempt.slots for _, counts in one.steps
    ]


@given(attempt=attempts())
def test_agents_find_the_attempts_nodes_and_those_that_rest_first(
    attempt: AttemptState, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    RunStateFile(folder, run_of("s")).write(RunState(AGENTS, attempt, PLACE))
    left = left_role(folder, run_of("s"))
    assert left is not None
    assert left.place == PLACE
    assert [*left.nodes] == [one.name for one in (*attempt.launch.spares, *attempt.launch.nodes)]


class RoleLostError(Exception):
    """Stands for the end of the process."""


@dataclass
class Link:
    """The link of a launcher that is the first of its run."""

    run: str = "r"
    died: None = None

    def end_of(self, _pid: int) -> None:
        """Nothing has ended."""

    def lose_role(self) -> NoReturn:
        raise RoleLostError


@dataclass
class Allocation:
    """What a handover asks of a backend."""

    folder: Path
    here: str = "n0"
    role: HeldRole = field(default_factory=HeldRole)
    waited_s: float = 0.0

    def adopt_slots(self, *_: object) -> None:
        """There are none."""

    def adopt_ranks(self, *_: object) -> RankStep:
        return EndedRanks()

    def handover(self, clock: ManualClock, nodes: int) -> Handover:
        """Return that of a launcher here, with an attempt on so many nodes."""
        found = Handover(cast("ParentLink", Link()), cast("Backend", self), clock)
        found.launch = Launch(
            attempt=Attempt(7, 0, 0),
            nodes=tuple(facts(f"n{number}") for number in range(nodes)),
            spares=(),
            ranks=(1,) * nodes,
            master_port=1,
            passed_on={},
        )
        return found


@dataclass
class Heard:
    """Agents of which the first ones answer."""

    heard: int
    nodes: int
    has_lost_role: bool = False

    def silence(self) -> dict[NodeName, Silence]:
        return {NodeName(f"n{at}"): Silence(0.0, 0.0, 0.5 if at < self.heard else 9.0) for at in range(self.nodes)}


def kept(
    allocation: Allocation,
    heard: int,
    *,
    told: int = 10_000,
    nodes: int = 4,
    move: NextMove = NextMove.RELAUNCH,
) -> None:
    """Have a launcher that hears so many nodes make sure of its role; it is told to end after `told` looks."""
    handover, looks = allocation.handover(clock := ManualClock(), nodes), iter(range(told))
    began = clock.monotonic()
    try:
        handover.keep_role(
            move,
            Heard(heard, nodes).silence,
            lambda: clock.sleep(0.1),
            lambda: next(looks, None) is None,
            60.0,
        )
    finally:
        allocation.waited_s = clock.monotonic() - began


def test_a_launcher_that_hears_most_of_its_nodes_claims_nothing(tmp_path: Path) -> None:
    kept(one := Allocation(tmp_path), heard=3)
    assert (one.role.term, RoleClaims(tmp_path, "r").newest()) == (0, 0)


def test_one_that_hears_half_of_them_claims_the_next_term_before_it_acts(tmp_path: Path) -> None:
    kept(one := Allocation(tmp_path), heard=2)
    assert (one.role.term, RoleClaims(tmp_path, "r").claimant(1)) == (1, launcher_on("n0"))


ACTS = [NextMove.RELAUNCH, NextMove.STRANDED, NextMove.REQUEUE, NextMove.FAILED]


@pytest.mark.parametrize("move", ACTS)
def test_one_whose_next_term_another_node_has_does_nothing_any_more(move: NextMove, tmp_path: Path) -> None:
    RoleClaims(tmp_path, "r").claim(1, "n3")
    with pytest.raises(RoleLostError):
        kept(Allocation(tmp_path), heard=1, move=move)


def test_ranks_that_ended_well_have_ended_whosever_the_role_is(tmp_path: Path) -> None:
    RoleClaims(tmp_path, "r").claim(1, "n3")
    kept(Allocation(tmp_path), heard=1, move=NextMove.SUCCEEDED)


@pytest.mark.parametrize(("nodes", "here"), [(1, "n0"), (4, "login")])
def test_where_no_other_may_take_the_role_nothing_is_claimed(nodes: int, here: str, tmp_path: Path) -> None:
    kept(Allocation(tmp_path, here), heard=0, nodes=nodes)
    assert RoleClaims(tmp_path, "r").newest() == 0


def test_where_the_folder_takes_no_claim_it_waits_until_it_is_told_to_end(tmp_path: Path) -> None:
    kept(one := Allocation(tmp_path / "gone"), heard=1, told=5)
    assert one.role.term == 0


@pytest.mark.parametrize("move", [NextMove.RELAUNCH, NextMove.STRANDED])
def test_it_does_not_wait_for_ever_and_says_so_once(
    move: NextMove, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LaunchError, match="cannot be claimed") as raised:
        kept(one := Allocation(tmp_path / "gone"), heard=1, move=move)
    assert raised.value.exit_code == 75
    assert 60.0 <= one.waited_s <= 61.0
    assert caplog.text.count("waiting") == 1


def test_a_run_that_ends_keeps_its_code_where_the_folder_is_gone(tmp_path: Path) -> None:
    kept(one := Allocation(tmp_path / "gone"), heard=1, move=NextMove.FAILED)
    assert 60.0 <= one.waited_s <= 61.0


@pytest.mark.parametrize(("move", "waits"), [(NextMove.STRANDED, False), (NextMove.RELAUNCH, True)])
def test_without_a_claim_by_anybody_a_full_folder_keeps_only_ranks_from_being_started(
    move: NextMove, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    kept(one := Allocation(tmp_path), heard=1, told=5, move=move)
    assert (one.waited_s > 0, one.role.term) == (waits, 0)


def test_a_claim_is_found_where_no_agent_can_tell(tmp_path: Path) -> None:
    handover = Allocation(tmp_path).handover(clock := ManualClock(), 4)
    few, most = cast("AgentPool", Heard(2, 4)), cast("AgentPool", Heard(3, 4))
    RoleClaims(tmp_path, "r").claim(1, "n3")

    def looks(agents: AgentPool) -> bool:
        clock.sleep(2.0)
        try:
            handover.look(agents)
        except RoleLostError:
            return True
        return False

    assert not any(looks(most) for _ in range(3)), "then the agents tell"
    until(lambda: looks(few), LIMIT_S)


def test_an_agent_that_knows_of_another_launcher_is_enough(tmp_path: Path) -> None:
    with pytest.raises(RoleLostError):
        Allocation(tmp_path).handover(ManualClock(), 4).look(cast("AgentPool", Heard(4, 4, has_lost_role=True)))


@pytest.mark.parametrize(
    ("recipe", "host", "goes_on"),
    [
        ("torch", "n9", True),
        ("mpi", "n9", False),
        ("horovod", "n9", False),
        ("mpi", "n0", True),
        ("mpi", "n2", True),
    ],
    ids=["torch", "mpi", "horovod", "its launcher was killed", "its host ran ranks, and is missed next"],
)
def test_ranks_of_mpi_do_not_go_on_without_the_srun_that_died_with_a_host_that_rested(
    recipe: str, host: str, *, goes_on: bool, tmp_path: Path
) -> None:
    allocation = Allocation(tmp_path)
    handover = allocation.handover(ManualClock(), 4)
    assert handover.launch is not None
    attempt = AttemptState(launch=replace(handover.launch, recipe_name=recipe), runs=True, began=0.0, begun=1)
    handover.before = RunState(AGENTS, attempt, replace(PLACE, host=host))
    found = handover.ranks(cast("Backend", allocation), attempt, ["train"], cast("Any", None))
    assert (found is not None) is goes_on


def test_an_older_launcher_does_not_write_over_what_a_newer_one_left(tmp_path: Path) -> None:
    newer = RunState(AGENTS, None, PLACE)
    RunStateFile(tmp_path, "a").write(newer)
    RunStateFile(tmp_path, "a").write(RunState(AGENTS, None, replace(PLACE, term=0, host="n9")))
    assert RunStateFile(tmp_path, "a").read() == newer
    RunStateFile(tmp_path, "b").write(RunState(AGENTS, None, replace(PLACE, term=0)))
    assert RunStateFile(tmp_path, "b").read() is not None, "another run of the script begins anew"
