"""The agents of a rank's job, as far as checkpoints go: who holds a run, and what lies on which node's disk.

Asked over plain connections, each question bounded; of a file that comes one piece at a time is in memory. Agents
that keep copies for other nodes ask each other the same way.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import claim_of, is_newer, wire_claim
from deeplink.checkpoints.manifest import CheckpointDamagedError, Manifest
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import read_members
from deeplink.core.types import Attempt, FencedError, NodeName
from deeplink.rpc.plain import PlainCallError, PlainConnection
from deeplink.v1 import common_pb2, keep_pb2

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.manifest import FileEntry
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member

log = logging.getLogger(__name__)

SERVICE: Final = "/deeplink.v1.Keep/"
OWN: Final = "own"
FROM: Final = "from-"
ASK_S: Final = 2.0
TAKE_S: Final = 3600.0
"""The longest that a rank waits for a partner to have a copy."""
TURN_S: Final = 20.0
"""The longest that one answer on the way there may take: agents say every 2 s that it goes on, for 10 s."""
ANSWER_S: Final = 5.0
"""How long an agent may take to say what it has."""
CHECK_S: Final = 600.0
"""How long it may take to read a checkpoint to its last byte."""
STILL_S: Final = 20.0
"""How long a file that comes may stand still."""
SLICE: Final = 64 << 20
"""A call brings so many bytes at most, so that each has a deadline that a dead node cannot hold up for long."""
SLICE_S: Final = 120.0
_MOST_AT_ONCE = 16


class NotFetchedError(DeepLinkError):
    """A checkpoint could not be brought from any node that has it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} could not be fetched: {why}", remedy="The next attempt goes on from what is left."
        )
        self.name, self.why = name, why


