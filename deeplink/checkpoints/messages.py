"""Messages between ranks that save together: values of `saving.proto`, checked where they arrive.

A stranger may answer in the agent's place, or have its token. Such words may be wrong, which the save notices.
They are never executed, and lead nowhere outside of the checkpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from deeplink.checkpoints.entries import CheckpointName
from deeplink.checkpoints.manifest import FileEntry, is_below
from deeplink.errors import DeepLinkError
from deeplink.v1 import saving_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

M = TypeVar("M", bound=Message)

MOST_NUMBER: Final = 1 << 20
"""Of a list's element in a state: an unpacked list is as long as its highest number says."""
MOST_STEPS: Final = 64
_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class MessageError(DeepLinkError):
    """A rank of a save was told something that no rank says; nothing is published."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(
            f"what rank {rank} said of its part of a checkpoint is not usable: {why}",
            remedy="All ranks need the same version of DeepLink; nobody else should have the job's token.",
        )
        self.rank, self.why = rank, why


def parsed(kind: type[M], data: bytes, rank: int) -> M:
    """Return a message of rank `rank`.

    Raises:
        MessageError: it is none.
    """
    try:
        return kind.FromString(data)
    except DecodeError as problem:
        raise MessageError(rank, f"{kind.DESCRIPTOR.name}: {problem}") from problem


def files_message(entries: Iterable[FileEntry]) -> bytes:
    """Return the message of the files that a rank wrote."""
    files = [saving_pb2.RankFile(path=one.path, bytes=one.bytes, xxh3_64=one.xxh3_64) for one in entries]
    return saving_pb2.RankFiles(files=files).SerializeToString()


def all_files(messages: Iterable[bytes]) -> tuple[FileEntry, ...]:
    """Return the files of all ranks by path, from their messages in the ranks' order.

    Raises:
        MessageError: a file lies outside of the checkpoint, or two ranks name the same.
    """
    found: dict[str, FileEntry] = {}
    for rank, data in enumerate(messages):
        for file in parsed(saving_pb2.RankFiles, data, rank).files:
            if not is_below(file.path) or file.path in found or not _CHECKSUM.fullmatch(file.xxh3_64):
                raise MessageError(rank, f"file {file.path!r}")
            found[file.path] = FileEntry(file.path, file.bytes, file.xxh3_64)
    return tuple(found[path] for path in sorted(found))


def nonfinite_message(found: dict[str, str]) -> bytes:
    """Return the message of a rank's tensors that are not finite."""
    return saving_pb2.RankNonfinite(tensors=found).SerializeToString()


def all_nonfinite(messages: Iterable[bytes]) -> dict[str, str]:
    """Return what all ranks found that is not finite.

    Raises:
        MessageError: it is something else.
    """
    found: dict[str, str] = {}
    for rank, data in enumerate(messages):
        told = dict(parsed(saving_pb2.RankNonfinite, data, rank).tensors)
        if not set(told.values()) <= {"nan", "inf"}:
            raise MessageError(rank, "tensors are nan or inf")
        found |= told
    return found


def publication_message(name: str, manifest: str) -> bytes:
    """Return the message of what the nodes are to publish."""
    return saving_pb2.Publication(name=name, manifest=manifest).SerializeToString()


def publication(data: bytes) -> tuple[str, str]:
    """Return the name and the manifest that rank 0 says its nodes publish.

    Raises:
        MessageError: the name is not a checkpoint's.
    """
    said = parsed(saving_pb2.Publication, data, 0)
    if CheckpointName.parse(said.name) is None:
        raise MessageError(0, f"{said.name!r} is not a checkpoint's name")
    return said.name, said.manifest


def assigned(data: bytes, count: int) -> list[int]:
    """Return which of its `count` items rank 0 says a rank is to write.

    Raises:
        MessageError: it has no such items.
    """
    items = list(parsed(saving_pb2.AssignedItems, data, 0).items)
    if len(set(items)) != len(items) or any(item >= count for item in items):
        raise MessageError(0, f"items to write, of {count}")
    return items


def written(data: bytes, rank: int, expected: Iterable[int]) -> list[saving_pb2.WrittenItem]:
    """Return where a rank says the items are that it was to write.

    Raises:
        MessageError: they are not all there, or elsewhere than in files of its own.
    """
    items = list(parsed(saving_pb2.WrittenItems, data, rank).items)
    if sorted(item.item for item in items) != sorted(expected):
        raise MessageError(rank, "it did not write what it was to write")
    for item in items:
        named = _FILE.fullmatch(item.file)
        if named is None or int(named[1]) != rank:
            raise MessageError(rank, f"file {item.file!r}")
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
