"""What a launcher needs to go on with a run that another one began: one small file in the job's folder.

It holds no secret: that comes from the parent or, on another host, from the agent there. Moments are monotonic, of
the host that the launcher ran on, and so are process ids.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deeplink.core.codec import from_row, to_row
from deeplink.core.publish import kept_object, write_text
from deeplink.core.timeouts import LastAnswer, call_with_timeout
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import Launch, NodeFacts
from deeplink.scheduler.launch.history import Progress
from deeplink.scheduler.launch.launcher_role import (
    FILE,
    HEARD_S,
    LauncherPlace,
    RoleClaims,
    is_undisputed,
    launcher_on,
)
from deeplink.scheduler.launch.process import (
    AdoptedProcess,
    AgentProcesses,
    EndedRanks,
    StartedAgents,
    StartedSlots,
    abandon_process,
)
from deeplink.scheduler.recovery.rank_failure import Cause, Setback
from deeplink.scheduler.recovery.records import Incident
from deeplink.scheduler.recovery.relaunch import AGAIN_CODE, NextMove

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import AgentStep, Backend, RankStep, Reach
    from deeplink.scheduler.launch.launcher_process import ParentLink
    from deeplink.scheduler.recovery.relaunch import Silence

log = logging.getLogger(__name__)
WRITE_S = 3.0  # supervision waits no longer for its storage
CLAIM_AGAIN_S, LOOK_AGAIN_S = 0.5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptState:
    """The newest attempt of a run, and what the run has to remember of those before it."""

    launch: Launch
    runs: bool  # whether it has ranks: else it was about to start them, or is ending them
    began: float
    begun: int  # attempts of this run
    code: int | None = None  # how its ranks ended; None while that is not known
    crossings: int = 0
    crossings_stock: int = 0
    slots: tuple[StartedSlots, ...] = ()
    others: tuple[NodeFacts, ...] = ()  # agents that are not as the launch tells, as those that came up again
    restarted: tuple[int, ...] = ()  # processes that started agents once more
    usable: tuple[NodeName, ...] = ()
    has_lost: bool = False
    boots: Mapping[NodeName, str] = field(default_factory=dict)
    relaunches: int = 0
    setbacks: tuple[Setback, ...] = ()
    progress: Progress = field(default_factory=Progress)
    incident: Incident | None = None  # the one that is being recovered from

    @property
    def facts(self) -> tuple[NodeFacts, ...]:
        """Every node whose agent came up."""
        known = (*self.launch.nodes, *self.launch.spares, *self.others)
        return tuple({one.name: one for one in known}.values())  # the newest of each

    @property
    def addresses(self) -> dict[NodeName, str]:
        """The attempt's own nodes and how their agents are reached, those that rest first."""
        address = {one.name: one.address for one in self.facts}
        return {one.name: address[one.name] for one in (*self.launch.spares, *self.launch.nodes)}

    def as_json(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "launch": base64.b64encode(self.launch.packed()).decode(),
            "slots": [asdict(one) for one in self.slots],
            "others": [asdict(one) for one in self.others],
            "usable": list(self.usable),
            "restarted": list(self.restarted),
            "boots": dict(self.boots),
            "setbacks": [[one.cause.value, one.code, one.ran_s] for one in self.setbacks],
            "progress": asdict(self.progress),
            "incident": None if self.incident is None else to_row(self.incident),
        }

    @classmethod
    def of(cls, kept: dict[str, Any]) -> AttemptState:
        """Read what `as_json` returned."""
        return cls(
            **{name: kept[name] for name in _PLAIN},
            launch=Launch.unpacked(base64.b64decode(kept["launch"])),
            slots=tuple(_slots(one) for one in kept["slots"]),
            others=tuple(map(NodeFacts.of, kept["others"])),
            usable=tuple(kept["usable"]),
            restarted=tuple(kept["restarted"]),
            boots=kept["boots"],
            setbacks=tuple(Setback(Cause(cause), code, ran_s) for cause, code, ran_s in kept["setbacks"]),
            progress=Progress(**kept["progress"]),
            incident=None if kept["incident"] is None else from_row(Incident, kept["incident"]),
        )


def _slots(kept: dict[str, Any]) -> StartedSlots:
    return StartedSlots(kept["number"], kept["has_begun"], tuple((pid, counts) for pid, counts in kept["steps"]))


_PLAIN = ("runs", "began", "begun", "code", "crossings", "crossings_stock", "has_lost", "relaunches")


@dataclass(frozen=True, slots=True)
class RunState:
    """A run from the start of its agents on."""

    agents: StartedAgents
    attempt: AttemptState | None = None  # None before the first
    place: LauncherPlace | None = None

    def seen_from(self, host: NodeName | None, clock: Clock) -> RunState:
        """Return the same with what is known of it on this host, by the clock there."""
        if self.place is None or self.place.host == (host or ""):
            return self
        agents, attempt, now = replace(self.agents, pids=()), self.attempt, clock.monotonic()
        if attempt is not None:
            by_s = self.place.here_s(now, clock.unix())
            slots = (replace(one, steps=tuple((0, counts) for _, counts in one.steps)) for one in attempt.slots)
            began, progress = min(now, attempt.began + by_s), attempt.progress.moved(by_s, now)
            attempt = replace(attempt, began=began, progress=progress, slots=tuple(slots), restarted=())
        return replace(self, agents=agents, attempt=attempt)