def partners(node: NodeName, members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the members that may keep copies for `node`, the first choice first.

    The first choices of all nodes are all different: none keeps for two, and where no failure domain holds more
    than half of the members, each lies in another domain than the node it keeps for. Of the others, those of
    another domain come first, in turn.

    >>> from deeplink.core.types import parse_members
    >>> four = parse_members("a=h:1*1@x,b=h:2*1@x,c=h:3*1@y,d=h:4*1@y")
    >>> [[one.name for one in partners(node, four)] for node in "abcd"]
    [['c', 'd', 'b'], ['d', 'c', 'a'], ['a', 'b', 'd'], ['b', 'a', 'c']]
    """
    domains: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda one: one.name):
        domains.setdefault(member.domain, []).append(member)
    blocks = sorted(domains.values(), key=lambda block: (-len(block), block[0].domain))
    ring = [member for block in blocks for member in block]
    at = next((place for place, member in enumerate(ring) if member.name == node), None)
    if at is None:
        return tuple(ring)
    # A step as long as the largest block leads out of every block, unless that block is more than half of all.
    step = len(blocks[0]) if len(blocks) > 1 else 1
    turn = [ring[(at + step + further) % len(ring)] for further in range(len(ring))]
    others = [member for member in turn if member.name != node]
    return (*others[:1], *sorted(others[1:], key=lambda one: one.domain == ring[at].domain))


def run_of(folder: Path) -> str:
    """Return the name that agents have for a folder of checkpoints."""
    return f"{xxhash.xxh3_128_intdigest(str(folder.absolute()).encode()):032x}"


# -- what a node has


@dataclass(frozen=True, slots=True)
class There:
    """A checkpoint, or a part of one, on the disk of a node."""

    node: str
    address: str  # of its agent
    name: str
    origin: str  # `own`, or `from-NODE` where it is kept for another
    manifest: Manifest  # of the whole checkpoint
    text: str  # the manifest as it is written
    absent: frozenset[str]  # paths of the files that are not there

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files that are there."""
        return tuple(entry for entry in self.manifest.files if entry.path not in self.absent)


@dataclass(frozen=True, slots=True)
class Holding:
    """A node's checkpoints of a run, and the run's owner as its agent knows it."""

    node: str
    hold: keep_pb2.HoldReply
    whole: tuple[There, ...]  # or parts of them, as they were saved, as far as was looked
    torn: tuple[tuple[str, str, str], ...]  # name, place and reason of those that are not
    unread: tuple[tuple[str, str, str], ...] = ()  # the same where the disk refuses; an empty name: all there


def held_by(
    connection: PlainConnection, run: str, now: Callable[[], float], *, name: str = "", contents: bool = False
) -> Holding:
    """Return what the node at the other end has of a run; with `contents` every byte is read."""
    request = keep_pb2.HeldRequest(run=run, name=name, contents=contents)
    deadline = now() + (CHECK_S if contents else ANSWER_S)
    reply = keep_pb2.HeldReply.FromString(connection.call(f"{SERVICE}Held", request.SerializeToString(), deadline))
    whole: list[There] = []
    torn: list[tuple[str, str, str]] = []
    unread: list[tuple[str, str, str]] = []
    for one in reply.checkpoints:
        where = place(reply.node, one.origin)
        if one.problem:
            (unread if one.is_unreadable else torn).append((one.name, where, one.problem))
            continue
        try:
            manifest = manifests.manifest_of(one.manifest, Path(where, one.name))
        except CheckpointDamagedError as damaged:
            torn.append((one.name, where, damaged.reason))
            continue
        torn.extend((one.name, where, f"{path} is not what was saved") for path in one.damaged)
        absent = frozenset([*one.absent, *one.damaged])
        whole.append(There(reply.node, connection.address, one.name, one.origin, manifest, one.manifest, absent))
    return Holding(reply.node, reply.hold, tuple(whole), tuple(torn), tuple(unread))


def place(node: str, origin: str) -> str:
    """Return where a checkpoint lies, for people.

    >>> place("n1", "from-n0"), place("n1", "own")
    ("n1's copy for n0", "n1's disk")
    """
    return f"{node}'s disk" if origin == OWN else f"{node}'s copy for {origin.removeprefix(FROM)}"


def fetch_files(
    there: There,
    files: Iterable[FileEntry],
    into: Path,
    *,
    run: str,
    token: str,
    clock: Clock,
    came: Callable[[int], None] = lambda _size: None,
) -> None:
    """Write files of a checkpoint that lies elsewhere into a draft; each is checked as it comes.

    `came` gets the bytes of each piece; it may wait, and so slow the transfer down.
    """
    with PlainConnection(there.address, token, clock) as connection:
        for entry in files:
            target = into / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            digest, size = xxhash.xxh3_64(), 0
            with target.open("wb") as writing:
                while size < entry.bytes:
                    request = keep_pb2.FetchRequest(
                        run=run, name=there.name, origin=there.origin, path=entry.path, offset=size, length=SLICE
                    )
                    before = size
                    for chunk in _chunks(connection, request, clock):
                        digest.update(chunk)
                        writing.write(chunk)
                        size += len(chunk)
                        came(len(chunk))
                    if size == before:
                        break
            if (size, f"{digest.intdigest():016x}") != (entry.bytes, entry.xxh3_64):
                where = place(there.node, there.origin)
                raise CheckpointDamagedError(Path(where, there.name), f"{entry.path} is not what was saved")


def _chunks(connection: PlainConnection, request: keep_pb2.FetchRequest, clock: Clock) -> Iterator[bytes]:
    connection.send(f"{SERVICE}Fetch", request.SerializeToString(), clock.monotonic() + SLICE_S)
    for reply in connection.incoming(patience_s=STILL_S):
        yield keep_pb2.FetchReply.FromString(reply.read(reply.left)).chunk


def choose(
    name: str, wanted: Sequence[FileEntry], places: Iterable[There]
) -> list[tuple[There, list[FileEntry]]] | None:
    """Return which of the wanted files to ask of which place; None if some are nowhere.

    Places with most files come first. Only those that have the first one's manifest are taken together.
    """
    found = [there for there in places if there.name == name]
    left = {entry.path: entry for entry in wanted}
    plan = []
    alike = [there for there in found if there.manifest == found[0].manifest]
    for there in sorted(alike, key=lambda one: len(one.absent)):
        mine = [left.pop(entry.path) for entry in there.files if entry.path in left]
        if mine:
            plan.append((there, mine))
    return None if left or not found else plan


# -- the agents of a job


@dataclass(frozen=True, slots=True)
class RunOwner:
    """The holder of a run, as an agent knows it."""

    newest: Attempt  # of our job
    claim: Claim | None  # the newest on the run
    said_by: Attempt | None  # the attempt whose rank said last where that node's checkpoints lie
    has_own: bool  # whether any attempt ever said so


def _attempt(message: common_pb2.Attempt) -> Attempt:
    return Attempt(message.job, message.restart, message.relaunch)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAgents:
    """The agents of a job, asked on behalf of one rank. Safe to use from several threads."""

    run: str
    attempt: Attempt
    node: str
    here: str  # `host:port` of this node's agent
    members: tuple[Member, ...]  # every node with an agent, those that run ranks first, in rank order
    token_file: Path
    clock: Clock

    @classmethod
    def of_environment(
        cls, env: Mapping[str, str], folder: Path, attempt: Attempt | None, clock: Clock
    ) -> JobAgents | None:
        """Return the agents that a rank with this environment has; None outside of a job of `deeplink run`."""
        here, node, token_file = (
            env.get(name, "") for name in ("DEEPLINK_AGENT", "DEEPLINK_NODE", "DEEPLINK_TOKEN_FILE")
        )
        members = read_members(env.get("DEEPLINK_MEMBERS", ""))
        is_in_job = attempt is not None and str(attempt) == env.get("DEEPLINK_ATTEMPT")
        if attempt is None or not is_in_job or not (here and node and token_file and members):
            return None
        return cls(
            run=run_of(folder),
            attempt=attempt,
            node=node,
            here=here,
            members=members,
            token_file=Path(token_file),
            clock=clock,
        )

    @property
    def first(self) -> str:
        """The address of the agent on the first rank's node, where all ranks meet."""
        return self.members[0].address

    def connection(self, address: str) -> PlainConnection:
        """Return a connection to an agent; close it."""
        return PlainConnection(address, self._token(), self.clock)

    def _token(self) -> str:
        return self.token_file.read_text(encoding="ascii").strip()

    def _our_attempt(self) -> common_pb2.Attempt:
        ours = self.attempt
        return common_pb2.Attempt(job=ours.job, restart=ours.restart, relaunch=ours.relaunch)

    def hold(self, address: str = "", *, folder: Path | None = None, claim: Claim | None = None) -> RunOwner:
        """Ask an agent (empty: this node's) who holds the run; tell it where checkpoints lie here, and a claim."""
        request = keep_pb2.HoldRequest(
            run=self.run,
            attempt=self._our_attempt(),
            folder=str(folder.absolute()) if folder else "",
            claim=wire_claim(claim) if claim else "",
        )
        with self.connection(address or self.here) as connection:
            deadline = self.clock.monotonic() + ASK_S
            reply = connection.call(f"{SERVICE}Hold", request.SerializeToString(), deadline)
        return self.owner(keep_pb2.HoldReply.FromString(reply))

    @staticmethod
    def owner(reply: keep_pb2.HoldReply) -> RunOwner:
        """Read an agent's answer; a claim that cannot be read is none."""
        claim = None
        if reply.claim:
            try:
                claim = claim_of(reply.claim)
            except ValueError as problem:
                log.warning("an agent's claim cannot be read: %s", problem)
        said_by = _attempt(reply.said_by) if reply.HasField("said_by") else None
        return RunOwner(_attempt(reply.newest), claim, said_by, reply.has_own)

    def refuse_if_fenced(self, claim: Claim | None) -> bool:
        """Return whether this node's agent answered; raises FencedError where it knows of a newer attempt."""
        try:
            owner = self.hold()
        except (PlainCallError, OSError) as problem:
            log.debug("this node's agent does not say who holds the run: %s", problem)
            return False
        self.judge(owner, claim)
        return True

    def judge(self, owner: RunOwner, claim: Claim | None) -> None:
        """Raise FencedError if a newer attempt holds the run, as far as an agent knows."""
        if owner.newest > self.attempt:
            raise FencedError(self.attempt, owner.newest, f"job {self.attempt.job}")
        newer = owner.claim
        if claim is not None and newer is not None and is_newer(newer, claim) and newer.attempt != self.attempt:
            raise FencedError(self.attempt, newer.attempt, f"run {self.run}")

    def held(
        self, *, name: str = "", contents: bool = False, among: Iterable[Member] | None = None
    ) -> list[Holding]:
        """Return what the nodes have of the run, all asked side by side; those that do not answer are left out."""
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

    def places(self, name: str) -> list[There]:
        """Return the places that have something of a checkpoint, this node's first."""
        places = [there for holding in self.held(name=name) for there in holding.whole]
        return sorted(places, key=lambda there: there.node != self.node)

    def fetch(self, there: There, files: Iterable[FileEntry], into: Path) -> None:
        """Write files of a checkpoint on another node's disk into a folder."""
        fetch_files(there, files, into, run=self.run, token=self._token(), clock=self.clock)

    def copy_to_partner(self, name: str, claim: Claim, stopped: threading.Event) -> tuple[NodeName | None, str]:
        """Have the first partner that answers keep a copy of this node's checkpoint.

        Return its node, or None and the reason in words. Once `stopped` is set the partner goes on by itself.
        """
        why = "there is no other node"
        for partner in partners(NodeName(self.node), self.members):
            if stopped.is_set():
                return None, "the process ends"
            try:
                reply = self._taken(partner, name, claim, stopped)
            except (PlainCallError, OSError) as problem:
                why = f"{partner.name}: {problem}"
                continue
            if reply.outcome == keep_pb2.TAKE_OUTCOME_FENCED:
                raise FencedError(self.attempt, None, f"{partner.name}: {reply.problem}")
            if reply.outcome == keep_pb2.TAKE_OUTCOME_KEPT:
                return partner.name, ""
            why = f"{partner.name}: {reply.problem}"
            if reply.outcome == keep_pb2.TAKE_OUTCOME_UNDER_WAY:
                break
        return None, why

    def _taken(self, partner: Member, name: str, claim: Claim, stopped: threading.Event) -> keep_pb2.TakeReply:
        request = keep_pb2.TakeRequest(
            run=self.run,
            name=name,
            attempt=self._our_attempt(),
            claim=wire_claim(claim),
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
