"""Saves by several ranks: they exchange messages in files or through an agent; rank 0 publishes the whole.

    .draft-step-0000000120.a3-<session and count>/          all ranks write their files here
        .parts/done-00002                                   rank 2's are written; what they are
        .parts/plan-00002, ...                              messages before that

No process group is used, so a save can go on beside training. A rank that dies in between is missed after a while:
rank 0 then removes the draft. Should rank 0 itself die, the draft is no checkpoint. Messages are values of
`saving.proto`, checked where they arrive.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Self, TypeVar

from google.protobuf.message import DecodeError, Message
from typing_extensions import override

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.agents import SERVICE
from deeplink.checkpoints.claims import CheckpointName, fresh_names
from deeplink.checkpoints.manifest import CheckpointError, FileEntry, is_below
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import fsync_path, write_unsynced
from deeplink.core.text import listed
from deeplink.rpc.plain import PlainBusyError, PlainSilentError
from deeplink.v1 import keep_pb2, saving_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.core.clock import Clock

FOLDER: Final = ".parts"
FAILED: Final = "failed"
"""The kind of message of a rank that gives up; ranks that wait for others see it."""
PATIENCE_S = 600.0
"""How long rank 0 waits for the others' parts; they write as much as it does, on storage as slow."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_CHECK_EVERY_S = 5.0
MOST_BOARDS: Final = 8
MOST_BOARD_BYTES: Final = 256 << 20
MOST_PIECE: Final = 48 << 10
"""Longer messages go in several pieces; a request has 60,000 bytes at most (`rpc.plain`)."""
_CALL_S: Final = 5.0
_RETRY_S: Final = 20.0
"""An agent that does not answer for so long is gone."""
_AGAIN_S = 0.2
MOST_NUMBER: Final = 1 << 20
"""Of a list's element in a state: an unpacked list is as long as its highest number says."""
MOST_STEPS: Final = 64
_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")

M = TypeVar("M", bound=Message)


class SaveAbandonedError(DeepLinkError):
    """Another rank did not do its part of a checkpoint, in time or at all; it is not published."""

    def __init__(
        self, draft: Path, why: str, remedy: str = "The log of that rank says why.", *, by_rank: bool = False
    ) -> None:
        super().__init__(f"{draft.name}: {why}; not published", remedy=remedy)
        self.by_rank = by_rank  # a rank said that it failed: no rank takes the checkpoint for whole


def unusable(rank: int, why: str) -> CheckpointError:
    """Return the error of a message that no rank sends; nothing is published."""
    return CheckpointError(
        f"what rank {rank} said of its part of a checkpoint is not usable: {why}",
        remedy="All ranks need the same version of DeepLink; nobody else should have the job's token.",
    )


@dataclass(frozen=True, slots=True)
class SaveGroup:
    """The ranks that save together, and this one among them."""

    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of the ranks of one save, as files in its draft."""

    draft: Path  # becomes the checkpoint
    group: SaveGroup
    clock: Clock
    check: Callable[[], None]  # raises FencedError; called now and then while waiting
    patience_s: float = PATIENCE_S

    has_own_draft: ClassVar = False  # of this node's; else rank 0's, which all ranks share

    def __enter__(self) -> Self:
        """Make the folder, unless another rank was quicker."""
        (self.draft / FOLDER).mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others of a failure, so that they do not wait for what will not come."""
        if error is None:
            return
        with suppress(DeepLinkError, OSError):
            self.put(FAILED, str(error).encode())
        if self.has_own_draft or self.group.rank == 0:
            shutil.rmtree(self.draft, ignore_errors=True)

    def put(self, kind: str, data: bytes) -> None:
        """Send a message to the others; whole or not at all."""
        if not self.draft.exists():
            raise SaveAbandonedError(self.draft, "rank 0 gave up")
        write_unsynced(self._path(kind, self.group.rank), data)

    def take(self, kind: str, *, of: int) -> bytes:
        """Wait for rank `of`'s message and return it."""
        self._wait(kind, [of])
        return self._message(kind, of)

    def gather(self, kind: str) -> list[bytes]:
        """Wait for every rank's message and return them in the ranks' order."""
        everyone = range(self.group.world)
        self._wait(kind, everyone)
        return [self._message(kind, rank) for rank in everyone]

    def _path(self, kind: str, rank: int) -> Path:
        return self.draft / FOLDER / f"{kind}-{rank:05d}"

    def _message(self, kind: str, rank: int) -> bytes:
        return self._path(kind, rank).read_bytes()

    def _wait(self, kind: str, ranks: Sequence[int]) -> None:
        began = checked = self.clock.monotonic()
        pause = _FIRST_PAUSE_S
        while missing := self._missing(kind, ranks):
            now = self.clock.monotonic()
            if now - began > self.patience_s:
                raise SaveAbandonedError(
                    self.draft,
                    f"nothing from rank {listed(missing)} within {self.patience_s:g} s ({kind})",
                    "Every rank must save the same steps. A rank that died is restarted with all others.",
                )
            if now - checked > _CHECK_EVERY_S:
                self.check()
                checked = now
            self.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _missing(self, kind: str, ranks: Sequence[int]) -> list[int]:
        """Return the ranks without such a message yet; raises where a rank has given up."""
        there = fresh_names(self.draft / FOLDER)
        missing = [rank for rank in ranks if self._path(kind, rank).name not in there]
        if missing and (failed := sorted(name for name in there if name.startswith(f"{FAILED}-"))):
            why = (self.draft / FOLDER / failed[0]).read_text(encoding="utf-8", errors="replace")
            rank = int(failed[0].removeprefix(f"{FAILED}-"))
            raise SaveAbandonedError(self.draft, f"rank {rank} failed: {why}", by_rank=True)
        if missing and not self.draft.exists():
            raise SaveAbandonedError(self.draft, "rank 0 gave up")
        return missing