class RunStateFile:
    """The file of one run; a script may have several runs, one after the other. Thread-safe."""

    def __init__(self, folder: Path, run: str) -> None:
        """`run` tells this run from every other one of the job."""
        self._path, self._run = folder / FILE, run
        self._lock = threading.Lock()
        self._newest = self._written = 0

    def read(self) -> RunState | None:
        """Return the state of this run; None where it left none, or none that can be read."""
        try:
            kept = json.loads(self._path.read_bytes())
            if kept["run"] != self._run:
                return None
            pids, said, log_start = kept["agents"]
            attempt = None if kept["attempt"] is None else AttemptState.of(kept["attempt"])
            place = None if kept["launcher"] is None else LauncherPlace.of(kept["launcher"])
            return RunState(StartedAgents(tuple(pids), said, log_start), attempt, place)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as problem:
            log.warning("%s: %s", self._path, problem)
            return None

    def write(self, state: RunState) -> None:
        """Publish the state, within `WRITE_S`; a failure is logged: a next launcher then begins a new attempt."""
        number = self._number()
        try:
            call_with_timeout(lambda: self._write(state, number), WRITE_S)
        except TimeoutError:
            log.warning("%s: not written within %g s", self._path, WRITE_S)

    def write_soon(self, state: RunState) -> None:
        """Do the same without waiting for the storage."""
        args = (state, self._number())
        threading.Thread(target=self._write, args=args, name="deeplink-state", daemon=True).start()

    def _number(self) -> int:
        self._newest += 1
        return self._newest

    def _write(self, state: RunState, number: int) -> None:
        attempt = None if state.attempt is None else state.attempt.as_json()
        agents = [state.agents.pids, state.agents.said, state.agents.log_start]
        place = None if state.place is None else state.place.as_json()
        nodes = {} if state.attempt is None else state.attempt.addresses
        kept = {"run": self._run, "agents": agents, "attempt": attempt, "launcher": place, "nodes": nodes}
        text = json.dumps(kept)
        with self._lock:
            if number <= self._written:
                return
            try:
                if state.place is not None and self._newest_term() > state.place.term:
                    log.warning("%s is another launcher's by now, and is left as it is", self._path)
                    return
                write_text(self._path, text, mode=0o600, durable=False)
            except OSError as problem:
                log.warning("%s: %s", self._path, problem)
            self._written = number

    def _newest_term(self) -> int:
        """Return the term of the launcher that this run's state tells of; 0 where it tells of none."""
        kept = kept_object(self._path)
        place = kept.get("launcher") if kept.get("run") == self._run else None
        term = place.get("term") if isinstance(place, dict) else None
        return term if isinstance(term, int) else 0


