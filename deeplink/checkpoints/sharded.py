"""Sharded states: the files of torch.distributed.checkpoint, planned by the ranks without its collectives.

Ranks tell each other plans as values (`messages`), not as pickles. torch's `.metadata` is a pickle: it is read as
data.
"""

from __future__ import annotations

import math
import pathlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from deeplink import plainpickle
from deeplink.checkpoints import messages, statedict
from deeplink.checkpoints.found import SHARDED, NoStateError, UnmatchedStatesError
from deeplink.checkpoints.manifest import is_below
from deeplink.v1 import saving_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deeplink.checkpoints.multirank_save import Exchange

MOST_METADATA: Final = 1 << 30
MOST_DIMENSIONS: Final = 64
MOST_ELEMENTS: Final = 1 << 60
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_KNOWN: Final[dict[tuple[str, str], Any]] = {
    **{
        (kind.__module__, kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 - torch's files name it
            StorageInfo,
        )
    },
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda _name: torch.strided,
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""All that a `.metadata` of torch's names."""


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return each part's state, models and optimizers by fully qualified names; every rank must call it."""
    return {name: statedict.state_of(name, parts) for name in parts}


# -- writing


def write(state: Mapping[str, Any], exchange: Exchange) -> list[Path]:
    """Write this rank's part of a state in the format of torch.distributed.checkpoint, and return its files.

    The ranks plan together who writes what. They do it through the exchange, so it needs no collective, and can go
    on in a thread while training uses the process group. What several ranks have whole, the first writes. Every
    rank must call it.

    Raises:
        PartsMissingError: a rank did not take part in time.
        MessageError: what another rank said is not usable.
        UnmatchedStatesError: the ranks' states do not make a whole.
    """
    rank, draft = exchange.group.rank, exchange.draft
    values, paths = statedict.flattened(state)
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    planner.set_up_planner(values, is_coordinator=rank == 0)
    writer = FileSystemWriter(draft, sync_files=False)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    exchange.put("plan", _plan_message(plan, paths))
    shares = _share_out(exchange, planner) if rank == 0 else None
    mine = [plan.items[number] for number in messages.assigned(exchange.take(_share(rank), of=0), len(plan.items))]
    written = writer.write_data(planner.finish_plan(replace(plan, items=mine)), planner).wait()
    exchange.put("written", _written_message(plan, written))
    files = {draft / result.storage_data.relative_path for result in written}
    if shares is not None:
        shares.finish(exchange)
        files.add(draft / SHARDED)
    return sorted(files)


def _share(rank: int) -> str:
    return f"items-{rank:05d}"


class _Shares:
    """The writer of each item; rank 0 has it, and writes the index of it all."""

    def __init__(self, plans: list[SavePlan], whole: Metadata, assigned: list[list[int]]) -> None:
        self.plans, self.whole, self.assigned = plans, whole, assigned

    def finish(self, exchange: Exchange) -> None:
        """Write torch's `.metadata` once every rank has written."""
        results = []
        for rank, data in enumerate(exchange.gather("written")):
            results.append(
                [
                    WriteResult(
                        self.plans[rank].items[one.item].index,
                        one.length,
                        StorageInfo(one.file, one.offset, one.length),
                    )
                    for one in messages.written(data, rank, self.assigned[rank])
                ]
            )
        FileSystemWriter(exchange.draft, sync_files=False).finish(self.whole, results)


def _share_out(exchange: Exchange, planner: DefaultSavePlanner) -> _Shares:
    plans: list[SavePlan] = []
    paths: dict[str, statedict.KeyPath] = {}
    facts: dict[MetadataIndex, TensorWriteData | None] = {}
    for rank, data in enumerate(exchange.gather("plan")):
        plan, theirs = _plan_of(data, rank)
        plans.append(plan)
        paths = theirs | paths
        for item in plan.items:
            if facts.setdefault(item.index, item.tensor_data) != item.tensor_data:
                raise UnmatchedStatesError(f"rank {rank} has another {item.index.fqn} than a rank before it")
    try:
        shared, whole = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as problem:
        raise UnmatchedStatesError(str(problem)) from problem
    assigned = []
    for rank, (plan, share) in enumerate(zip(plans, shared, strict=True)):
        kept = {item.index for item in share.items}
        assigned.append([number for number, item in enumerate(plan.items) if item.index in kept])
        exchange.put(_share(rank), saving_pb2.AssignedItems(items=assigned[-1]).SerializeToString())
    return _Shares(plans, replace(whole, planner_data=paths), assigned)


# -- plans as values


def _plan_message(plan: SavePlan, paths: Mapping[str, statedict.KeyPath]) -> bytes:
    items = []
    for item in plan.items:
        key, data = item.index.fqn, item.tensor_data
        told = saving_pb2.PlannedItem(key=key, path=messages.path_message(paths[key]))
        if data is not None:
            told.dtype = str(data.properties.dtype).removeprefix("torch.")
            told.is_shard = item.type is WriteItemType.SHARD
            told.size.extend(data.size)
            told.offsets.extend(data.chunk.offsets)
            told.lengths.extend(data.chunk.sizes)
        items.append(told)
    return saving_pb2.RankPlan(items=items).SerializeToString()


def _plan_of(data: bytes, rank: int) -> tuple[SavePlan, dict[str, statedict.KeyPath]]:
    def refuse(why: str) -> messages.MessageError:
        return messages.MessageError(rank, why)

    items: dict[MetadataIndex, WriteItem] = {}
    paths = {}
    for told in messages.parsed(saving_pb2.RankPlan, data, rank).items:
        item = _item_of(told, refuse)
        if item.index in items:
            raise refuse(f"{told.key!r} twice")
        items[item.index] = item
        paths[told.key] = messages.path_of(told, refuse)
    return SavePlan(list(items.values())), paths


def _item_of(told: saving_pb2.PlannedItem, refuse: Callable[[str], Exception]) -> WriteItem:
    if not told.dtype:
        return WriteItem(MetadataIndex(told.key), WriteItemType.BYTE_IO)
    size, offsets, lengths = (torch.Size(one) for one in (told.size, told.offsets, told.lengths))
    is_known = told.dtype in _DTYPES and max(math.prod(size), *offsets, *lengths, 0) < MOST_ELEMENTS
    if not is_known or not len(size) == len(offsets) == len(lengths) <= MOST_DIMENSIONS:
        raise refuse(f"the tensor {told.key!r}")
    data = TensorWriteData(ChunkStorageMetadata(offsets, lengths), TensorProperties(_DTYPES[told.dtype]), size)
    kind = WriteItemType.SHARD if told.is_shard else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(told.key, offsets), kind, tensor_data=data)