@dataclass(frozen=True, slots=True)
class Board(Exchange):
    """The messages of ranks that save on their own nodes' disks, through the first node's agent."""

    agents: JobAgents = field(kw_only=True)
    name: str = field(kw_only=True)  # the same on all ranks, and no other save's

    has_own_draft: ClassVar = True

    @override
    def __enter__(self) -> Self:
        self.draft.mkdir(exist_ok=True)
        return self

    @override
    def put(self, kind: str, data: bytes) -> None:
        pieces = max(1, -(-len(data) // MOST_PIECE))
        for piece in range(pieces):
            request = keep_pb2.TellRequest(
                board=self.name,
                kind=kind,
                rank=self.group.rank,
                piece=piece,
                pieces=pieces,
                data=data[piece * MOST_PIECE : (piece + 1) * MOST_PIECE],
            )
            self._called("Tell", request)

    @override
    def _message(self, kind: str, rank: int) -> bytes:
        reply = self._heard(kind, [rank])
        if not reply.words:
            raise SaveAbandonedError(self.draft, "the agent was started again, and forgot what ranks said")
        return reply.words[0]

    @override
    def _missing(self, kind: str, ranks: Sequence[int]) -> list[int]:
        reply = self._heard(kind)
        missing = sorted(set(ranks).difference(reply.spoke))
        if missing and reply.failed:
            why = f"rank {reply.failed[0]} failed: {reply.failure}"
            raise SaveAbandonedError(self.draft, why, by_rank=True)
        return missing

    def _heard(self, kind: str, ranks: Sequence[int] = ()) -> keep_pb2.HearReply:
        request = keep_pb2.HearRequest(board=self.name, kind=kind, ranks=ranks)
        return keep_pb2.HearReply.FromString(self._called("Hear", request))

    def _called(self, method: str, request: Message) -> bytes:
        until = self.clock.monotonic() + _RETRY_S
        while True:
            try:
                with self.agents.connection(self.agents.first) as connection:
                    deadline = self.clock.monotonic() + _CALL_S
                    return connection.call(f"{SERVICE}{method}", request.SerializeToString(), deadline)
            except (PlainSilentError, PlainBusyError):
                if self.clock.monotonic() > until:
                    raise
            self.clock.sleep(_AGAIN_S)


def finish_part(exchange: Exchange, files: list[Path]) -> None:
    """Bring this rank's files to stable storage and tell rank 0 what they are."""
    written = []
    for path in files:
        fsync_path(path)
        below = path.relative_to(exchange.draft).as_posix()
        written.append(FileEntry(below, path.stat().st_size, manifests.checksum(path)))
    exchange.put("done", files_message(written))


def collect_parts(exchange: Exchange) -> tuple[FileEntry, ...]:
    """Return what all ranks wrote, once they have; leaves nothing in the draft but that."""
    written = all_files(exchange.gather("done"))
    shutil.rmtree(exchange.draft / FOLDER)
    manifests.check_files(exchange.draft, written, contents=False)
    remove_others(exchange.draft, {entry.path for entry in written})
    return written


def remove_others(draft: Path, expected: set[str]) -> None:
    """Remove the files of a draft that a rank of an earlier, torn save may have left."""
    for path in list(draft.rglob("*")):
        if path.is_file() and path.relative_to(draft).as_posix() not in expected:
            path.unlink()


# -- what an agent keeps of a `Board`'s messages


@dataclass(slots=True)
class _Pieces:
    count: int
    data: dict[int, bytes] = field(default_factory=dict)

    def joined(self) -> bytes:
        return b"".join(data for _, data in sorted(self.data.items()))


class Boards:
    """Messages of ranks that save together, in memory and bounded; the oldest save's are dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boards: OrderedDict[str, dict[tuple[str, int], _Pieces]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def tell(self, request: keep_pb2.TellRequest) -> None:
        """Keep a piece of a message; raises OverflowError where it is too much, ValueError where it is none."""
        if not request.board or request.piece >= request.pieces or len(request.data) > MOST_PIECE:
            raise ValueError(f"piece {request.piece} of {request.pieces}, {len(request.data)} bytes")
        with self._lock:
            board = self._boards.setdefault(request.board, {})
            size = self._sizes.get(request.board, 0) + len(request.data)
            if size > MOST_BOARD_BYTES:
                raise OverflowError(f"ranks that save together said more than {MOST_BOARD_BYTES} bytes")
            pieces = board.setdefault((request.kind, request.rank), _Pieces(request.pieces))
            if request.piece not in pieces.data:
                self._sizes[request.board] = size
            pieces.data[request.piece] = request.data
            while len(self._boards) > MOST_BOARDS:
                oldest, _ = self._boards.popitem(last=False)
                del self._sizes[oldest]

    def hear(self, request: keep_pb2.HearRequest) -> keep_pb2.HearReply:
        """Return the messages of a kind."""
        with self._lock:
            board = self._boards.get(request.board, {})
            whole = {
                rank: pieces
                for (kind, rank), pieces in board.items()
                if kind == request.kind and len(pieces.data) == pieces.count
            }
            failed = sorted(rank for kind, rank in board if kind == FAILED)
            reply = keep_pb2.HearReply(spoke=sorted(whole), failed=failed)
            if failed:
                reply.failure = board[FAILED, failed[0]].joined().decode(errors="replace")
            if all(rank in whole for rank in request.ranks):
                reply.words.extend(whole[rank].joined() for rank in request.ranks)
            return reply


# -- messages, as values


def parsed(kind: type[M], data: bytes, rank: int) -> M:
    """Return a message of rank `rank`."""
    try:
        return kind.FromString(data)
    except DecodeError as problem:
        raise unusable(rank, f"{kind.DESCRIPTOR.name}: {problem}") from problem


def files_message(entries: Iterable[FileEntry]) -> bytes:
    """Return the message of the files that a rank wrote."""
    files = [saving_pb2.RankFile(path=one.path, bytes=one.bytes, xxh3_64=one.xxh3_64) for one in entries]
    return saving_pb2.RankFiles(files=files).SerializeToString()


def all_files(messages: Iterable[bytes]) -> tuple[FileEntry, ...]:
    """Return the files of all ranks by path; each lies in the checkpoint, and no two ranks name the same."""
    found: dict[str, FileEntry] = {}
    for rank, data in enumerate(messages):
        for file in parsed(saving_pb2.RankFiles, data, rank).files:
            if not is_below(file.path) or file.path in found or not _CHECKSUM.fullmatch(file.xxh3_64):
                raise unusable(rank, f"file {file.path!r}")
            found[file.path] = FileEntry(file.path, file.bytes, file.xxh3_64)
    return tuple(found[path] for path in sorted(found))


def all_nonfinite(messages: Iterable[bytes]) -> dict[str, str]:
    """Return what all ranks found that is not finite."""
    found: dict[str, str] = {}
    for rank, data in enumerate(messages):
        tensors = dict(parsed(saving_pb2.RankNonfinite, data, rank).tensors)
        if not set(tensors.values()) <= {"nan", "inf"}:
            raise unusable(rank, "tensors are nan or inf")
        found |= tensors
    return found


def publication(data: bytes) -> tuple[str, str]:
    """Return the name and the manifest that rank 0 says its nodes publish."""
    message = parsed(saving_pb2.Publication, data, 0)
    if CheckpointName.parse(message.name) is None:
        raise unusable(0, f"{message.name!r} is not a checkpoint's name")
    return message.name, message.manifest


def assigned(data: bytes, count: int) -> list[int]:
    """Return which of its `count` items rank 0 says a rank is to write."""
    items = list(parsed(saving_pb2.AssignedItems, data, 0).items)
    if len(set(items)) != len(items) or any(item >= count for item in items):
        raise unusable(0, f"items to write, of {count}")
    return items


def written(data: bytes, rank: int, expected: Iterable[int]) -> list[saving_pb2.WrittenItem]:
    """Return where a rank says the items are that it was to write: all of them, in files of its own."""
    items = list(parsed(saving_pb2.WrittenItems, data, rank).items)
    if sorted(item.item for item in items) != sorted(expected):
        raise unusable(rank, "it did not write what it was to write")
    for item in items:
        named = _FILE.fullmatch(item.file)
        if named is None or int(named[1]) != rank:
            raise unusable(rank, f"file {item.file!r}")
    return items


def path_message(path: Iterable[str | int]) -> list[saving_pb2.PathStep]:
    """Return the message of where a value stands in a nested state."""
    steps = saving_pb2.PathStep
    return [steps(number=step) if isinstance(step, int) else steps(name=step) for step in path]


def path_of(item: saving_pb2.PlannedItem, refuse: Callable[[str], Exception]) -> tuple[str | int, ...]:
    """Return where an item stands in the nested state; raises what `refuse` makes of the reason."""
    steps = [step.number if step.WhichOneof("step") == "number" else step.name for step in item.path]
    return checked_path(item.key, steps, refuse)


def checked_path(key: str, path: Iterable[object], refuse: Callable[[str], Exception]) -> tuple[str | int, ...]:
    """Return a path that spells its key, of text and numbers that a list can have."""
    steps = tuple(step for step in path if type(step) is str or (type(step) is int and 0 <= step < MOST_NUMBER))
    if ".".join(map(str, steps)) != key or not 0 < len(steps) <= MOST_STEPS or type(steps[0]) is not str:
        raise refuse(f"the path of {key!r}")
    return steps
