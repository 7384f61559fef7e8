"""Ends a rank that has been fenced or whose lease has expired.

Each witness is asked from a thread of its own: a file system that does not answer holds up that thread alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.checkpoints.found import FULL
from deeplink.checkpoints.manifest import CheckpointError
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import read_members
from deeplink.core.types import FencedError, NodeName
from deeplink.rpc.plain import PlainBusyError, PlainCallError, PlainStatusError
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.checkpoints.claims import Claim, Claims
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member

log = logging.getLogger(__name__)

LENGTH_S = 60.0
"""A frozen file system or a restarted agent is shorter; Slurm's own patience with a node (300 s) is longer."""
_ASKED_PER_LEASE = 6
_ASKED_PER_S = 50
"""Ranks of a job ask the shared folder no more often than this, all of them together."""


class LeaseState(Enum):
    """Whether a rank may go on."""

    HELD = "held"
    FENCED = "fenced"
    EXPIRED = "expired"


def pause(length_s: float, world: int) -> float:
    """Return the seconds between two questions to a witness, so that a lease holds several and few ask at once.

    >>> pause(60, 8), pause(60, 1024), pause(60, 100_000)
    (10.0, 20.0, 20.0)
    """
    return min(length_s / 3, max(length_s / _ASKED_PER_LEASE, world / _ASKED_PER_S))


@dataclass(slots=True)
class Lease:
    """Renewed by each answer of a witness: the shared folder, other nodes' agents. No I/O; the caller locks."""

    length_s: float  # how long it holds without an answer
    renewed: float  # by a clock that never goes back, like `looked`
    witnesses: Sequence[str] = ()  # without any it never expires: silence of none says nothing
    fenced_by: str = ""  # the attempt that has taken over, once a witness has said so
    looked: float = float("-inf")

    def renew(self, now: float) -> None:
        """Note that a witness answered, and knew of no newer attempt."""
        self.renewed = max(self.renewed, now)

    def fence(self, by: str) -> None:
        """Note that a witness knows of a newer attempt. That is final."""
        self.fenced_by = self.fenced_by or by

    def standing(self, now: float) -> LeaseState:
        """Return whether the rank may go on at `now`; to be asked many times within a lease."""
        gap, self.looked = now - self.looked, now
        if self.length_s / 3 < gap < float("inf"):
            # No witness was asked in that time: this process stood still itself (Slurm suspends whole jobs).
            self.renewed = min(self.renewed + gap, now)
        if self.fenced_by:
            return LeaseState.FENCED
        if self.witnesses and now - self.renewed > self.length_s:
            return LeaseState.EXPIRED
        return LeaseState.HELD


def end_process(why: str) -> None:
    """End this process at once, with nothing flushed: what it would still write is not wanted."""
    sys.stderr.write(f"deeplink: this rank ends: {why}\n")
    sys.stderr.flush()
    os._exit(FencedError.exit_code)