def _written_message(plan: SavePlan, written: list[WriteResult]) -> bytes:
    numbers = {item.index: number for number, item in enumerate(plan.items)}
    items = [
        saving_pb2.WrittenItem(
            item=numbers[result.index],
            file=result.storage_data.relative_path,
            offset=result.storage_data.offset,
            length=result.storage_data.length,
        )
        for result in written
    ]
    return saving_pb2.WrittenItems(items=items).SerializeToString()


# -- reading


def restore(parts: Mapping[str, Any], folder: Path, find: Callable[[str], Path] | None = None) -> None:
    """Load parts from `folder`, at any number of ranks; every rank must call it.

    Args:
        parts: models, optimizers, and what has `load_state_dict`.
        folder: of the checkpoint.
        find: brings a file there by its path below the folder; None: there they all are.

    Raises:
        NoStateError: what was saved of a part is not what it has; nothing was handed out.
        KeyError, TypeError: nothing was saved of a part, or it takes nothing; nothing was handed out.
    """
    source = _Source(folder, find)
    saved = {name: source.part(name) for name in parts}
    targets: dict[str, torch.Tensor] = {}
    for one in saved.values():
        one.plain = source.read(dict.fromkeys(one.paths.keys() - one.tensors.keys()))
        targets |= one.targets(parts)
    source.read(targets)
    for name, one in saved.items():
        values = one.plain | {key: targets[key] for key in one.tensors}
        statedict.hand_over(name, parts, statedict.nested(values, one.paths)[name])
        one.check_taken(parts)


class _Source:
    """A sharded checkpoint's files."""

    def __init__(self, folder: Path, find: Callable[[str], Path] | None) -> None:
        self._folder, self._reader = folder, _Reader(folder, find)
        self._index = self._reader.read_metadata()

    def part(self, name: str) -> statedict.SavedPart:
        """Return what there is of a part."""
        saved = statedict.SavedPart(name, lambda why: NoStateError(self._folder, why))
        paths: dict[str, statedict.KeyPath] = self._index.planner_data
        saved.paths = {key: path for key, path in paths.items() if path[0] == name}
        if not saved.paths:
            names = ", ".join(sorted({str(path[0]) for path in paths.values()}))
            raise KeyError(f"the checkpoint has no state of {name!r}; it has {names}")
        for key in saved.paths:
            facts = self._index.state_dict_metadata[key]
            if isinstance(facts, TensorStorageMetadata):
                saved.tensors[key] = (facts.size, facts.properties.dtype)
        return saved

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read into the tensors, put the plain values there, and return all of it."""
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(values, self._index, is_coordinator=False)
        self._reader.set_up_storage_reader(self._index, is_coordinator=False)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return values


class _Planner(DefaultLoadPlanner):
    """Executes nothing of what a file says."""

    @override
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Reader(FileSystemReader):
    """Brings the files that a plan names before it reads them; executes nothing of what they say."""

    def __init__(self, folder: Path, find: Callable[[str], Path] | None) -> None:
        super().__init__(folder)
        self._folder, self._find = folder, find

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = self._folder / SHARDED if self._find is None else self._find(SHARDED)
        if file.stat().st_size > MOST_METADATA:
            raise self._refused(f"more than {MOST_METADATA} bytes")
        try:
            found = plainpickle.loaded(file.read_bytes(), _KNOWN)
        except plainpickle.PickleError as problem:
            raise self._refused(str(problem)) from problem
        if type(found) is not Metadata or type(found.state_dict_metadata) is not dict:
            raise self._refused("it is something else")
        found.planner_data = self._paths(found)
        for stored in found.storage_data.values():
            if not is_below(stored.relative_path) or stored.transform_descriptors:
                raise self._refused(f"file {stored.relative_path!r}")
        return found

    def _paths(self, found: Metadata) -> dict[str, statedict.KeyPath]:
        keys = found.state_dict_metadata
        paths = found.planner_data or {key: tuple(key.split(".", 1)) for key in keys}
        return {key: messages.checked_path(key, paths.get(key, ()), self._refused) for key in keys}

    def _refused(self, why: str) -> NoStateError:
        return NoStateError(self._folder, f"{SHARDED} cannot be used: {why}")

    @override
    def read_data(self, plan: Any, planner: Any) -> Any:
        if self._find is not None:
            for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
                self._find(name)
        return super().read_data(plan, planner)
