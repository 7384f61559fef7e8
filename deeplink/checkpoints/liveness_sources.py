"""Sources that tell a rank whether its attempt is still current: the shared folder, other agents, Slurm."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainBusyError, PlainConnection, PlainStatusError
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.types import NodeName, parse_members

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.checkpoints.claims import Claim, Claims
    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.types import Member

_HEALTH = "/grpc.health.v1.Health/Check"
_CALL_TIMEOUT_S = 2.0
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Witness(Protocol):
    """Somebody outside of this process whose answer shows that it is not cut off."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        ...

    def ask(self) -> str:
        """Return who has taken over; empty while nobody has.

        Raises:
            OSError, DeepLinkError: no answer.
        """
        ...

    def rest(self) -> None:
        """Be told that nothing is asked any more."""


@dataclass(frozen=True, slots=True)
class FolderWitness(Witness):
    """The folder of checkpoints: it answers, and its newest claim is ours.

    Attributes:
        beats: leave a sign there that the holder's ranks are at work, too; one rank does.
    """

    claims: Claims
    claim: Claim
    beats: bool = False

    @property
    @override
    def name(self) -> str:
        return str(self.claims.folder.parent)

    @override
    def ask(self) -> str:
        newest = self._newest()
        if newest == self.claim.number and self.beats:
            self.claims.beat(newest)
        if newest < self.claim.number:  # somebody removed claims: that says nothing about us
            return ""
        if newest == self.claim.number:
            return ""
        by = self.claims.read(newest).attempt
        if by is not None and by == self.claim.attempt:  # another rank had to claim once more
            return ""
        return str(by) if by else "a process outside of a job"

    @override
    def rest(self) -> None:
        if self.beats:
            self.claims.rest(self.claim.number)

    def _newest(self) -> int:
        try:
            return self.claims.newest_number()
        except OSError as problem:
            if problem.errno not in _FULL:
                raise
            return max(self.claims.numbers(), default=0)  # full, and so refusing a probe, is an answer


class AgentsWitness(Witness):
    """The agents of the job's other nodes, asked in turn: that one answers shows that this node is not cut off.

    Agents that know of checkpoints say who has taken over, too: that needs no shared storage.

    Args:
        members: the other nodes.
        token_file: what calls carry.
        clock: where time comes from.
        agents: asked who holds the run; None: only whether they answer.
    """

    name = "the other nodes' agents"

    def __init__(
        self, members: Sequence[Member], token_file: Path, clock: Clock, agents: JobAgents | None = None
    ) -> None:
        self._members, self._token_file, self._clock, self._agents = members, token_file, clock, agents
        self._turn = 0

    @override
    def ask(self) -> str:
        member = self._members[self._turn % len(self._members)]
        self._turn += 1
        try:
            return self._asked(member.address)
        except PlainBusyError:  # thousands of ranks ask: that it says so is an answer
            return ""

    def _asked(self, address: str) -> str:
        if self._agents is not None:
            return _taken_over(self._agents, address)
        token = self._token_file.read_text(encoding="ascii").strip()
        with PlainConnection(address, token, self._clock) as connection:
            connection.call(_HEALTH, b"", self._clock.monotonic() + _CALL_TIMEOUT_S)
        return ""

    @override
    def rest(self) -> None:
        pass


def _taken_over(agents: JobAgents, address: str) -> str:
    try:
        newest = agents.hold(address).newest
    except PlainStatusError:  # of an older release: it answers, and knows nothing of it
        return ""
    return str(newest) if newest > agents.attempt else ""


class NotOursError(DeepLinkError):
    """Slurm does not say that this node runs the job."""

    def __init__(self, job: int, state: str) -> None:
        super().__init__(f"Slurm has job {job} as {state}")
        self.job, self.state = job, state


class Controller(Protocol):
    """Who knows which jobs run where: `Slurm`."""

    def job(self, job: int) -> JobRow:
        """Return one job.

        Raises:
            DeepLinkError: it is not known, or nobody answers.
        """
        ...


@dataclass(frozen=True, slots=True)
class ControllerWitness(Witness):
    """What proves for a job of one node that nobody else has started it, while its shared storage is frozen.

    A later attempt within the allocation is the launcher's, and this node's agent is told of it. A later run is
    Slurm's: its controller must say that the job runs, here, and was not started again since. Both are asked, and
    both must answer.

    Attributes:
        agents: of the job.
        slurm: its commands.
    """

    agents: JobAgents
    slurm: Controller

    @property
    @override
    def name(self) -> str:
        return "Slurm's controller"

    @override
    def ask(self) -> str:
        attempt = self.agents.attempt
        newest = self.agents.hold().newest
        if newest > attempt:
            return str(newest)
        row = self.slurm.job(attempt.job)
        if row.restarts > attempt.restart:
            return f"{attempt.job}.{row.restarts}.0"
        if row.state is not JobState.RUNNING or self.agents.node not in row.nodes:
            raise NotOursError(attempt.job, f"{row.state.value} on {', '.join(row.nodes) or 'no node'}")
        return ""

    @override
    def rest(self) -> None:
        pass


def witnesses_of(
    env: Mapping[str, str], claims: Claims, claim: Claim, clock: Clock, agents: JobAgents | None = None
) -> list[Witness]:
    """Return whom a rank with this environment can ask.

    Args:
        env: the rank's environment.
        claims: of the shared folder.
        claim: that this attempt holds it with.
        clock: where time comes from.
        agents: of the job, where they know of checkpoints.

    Raises:
        ValueError: DEEPLINK_MEMBERS is malformed.
    """
    found: list[Witness] = [FolderWitness(claims, claim, beats=env.get("RANK", "0") == "0")]
    others = other_members(env)
    if others and env.get("DEEPLINK_TOKEN_FILE"):
        found.append(AgentsWitness(others, Path(env["DEEPLINK_TOKEN_FILE"]), clock, agents))
    return found


def other_members(env: Mapping[str, str]) -> list[Member]:
    """Return the job's other nodes, in turn from this one's place on: else all ranks asked the same one at once.

    Raises:
        ValueError: DEEPLINK_MEMBERS is malformed.
    """
    everyone = parse_members(env.get("DEEPLINK_MEMBERS", ""))
    names = [member.name for member in everyone]
    here = env.get("DEEPLINK_NODE", "")
    if here not in names:
        return list(everyone)
    at = names.index(NodeName(here))
    return [*everyone[at + 1 :], *everyone[:at]]


def last_resort_of(env: Mapping[str, str], agents: JobAgents | None) -> list[Witness]:
    """Return whom to ask only when the others are silent: Slurm, for a job of one node in a Slurm job."""
    if agents is None or other_members(env) or env.get("SLURM_JOB_ID") != str(agents.attempt.job):
        return []
    return [ControllerWitness(agents, Slurm())]