class Handover:
    """What a launcher takes over from those of its run that died, and what it leaves for a next one."""

    def __init__(self, link: ParentLink, backend: Backend, clock: Clock) -> None:
        """Read the state that was left, and end what was started and is not in it."""
        self.link, self._role, self._here, self._clock = link, backend.role, backend.here or "", clock
        self.claims = RoleClaims(backend.folder, link.run)
        self._file = RunStateFile(backend.folder, link.run)
        self._place = LauncherPlace.of_this_process(backend.here, self._role.term)
        self._newest_claim = LastAnswer(self._newest_claimed, clock, "deeplink-claims")
        self._looked = float("-inf")
        self._agents = StartedAgents((), "", 0)
        left = None if link.died is None else self._file.read()
        self.before = None if left is None else left.seen_from(backend.here, clock)
        self._restarted = () if self.attempt is None else self.attempt.restarted
        self.launch = None if self.attempt is None else self.attempt.launch  # whose nodes may take the role
        if link.died is not None:
            agents = () if self.before is None else self.before.agents.pids
            slots = () if self.attempt is None else self.attempt.slots
            link.end_strays({*agents, *self._restarted, *(pid for one in slots for pid, _ in one.steps)})

    @property
    def silent_host(self) -> NodeName | None:
        """The node whose launcher we follow, where that is another one; it was silent as the role was taken."""
        place = None if self.before is None else self.before.place
        return None if place is None or place.host == self._here else NodeName(place.host)

    @property
    def said(self) -> str:
        """What became of the launcher before us, for people."""
        if self.silent_host is None:
            return f"signal {self.link.died or 0:d} ended the launcher, and it was started again"
        return f"{self.silent_host} is silent, and {self._here} has taken the launcher's role"

    def keep_role(
        self,
        move: NextMove,
        silence: Callable[[], Mapping[NodeName, Silence]],
        listen: Callable[[], None],
        is_told_to_end: Callable[[], bool],
        longest_s: float,
    ) -> None:
        """Return once this move is certainly ours, or we are told to end; ends this process where it is another's.

        Where so many nodes are silent that another one may have the role, it is claimed. Where the job's folder,
        in which that is done, does not answer for so long: raises LaunchError; a run that ends anyway ends.
        """
        deadline, said = self._clock.monotonic() + longest_s, ""
        if move in {NextMove.SUCCEEDED, NextMove.SUPERSEDED}:
            return
        while self._is_disputed(silence()) and not is_told_to_end():
            try:
                call_with_timeout(lambda: self._claim(starts=move is NextMove.RELAUNCH), WRITE_S)
            except OSError as problem:  # a TimeoutError, too
                if not said:
                    log.warning("whose the launcher's role is cannot be said, waiting: %s", problem)
                said = str(problem)
            else:
                return
            if self._clock.monotonic() >= deadline:
                if move not in {NextMove.RELAUNCH, NextMove.STRANDED}:
                    return
                remedy = (
                    "Once the job's folder answers again, submit the job again: it goes on where it was saved."
                )
                raise LaunchError(f"the launcher's role cannot be claimed: {said}", remedy, exit_code=AGAIN_CODE)
            listen()
            self._clock.sleep(CLAIM_AGAIN_S)

    def look(self, agents: AgentPool) -> None:
        """End this process where an agent knows of another launcher, or a claim is found while few are heard."""
        if agents.has_lost_role or (self._newest_claim.value or 0) > self._role.term:
            self.link.lose_role()
        # Agents that could tell may be out of reach, or know us no more: of a newer attempt they refuse our token.
        now = self._clock.monotonic()
        if now - self._looked >= LOOK_AGAIN_S:
            self._looked = now
            if self._is_disputed(agents.silence()):
                self._newest_claim.ask()

    def _is_disputed(self, silence: Mapping[NodeName, Silence]) -> bool:
        """Whether another node may take the role, or may have it, by how few nodes are heard."""
        nodes = () if self.launch is None else (*self.launch.nodes, *self.launch.spares)
        if len(nodes) < 2 or self._here not in {one.node for one in nodes}:  # noqa: PLR2004
            return False  # there is no other, or it is not for nodes of the job to take (`LauncherWatch`)
        return not is_undisputed(len(nodes), sum(silence[one.name].question_s < HEARD_S for one in nodes))

    def _newest_claimed(self) -> int | None:
        with suppress(OSError):
            return self.claims.newest()
        return None

    def _claim(self, *, starts: bool) -> None:
        term = self._role.term + 1
        try:
            is_ours = self.claims.claim(term, launcher_on(self._here))
        except OSError:
            if starts or self.claims.newest() >= term:
                raise
            return  # full, or read-only: it is nobody else's, and no ranks are started
        if not is_ours:
            self.link.lose_role()
        self._role.term = term

    @property
    def attempt(self) -> AttemptState | None:
        """The attempt that was the newest when the launcher before us died; None where there was none."""
        return None if self.before is None else self.before.attempt

    def agents(self, backend: Backend) -> AgentStep:
        """Return the run's agents, which are started where none were."""
        if self.before is not None:
            self._agents = self.before.agents
            return backend.adopt_agents(self._agents, self.link.end_of)
        step = backend.start_agents(self.link.secret)
        if isinstance(step, AgentProcesses):
            self._agents = step.started
        self._file.write(RunState(self._agents, None, self._place))
        return step

    def ranks(
        self, backend: Backend, attempt: AttemptState, command: Sequence[str], reach: Reach
    ) -> RankStep | None:
        """Return the ranks of an attempt, running or not; None where it has none."""
        backend.adopt_slots(attempt.slots, self.link.end_of)
        if not attempt.runs:
            return None
        if attempt.code is not None:
            return EndedRanks(attempt.code)
        place = None if self.before is None else self.before.place
        host = self._here if place is None else place.host
        if attempt.launch.recipe.mpi and host not in {self._here, *(one.node for one in attempt.launch.nodes)}:
            return None  # without their srun, which died with its host, MPI_Finalize hangs until Slurm kills it
        return backend.adopt_ranks(attempt.launch, command, reach)

    def leave(self, attempt: AttemptState, *, soon: bool = False) -> None:
        """Publish the state of the run; `soon`: without waiting for the storage."""
        attempt = replace(attempt, restarted=tuple({*self._restarted, *attempt.restarted}))
        self.launch, place = attempt.launch, replace(self._place, term=self._role.term)
        (self._file.write_soon if soon else self._file.write)(RunState(self._agents, attempt, place))

    def abandon(self) -> None:
        """Let go of agents that were started once more under a launcher before us, without a word to Slurm."""
        for pid in self._restarted:
            abandon_process(AdoptedProcess(pid, self.link.end_of))
