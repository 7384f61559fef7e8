"""Sharded states: parts' states by fully qualified names, in the files of torch.distributed.checkpoint.

`model.layer.weight` is the same tensor under DDP, FSDP and torch.compile, and so is its optimizer's
`optimizer.state.layer.weight.exp_avg`: a checkpoint can be loaded at any number of ranks, and by others.

Ranks plan who writes what without torch's collectives, and tell each other plans as values (`multirank_save`), not
as pickles. torch's `.metadata` is a pickle: it is read as data.
"""

from __future__ import annotations

import math
import pathlib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from deeplink.checkpoints import multirank_save as messages
from deeplink.checkpoints.found import (
    SHARDED,
    NoModelError,
    NoStateError,
    UnmatchedStatesError,
)
from deeplink.checkpoints.manifest import is_below
from deeplink.checkpoints.tensors import KeyPath, flattened, nested
from deeplink.core import plainpickle
from deeplink.v1 import saving_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping
    from pathlib import Path

    from deeplink.checkpoints.multirank_save import Exchange

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
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


# -- states of parts


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return each part's state, models and optimizers by fully qualified names; every rank must call it."""
    return {name: state_of(name, parts) for name in parts}


def state_of(name: str, parts: Mapping[str, Any]) -> Any:
    """Return a part's state; the optimizers' keys are the names that their models' parameters have."""
    part = parts[name]
    if isinstance(part, nn.Module):
        return get_model_state_dict(part)
    if isinstance(part, Optimizer):
        model = _model_of(name, part, parts)
        with _as_it_is(part):
            state: dict[str, Any] = dict(get_optimizer_state_dict(model, part))
        state[_STATE] = {parameter: values for parameter, values in state[_STATE].items() if values}
        return state
    return part.state_dict() if hasattr(part, "state_dict") else part


def hand_over(name: str, parts: Mapping[str, Any], state: Any) -> None:
    """Load a part's state."""
    part = parts[name]
    if isinstance(part, nn.Module):
        set_model_state_dict(part, state)
    elif isinstance(part, Optimizer):
        # Not strict: a parameter that no step has changed yet has no state.
        model = _model_of(name, part, parts)
        with _as_it_is(part):
            set_optimizer_state_dict(model, part, state, options=StateDictOptions(strict=False))
    else:
        part.load_state_dict(state)


def _model_of(name: str, optimizer: Optimizer, parts: Mapping[str, Any]) -> nn.Module:
    wanted = set(_parameters(optimizer))
    sharing = {}
    for other, part in parts.items():
        if isinstance(part, nn.Module) and (there := wanted.intersection(part.parameters())):
            if there == wanted:
                return part
            sharing[other] = part
    if wanted.difference(*(part.parameters() for part in sharing.values())):
        raise NoModelError(name)
    return nn.ModuleDict(sharing)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group[_PARAMS]]


@contextmanager
def _as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch from a step of its own where the optimizer has no state, and from leaving out what is frozen."""
    parameters = _parameters(optimizer)
    frozen = [one for one in parameters if not one.requires_grad and one.is_floating_point()]
    without = [] if optimizer.state else parameters
    for parameter in without:
        optimizer.state[parameter] = {}
    for parameter in frozen:
        parameter.requires_grad_(True)  # noqa: FBT003 - torch's
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003
        for parameter in without:
            if not optimizer.state.get(parameter, True):
                del optimizer.state[parameter]


# -- writing


def write(state: Mapping[str, Any], exchange: Exchange) -> list[Path]:
    """Write this rank's part of a state in the format of torch.distributed.checkpoint, and return its files.

    The ranks plan together who writes what. They do it through the exchange, so it needs no collective, and can go
    on in a thread while training uses the process group. What several ranks have whole, the first writes. Every
    rank must call it.
    """
    rank, draft = exchange.group.rank, exchange.draft
    values, paths = flattened(state)
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
        _write_index(exchange, *shares)
        files.add(draft / SHARDED)
    return sorted(files)


def _share(rank: int) -> str:
    return f"items-{rank:05d}"


def _write_index(exchange: Exchange, plans: list[SavePlan], whole: Metadata, assigned: list[list[int]]) -> None:
    """Write torch's `.metadata` once every rank has written."""
    results = [
        [
            WriteResult(
                plans[rank].items[one.item].index, one.length, StorageInfo(one.file, one.offset, one.length)
            )
            for one in messages.written(data, rank, assigned[rank])
        ]
        for rank, data in enumerate(exchange.gather("written"))
    ]
    FileSystemWriter(exchange.draft, sync_files=False).finish(whole, results)


