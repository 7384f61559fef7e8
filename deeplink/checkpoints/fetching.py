"""Checkpoints brought from another node's disk: what it has, and its files, over a plain connection.

Used by ranks at a restart, and by agents that keep copies for others. Bounded: one piece at a time is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.manifest import CheckpointDamagedError, Manifest
from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainConnection
from deeplink.v1 import keep_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from deeplink.checkpoints.manifest import FileEntry
    from deeplink.clock import Clock

SERVICE: Final = "/deeplink.v1.Keep/"
OWN: Final = "own"
FROM: Final = "from-"
ANSWER_S: Final = 5.0
"""How long an agent may take to say what it has."""
CHECK_S: Final = 600.0
"""How long it may take to read a checkpoint to its last byte."""
STILL_S: Final = 20.0
"""How long a file that comes may stand still."""
SLICE: Final = 64 << 20
"""A call brings so many bytes at most, so that each has a deadline that a dead node cannot hold up for long."""
SLICE_S: Final = 120.0


class NotFetchedError(DeepLinkError):
    """A checkpoint could not be brought from any node that has it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} could not be fetched: {why}", remedy="The next attempt goes on from what is left."
        )
        self.name, self.why = name, why


@dataclass(frozen=True, slots=True)
class There:
    """A checkpoint, or a part of one, on the disk of a node.

    Attributes:
        node: the node.
        address: of its agent.
        name: of the checkpoint.
        origin: `own`, or `from-NODE` where it is kept for another.
        manifest: of the whole checkpoint.
        text: the manifest as it is written.
        absent: paths of the files that are not there.
    """

    node: str
    address: str
    name: str
    origin: str
    manifest: Manifest
    text: str
    absent: frozenset[str]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files that are there."""
        return tuple(entry for entry in self.manifest.files if entry.path not in self.absent)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a node has of a run.

    Attributes:
        node: the node.
        hold: who holds the run, as its agent knows.
        whole: checkpoints, or parts of them, as they were saved, as far as was looked.
        torn: name, place and reason of those that are not.
        unread: the same of those that the node's disk does not let be read; an empty name stands for all there.
    """

    node: str
    hold: keep_pb2.HoldReply
    whole: tuple[There, ...]
    torn: tuple[tuple[str, str, str], ...]
    unread: tuple[tuple[str, str, str], ...] = ()


def held_by(
    connection: PlainConnection, run: str, now: Callable[[], float], *, name: str = "", contents: bool = False
) -> Holding:
    """Return what the node at the other end has of a run.

    Args:
        connection: to its agent.
        run: which.
        now: the time that the connection's deadlines are of.
        name: look at this checkpoint alone.
        contents: have every byte read.

    Raises:
        PlainCallError: no answer.
    """
    request = keep_pb2.HeldRequest(run=run, name=name, contents=contents)
    deadline = now() + (CHECK_S if contents else ANSWER_S)
    reply = keep_pb2.HeldReply.FromString(connection.call(f"{SERVICE}Held", request.SerializeToString(), deadline))
    whole: list[There] = []
    torn: list[tuple[str, str, str]] = []
    unread: list[tuple[str, str, str]] = []
    for one in reply.checkpoints:
        where = place(reply.node, one.origin)
        try:
            if one.problem:
                (unread if one.is_unreadable else torn).append((one.name, where, one.problem))
                continue
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
    """Write files of a checkpoint that lies elsewhere into a folder; each is checked as it comes.

    Args:
        there: where it lies.
        files: which.
        into: the folder, of a draft.
        run: what it is of.
        token: of the agent.
        clock: where time comes from.
        came: told the bytes of each piece; may wait, and so slow it down.

    Raises:
        PlainCallError: the node did not send it all.
        CheckpointDamagedError: what came is not what was saved.
        OSError: this node's disk refuses.
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
    """Return whom to ask for which of the wanted files, those who have most first; None if some are nowhere.

    Only places that have the same manifest are taken together: the first one's.
    """
    found = [there for there in places if there.name == name]
    if not found:
        return None
    manifest = found[0].manifest
    left = {entry.path: entry for entry in wanted}
    plan = []
    alike = [there for there in found if there.manifest == manifest]
    for there in sorted(alike, key=lambda one: len(one.absent)):
        mine = [left.pop(entry.path) for entry in there.files if entry.path in left]
        if mine:
            plan.append((there, mine))
    return None if left else plan
