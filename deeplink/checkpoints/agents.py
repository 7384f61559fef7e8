"""The agents of a rank's job, as far as checkpoints go: asked over plain connections, each question bounded."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from deeplink.checkpoints.claims import claim_of, is_newer
from deeplink.checkpoints.copies import said
from deeplink.checkpoints.fetching import SERVICE, STILL_S, Holding, fetch_files, held_by
from deeplink.checkpoints.partners import partners
from deeplink.plainrpc import PlainCallError, PlainConnection, PlainStatusError, Status
from deeplink.types import Attempt, FencedError, NodeName, parse_members
from deeplink.v1 import common_pb2, keep_pb2

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.fetching import There
    from deeplink.checkpoints.manifest import FileEntry
    from deeplink.clock import Clock
    from deeplink.types import Member

log = logging.getLogger(__name__)

ASK_S: Final = 2.0
TAKE_S: Final = 3600.0
"""The longest that a rank waits for a partner to have a copy."""
TURN_S: Final = 20.0
"""The longest that one answer on the way there may take: agents say every 2 s that it goes on, for 10 s."""
_MOST_AT_ONCE = 16


def run_of(folder: Path) -> str:
    """Return what a folder of checkpoints is called between agents."""
    return f"{xxhash.xxh3_128_intdigest(str(folder.absolute()).encode()):032x}"


@dataclass(frozen=True, slots=True)
class RunOwner:
    """Who holds a run, as an agent knows.

    Attributes:
        newest: newest attempt of our job.
        claim: newest claim on the run; None for none.
        said_by: the attempt whose rank last said where that node's checkpoints lie; None for none.
        has_own: whether any attempt ever said so.
    """

    newest: Attempt
    claim: Claim | None
    said_by: Attempt | None
    has_own: bool


def _standing(reply: keep_pb2.HoldReply) -> RunOwner:
    claim = None
    if reply.claim:
        try:
            claim = claim_of(reply.claim)
        except ValueError as problem:
            log.warning("an agent's claim cannot be read: %s", problem)
    said_by = _attempt(reply.said_by) if reply.HasField("said_by") else None
    return RunOwner(_attempt(reply.newest), claim, said_by, reply.has_own)


def _attempt(message: common_pb2.Attempt) -> Attempt:
    return Attempt(message.job, message.restart, message.relaunch)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAgents:
    """The agents of a job, asked on behalf of one rank. Safe to use from several threads.

    Attributes:
        run: what the checkpoints are of.
        attempt: of this rank.
        node: this rank's node.
        here: `host:port` of this node's agent.
        members: every node of the job that has an agent, those that run ranks first, in rank order.
        token_file: holds what calls carry.
        clock: where time comes from.
    """

    run: str
    attempt: Attempt
    node: str
    here: str
    members: tuple[Member, ...]
    token_file: Path
    clock: Clock

    @classmethod
    def of_environment(
        cls, env: Mapping[str, str], folder: Path, attempt: Attempt | None, clock: Clock
    ) -> JobAgents | None:
        """Return the agents that a rank with this environment has; None outside of a job of `deeplink run`.

        Raises:
            ValueError: DEEPLINK_MEMBERS is malformed.
        """
        named = [env.get(name, "") for name in ("DEEPLINK_AGENT", "DEEPLINK_NODE", "DEEPLINK_TOKEN_FILE")]
        members = parse_members(env.get("DEEPLINK_MEMBERS", ""))
        if attempt is None or not all(named) or str(attempt) != env.get("DEEPLINK_ATTEMPT") or not members:
            return None
        return cls(
            run=run_of(folder),
            attempt=attempt,
            here=named[0],
            node=named[1],
            token_file=Path(named[2]),
            members=members,
            clock=clock,
        )

    @property
    def first(self) -> str:
        """Where the agent of the first rank's node answers: there all ranks meet."""
        return self.members[0].address

    def token(self) -> str:
        """Return what calls carry.

        Raises:
            OSError: it cannot be read.
        """
        return self.token_file.read_text(encoding="ascii").strip()

    def connection(self, address: str) -> PlainConnection:
        """Return a connection to an agent; close it.

        Raises:
            PlainSilentError: the address cannot be used.
            OSError: the token cannot be read.
        """
        return PlainConnection(address, self.token(), self.clock)

    def hold(
        self,
        address: str = "",
        *,
        folder: Path | None = None,
        claim: Claim | None = None,
        patience_s: float = ASK_S,
    ) -> RunOwner:
        """Ask an agent who holds the run, and tell it what is given.

        Args:
            address: of the agent; empty: this node's.
            folder: where this node's checkpoints lie.
            claim: who holds the run.
            patience_s: how long to wait.

        Raises:
            PlainCallError, OSError: no answer.
        """
        request = keep_pb2.HoldRequest(
            run=self.run,
            attempt=common_pb2.Attempt(
                job=self.attempt.job, restart=self.attempt.restart, relaunch=self.attempt.relaunch
            ),
            folder=str(folder.absolute()) if folder else "",
            claim=said(claim) if claim else "",
        )
        with self.connection(address or self.here) as connection:
            deadline = self.clock.monotonic() + patience_s
            reply = connection.call(f"{SERVICE}Hold", request.SerializeToString(), deadline)
        return self.standing(keep_pb2.HoldReply.FromString(reply))

    @staticmethod
    def standing(reply: keep_pb2.HoldReply) -> RunOwner:
        """Read an agent's answer; a claim that cannot be read is none."""
        return _standing(reply)

    def refuse_if_fenced(self, claim: Claim | None) -> bool:
        """Return whether this node's agent answered, and knows of nobody newer.

        Raises:
            FencedError: it does.
        """
        try:
            standing = self.hold()
        except (PlainCallError, OSError) as problem:
            log.debug("this node's agent does not say who holds the run: %s", problem)
            return False
        self.judge(standing, claim)
        return True

    def judge(self, standing: RunOwner, claim: Claim | None) -> None:
        """Return if nobody newer holds the run, as far as an agent knows.

        Raises:
            FencedError: somebody does.
        """
        if standing.newest > self.attempt:
            raise FencedError(self.attempt, standing.newest, f"job {self.attempt.job}")
        newer = standing.claim
        if claim is not None and newer is not None and is_newer(newer, claim) and newer.attempt != self.attempt:
            raise FencedError(self.attempt, newer.attempt, f"run {self.run}")

    def held(
        self, *, name: str = "", contents: bool = False, among: Iterable[Member] | None = None
    ) -> list[Holding]:
        """Return what the nodes have of the run, all asked side by side; those that do not answer are left out.

        Args:
            name: of one checkpoint; empty: all.
            contents: have every byte read.
            among: whom to ask; None: all.
        """
        asked = tuple(self.members if among is None else among)

        def ask(member: Member) -> Holding | None:
            try:
                with self.connection(member.address) as connection:
                    return held_by(connection, self.run, self.clock.monotonic, name=name, contents=contents)
            except (PlainCallError, OSError) as problem:
                log.warning("what node %s has of the checkpoints is not known: %s", member.name, problem)
                return None

        with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(asked)))) as pool:
            return [found for found in pool.map(ask, asked) if found is not None]

    def fetch(self, there: There, files: Iterable[FileEntry], into: Path) -> None:
        """Write files of a checkpoint on another node's disk into a folder.

        Raises:
            PlainCallError, CheckpointDamagedError, OSError: see `fetch_files`.
        """
        fetch_files(there, files, into, run=self.run, token=self.token(), clock=self.clock)

    def copy_to_partner(self, name: str, claim: Claim, stopped: threading.Event) -> str:
        """Have a partner fetch this node's checkpoint of a name and keep it; return whose node it is, or why not.

        The partner of first choice that answers takes it.

        Args:
            name: of the checkpoint.
            claim: that it is of.
            stopped: set when nobody waits any more; the partner goes on by itself.

        Returns:
            `n3`, or the reason in words behind a `!`.

        Raises:
            FencedError: a newer attempt has begun.
        """
        why = "there is no other node"
        for partner in partners(NodeName(self.node), self.members):
            if stopped.is_set():
                return "!the process ends"
            try:
                reply = self._taken(partner, name, claim, stopped)
            except (PlainCallError, OSError) as problem:
                why = f"{partner.name}: {problem}"
                if isinstance(problem, PlainStatusError) and problem.code == Status.UNIMPLEMENTED:
                    why = f"{partner.name} keeps no copies"
                continue
            if reply.outcome == keep_pb2.TAKE_OUTCOME_FENCED:
                raise FencedError(self.attempt, None, f"{partner.name}: {reply.problem}")
            if reply.outcome == keep_pb2.TAKE_OUTCOME_KEPT:
                return str(partner.name)
            why = f"{partner.name}: {reply.problem}"
            if reply.outcome == keep_pb2.TAKE_OUTCOME_UNDER_WAY:
                return f"!{why}"
        return f"!{why}"

    def _taken(self, partner: Member, name: str, claim: Claim, stopped: threading.Event) -> keep_pb2.TakeReply:
        request = keep_pb2.TakeRequest(
            run=self.run,
            name=name,
            attempt=common_pb2.Attempt(
                job=self.attempt.job, restart=self.attempt.restart, relaunch=self.attempt.relaunch
            ),
            claim=said(claim),
            node=self.node,
            source=self.here,
        )
        last = keep_pb2.TakeReply(problem="it said nothing")
        until = self.clock.monotonic() + TAKE_S
        with self.connection(partner.address) as connection:
            while last.outcome == keep_pb2.TAKE_OUTCOME_UNDER_WAY and self.clock.monotonic() < until:
                connection.send(f"{SERVICE}Take", request.SerializeToString(), self.clock.monotonic() + TURN_S)
                for reply in connection.incoming(patience_s=STILL_S):
                    last = keep_pb2.TakeReply.FromString(reply.read(reply.left))
                    if stopped.is_set():
                        return last
        return last