def _share_out(
    exchange: Exchange, planner: DefaultSavePlanner
) -> tuple[list[SavePlan], Metadata, list[list[int]]]:
    """Tell each rank which of its items to write; return all plans, the index, and the items of each."""
    plans: list[SavePlan] = []
    paths: dict[str, KeyPath] = {}
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
    return plans, replace(whole, planner_data=paths), assigned


# -- plans as values


def _plan_message(plan: SavePlan, paths: Mapping[str, KeyPath]) -> bytes:
    items = []
    for item in plan.items:
        key, data = item.index.fqn, item.tensor_data
        planned = saving_pb2.PlannedItem(key=key, path=messages.path_message(paths[key]))
        if data is not None:
            planned.dtype = str(data.properties.dtype).removeprefix("torch.")
            planned.is_shard = item.type is WriteItemType.SHARD
            planned.size.extend(data.size)
            planned.offsets.extend(data.chunk.offsets)
            planned.lengths.extend(data.chunk.sizes)
        items.append(planned)
    return saving_pb2.RankPlan(items=items).SerializeToString()


def _plan_of(data: bytes, rank: int) -> tuple[SavePlan, dict[str, KeyPath]]:
    refuse = partial(messages.unusable, rank)
    items: dict[MetadataIndex, WriteItem] = {}
    paths = {}
    for planned in messages.parsed(saving_pb2.RankPlan, data, rank).items:
        item = _item_of(planned, refuse)
        if item.index in items:
            raise refuse(f"{planned.key!r} twice")
        items[item.index] = item
        paths[planned.key] = messages.path_of(planned, refuse)
    return SavePlan(list(items.values())), paths


def _item_of(planned: saving_pb2.PlannedItem, refuse: Callable[[str], Exception]) -> WriteItem:
    if not planned.dtype:
        return WriteItem(MetadataIndex(planned.key), WriteItemType.BYTE_IO)
    size, offsets, lengths = (torch.Size(one) for one in (planned.size, planned.offsets, planned.lengths))
    is_known = planned.dtype in _DTYPES and max(math.prod(size), *offsets, *lengths, 0) < MOST_ELEMENTS
    if not is_known or not len(size) == len(offsets) == len(lengths) <= MOST_DIMENSIONS:
        raise refuse(f"the tensor {planned.key!r}")
    data = TensorWriteData(ChunkStorageMetadata(offsets, lengths), TensorProperties(_DTYPES[planned.dtype]), size)
    kind = WriteItemType.SHARD if planned.is_shard else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(planned.key, offsets), kind, tensor_data=data)


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


def restore(
    parts: Mapping[str, Any],
    folder: Path,
    find: Callable[[str], Path] | None = None,
    *,
    otherwise: Container[str] = (),
) -> Collection[str]:
    """Load parts from `folder`, at any number of ranks, and return their names; every rank must call it.

    Those named in `otherwise` need not have been saved.
    """
    source = _Reader(folder, find)
    saved = {name: source.part(name) for name in parts if name not in otherwise or source.has(name)}
    targets: dict[str, torch.Tensor] = {}
    for one in saved.values():
        one.plain = source.read(dict.fromkeys(one.paths.keys() - one.tensors.keys()))
        targets |= one.targets(parts)
    source.read(targets)
    for name, one in saved.items():
        values = one.plain | {key: targets[key] for key in one.tensors}
        hand_over(name, parts, nested(values, one.paths)[name])
        one.check_taken(parts)
    return saved.keys()


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
        self._index = self.read_metadata()

    def has(self, name: str) -> bool:
        """Tell whether a part of this name was saved."""
        return any(path[0] == name for path in self._index.planner_data.values())

    def part(self, name: str) -> SavedPart:
        """Return what was saved of a part."""
        saved = SavedPart(name, self._folder)
        paths: dict[str, KeyPath] = self._index.planner_data
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
        self.set_up_storage_reader(self._index, is_coordinator=False)
        self.read_data(planner.create_local_plan(), planner).wait()
        return values

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
        keys = found.state_dict_metadata
        paths = found.planner_data or {key: tuple(key.split(".", 1)) for key in keys}
        found.planner_data = {key: messages.checked_path(key, paths.get(key, ()), self._refused) for key in keys}
        for stored in found.storage_data.values():
            if not is_below(stored.relative_path) or stored.transform_descriptors:
                raise self._refused(f"file {stored.relative_path!r}")
        return found

    def _refused(self, why: str) -> NoStateError:
        return NoStateError(self._folder, f"{SHARDED} cannot be used: {why}")

    @override
    def read_data(self, plan: Any, planner: Any) -> Any:
        if self._find is not None:
            for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
                self._find(name)
        return super().read_data(plan, planner)