class FencingGuard:
    """Asks the witnesses from threads of its own until the process ends or `stop` is called.

    The `last_resort` is asked only once the others have been silent for a third of the lease.
    """

    def __init__(
        self,
        witnesses: Sequence[Witness],
        lease: Lease,
        *,
        world: int,
        clock: Clock,
        last_resort: Sequence[Witness] = (),
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.lease = lease
        self._witnesses, self._last_resort, self._clock, self._end = witnesses, last_resort, clock, end
        self._pause_s = pause(lease.length_s, world)
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin; the threads are daemons."""
        for witness in (*self._witnesses, *self._last_resort):
            threading.Thread(target=self._watch, args=(witness,), name="deeplink-witness", daemon=True).start()
        threading.Thread(target=self._judge, name="deeplink-lease", daemon=True).start()

    def stop(self) -> None:
        """Ask no more, and end nothing."""
        self._stopped.set()
        for witness in self._witnesses:
            witness.stop()

    def ask(self, witness: Witness) -> None:
        """Ask one witness, once; no answer is no news."""
        try:
            by = witness.ask()
        except (OSError, DeepLinkError, PlainCallError, ValueError) as problem:
            log.debug("no answer from %s: %s", witness.name, problem)
            return
        with self._lock:
            if by:
                self.lease.fence(by)
            else:
                self.lease.renew(self._clock.monotonic())

    def is_due(self, witness: Witness) -> bool:
        """Tell whether a witness is to be asked now."""
        if witness not in self._last_resort:
            return True
        with self._lock:
            return self._clock.monotonic() - self.lease.renewed > self.lease.length_s / 3

    def judge(self) -> bool:
        """End the process if it must; tell whether it may go on."""
        with self._lock:
            standing = self.lease.standing(self._clock.monotonic())
        if standing is LeaseState.HELD:
            return True
        if not self._stopped.is_set():
            self._stopped.set()
            silent = " and ".join(self.lease.witnesses)
            self._end(
                f"attempt {self.lease.fenced_by} has taken over"
                if standing is LeaseState.FENCED
                else f"cut off: {silent} did not answer for {self.lease.length_s:g} s"
            )
        return False

    def _watch(self, witness: Witness) -> None:
        while not self._stopped.is_set():
            if self.is_due(witness):
                self.ask(witness)
            if self.lease.fenced_by:
                self.judge()
            self._stopped.wait(self._pause_s)

    def _judge(self) -> None:
        while self.judge() and not self._stopped.wait(self._pause_s / 4):
            pass


def guarded(
    witnesses: Sequence[Witness],
    length_s: float,
    *,
    world: int,
    clock: Clock,
    last_resort: Sequence[Witness] = (),
) -> FencingGuard:
    """Start a guard over this process and return it."""
    lease = Lease(length_s, clock.monotonic(), tuple(witness.name for witness in (*witnesses, *last_resort)))
    guard = FencingGuard(witnesses, lease, world=world, clock=clock, last_resort=last_resort)
    guard.start()
    return guard


# -- witnesses


class Witness(Protocol):
    """A source outside of this process whose answer shows that it is not cut off."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def ask(self) -> str:
        """Return the attempt that has taken over; empty while there is none."""
        ...

    def stop(self) -> None:
        """Note that nothing is asked any more."""
        log.debug("%s is not asked any more", self.name)


@dataclass(frozen=True, slots=True)
class FolderWitness(Witness):
    """The folder of checkpoints: it answers, and its newest claim is ours."""

    claims: Claims
    claim: Claim
    leaves_sign: bool = False  # that the holder's ranks are at work, too; one rank does

    @property
    @override
    def name(self) -> str:
        return str(self.claims.folder.parent)

    @override
    def ask(self) -> str:
        newest = self._newest()
        if newest == self.claim.number and self.leaves_sign:
            self.claims.leave_sign(newest)
        if newest <= self.claim.number:  # below: claims were removed, which says nothing about us
            return ""
        by = self.claims.read(newest).attempt
        if by is not None and by == self.claim.attempt:  # another rank had to claim once more
            return ""
        return str(by) if by else "a process outside of a job"

    @override
    def stop(self) -> None:
        if self.leaves_sign:
            self.claims.remove_sign(self.claim.number)

    def _newest(self) -> int:
        try:
            return self.claims.newest_number()
        except OSError as problem:
            if problem.errno not in FULL:
                raise
            return max(self.claims.numbers(), default=0)  # full, and so refusing a probe, is an answer


@dataclass(slots=True)
class AgentsWitness(Witness):
    """The agents of the job's other nodes, asked in turn: that one answers shows that this node is not cut off.

    They say who has taken over, too: that needs no shared storage.
    """

    members: Sequence[Member]
    agents: JobAgents
    _turn: int = 0

    name = "the other nodes' agents"

    @override
    def ask(self) -> str:
        address = self.members[self._turn % len(self.members)].address
        self._turn += 1
        try:
            newest = self.agents.hold(address).newest
        except (PlainBusyError, PlainStatusError):  # that it is busy, or what it refuses, is an answer, too
            return ""
        return str(newest) if newest > self.agents.attempt else ""


@dataclass(frozen=True, slots=True)
class ControllerWitness(Witness):
    """Proves for a job of one node that no other attempt has started, while its shared storage is frozen.

    A later attempt within the allocation is the launcher's, and this node's agent knows of it. A later run is
    Slurm's: its controller must say that the job runs, here, and was not started again since. Both must answer.
    """

    agents: JobAgents
    slurm: Slurm

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
            where = ", ".join(row.nodes) or "no node"
            raise CheckpointError(f"Slurm has job {attempt.job} as {row.state.value} on {where}")
        return ""


def witnesses_of(env: Mapping[str, str], claims: Claims, claim: Claim, agents: JobAgents | None) -> list[Witness]:
    """Return the witnesses of a rank with this environment, whose attempt holds the folder with `claim`."""
    found: list[Witness] = [FolderWitness(claims, claim, leaves_sign=env.get("RANK", "0") == "0")]
    others = other_members(env)
    if others and agents is not None:
        found.append(AgentsWitness(others, agents))
    return found


def other_members(env: Mapping[str, str]) -> list[Member]:
    """Return the job's other nodes, from this one's place on: else all ranks asked the same one at once."""
    everyone = read_members(env.get("DEEPLINK_MEMBERS", ""))
    names = [member.name for member in everyone]
    here = env.get("DEEPLINK_NODE", "")
    if here not in names:
        return list(everyone)
    at = names.index(NodeName(here))
    return [*everyone[at + 1 :], *everyone[:at]]


def last_resort_of(env: Mapping[str, str], agents: JobAgents | None) -> list[Witness]:
    """Return the witness to ask only when the others are silent: Slurm, for a job of one node in a Slurm job."""
    if agents is None or other_members(env) or env.get("SLURM_JOB_ID") != str(agents.attempt.job):
        return []
    return [ControllerWitness(agents, Slurm())]