class SavedPart:
    """A checkpoint's share of one part."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.paths: dict[str, KeyPath] = {}
        self.plain: dict[str, Any] = {}
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def targets(self, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a tensor to load each saved one into; this rank's part of those that are sharded."""
        part = parts[self.name]
        if isinstance(part, Optimizer):
            return self._for_optimizer(part, parts)
        if not hasattr(part, "load_state_dict"):
            raise TypeError(f"{self.name!r} has no load_state_dict")
        state = state_of(self.name, parts)
        if isinstance(part, nn.Module):
            self._compare({str(path[1]) for path in self.paths.values() if len(path) > 1}, set(state))
        here, _ = flattened({self.name: state})
        return {key: self._target(key, here.get(key)) for key in self.tensors}

    def check_taken(self, parts: Mapping[str, Any]) -> None:
        """Return if a part has all that it was handed."""
        _, has = flattened({self.name: state_of(self.name, parts)})
        if ignored := [key for key in self.paths if key not in has]:
            raise self._refused(f"{self.name!r} did not take {_some(ignored)}")

    def _for_optimizer(self, optimizer: Optimizer, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        saved = nested({key: self.plain.get(key) for key in self.paths}, self.paths)
        groups = saved.get(self.name, {}).get(_GROUPS, [])
        here = state_of(self.name, parts)[_GROUPS]
        if not all(type(name) is str for group in groups for name in group.get(_PARAMS, [])):
            raise self._refused(f"{self.name!r} was saved by an earlier version, which numbered its parameters")
        names, asked = ([sorted(group[_PARAMS]) for group in one] for one in (groups, here))
        self._compare({name for group in names for name in group}, {name for group in asked for name in group})
        if names != asked:
            raise self._refused(f"the parameters of {self.name!r} were in other groups")
        for group, ours in zip(groups, optimizer.param_groups, strict=True):
            self._compare(set(group), set(group).union(ours))
        parameters = get_model_state_dict(_model_of(self.name, optimizer, parts))
        return {
            key: self._like(key, parameters.get(str(path[2])) if path[1] == _STATE else None)
            for key, path in self.paths.items()
            if key in self.tensors
        }

    def _like(self, key: str, parameter: Any) -> torch.Tensor:
        size, dtype = self.tensors[key]
        if isinstance(parameter, DTensor) and parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype)
        if isinstance(parameter, ShardedTensor) and parameter.shape == size:
            return _empty_shards(parameter, dtype)
        return torch.empty(size, dtype=dtype)

    def _target(self, key: str, here: Any) -> torch.Tensor:
        size, dtype = self.tensors[key]
        if not isinstance(here, torch.Tensor):
            return torch.empty(size, dtype=dtype)
        if here.shape != size:
            raise self._refused(f"{key} has shape {tuple(here.shape)}, saved was {tuple(size)}")
        return here

    def _refused(self, why: str) -> NoStateError:
        return NoStateError(self._folder, why)

    def _compare(self, saved: set[str], asked: set[str]) -> None:
        differing = []
        if absent := asked - saved:
            differing.append(f"{self.name!r} asks for {_some(absent)}, not saved")
        if ignored := saved - asked:
            differing.append(f"of {self.name!r} was saved {_some(ignored)}, not asked for")
        if differing:
            raise self._refused("; ".join(differing))


def _empty_shards(like: ShardedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return room for this rank's shards of a tensor that lies as `like` does."""
    whole = like.metadata()
    shards = [Shard(torch.empty_like(one.tensor, dtype=dtype), one.metadata) for one in like.local_shards()]
    facts = replace(whole, tensor_properties=replace(whole.tensor_properties, dtype=dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001 - without a collective
        shards,
        facts,
        process_group=like._process_group,  # noqa: SLF001
    )


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")  # noqa: PLR2004
