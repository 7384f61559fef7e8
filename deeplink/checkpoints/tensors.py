"""All of checkpoints that needs torch: copies of states in memory, their files, shards, states of random numbers.

Imported when the first state is saved or loaded; the rest of the package does without torch. What only sharded
states need, torch.distributed.checkpoint, takes seconds to import, and is left to them (`sharded`).
"""

from __future__ import annotations

import copy
import errno
import io
import itertools
import logging
import mmap
import os
import random
import sys
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import distributed as dist

from deeplink.checkpoints.found import ShardedStateError, UnreadableStateError
from deeplink.checkpoints.manifest import CheckpointError
from deeplink.checkpoints.multirank_save import SaveGroup
from deeplink.core.plainpickle import PickleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.staging import BlockingAsyncStager

log = logging.getLogger(__name__)

LONGEST: Final = 16 << 20
"""Bytes of one rank's text."""
KeyPath: TypeAlias = tuple[str | int, ...]
"""The place of a value in a nested state: its part, then keys and numbers of elements."""
_SHARDED_KINDS: Final = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
    ("torch.distributed.fsdp._flat_param", "FlatParameter"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
_ALIGN = 64
_WRITE_FAILED = ("inline_container", "PytorchStreamWriter", "Parent directory")
"""How torch.save's errors name their place when it is the storage that refuses: it has no class for them."""


# -- states of parts


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `state_dict()` of each part that has one; the others are states themselves."""
    return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in parts.items()}


def check_spread(parts: Mapping[str, Any], spread: str) -> None:
    """Return if these parts can be saved so."""
    for name, part in parts.items():
        if by := _sharded_by_others(part):
            raise ShardedStateError(name, spread, by=by)
        if spread != "sharded" and holds_shards(part):
            raise ShardedStateError(name, spread)
    refuse_meta(parts)


def refuse_meta(parts: Mapping[str, Any]) -> None:
    """Raise where a part has no memory yet: it has nothing to save, and torch loads into it without a word."""
    for name, part in parts.items():
        if any(isinstance(one, torch.Tensor) and one.is_meta for one in _holdings(part)):
            raise CheckpointError(
                f"{name!r} has tensors on the meta device, which hold nothing",
                remedy="Give them memory first: `model.to_empty(device=...)`, then the optimizer, then `restore`.",
            )


def _sharded_by_others(part: Any) -> str:
    inner = part.modules() if isinstance(part, torch.nn.Module) else [part]
    kinds = {kind for one in inner for kind in type(one).__mro__}
    return "DeepSpeed" if any(kind.__module__.startswith("deepspeed.") for kind in kinds) else ""


def holds_shards(part: Any) -> bool:
    """Tell whether a model, an optimizer or a state has tensors of which each rank has a part."""
    kinds = tuple(  # a module that was not imported made none
        getattr(sys.modules[module], kind) for module, kind in _SHARDED_KINDS if module in sys.modules
    )
    return any(isinstance(one, kinds) for one in _holdings(part))


def _holdings(part: Any) -> Iterator[Any]:
    """Yield the modules and tensors of a part."""
    if isinstance(part, torch.nn.Module):
        yield from part.modules()  # FullyShardedDataParallel shows plain parameters
        yield from itertools.chain(part.parameters(), part.buffers())
    elif isinstance(part, torch.optim.Optimizer):
        yield from (parameter for group in part.param_groups for parameter in group["params"])
    else:
        yield from (tensor for _, tensor in _tensors(part, ""))


def _local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what this rank has of a tensor: all of a plain one, its shards of a sharded one."""
    if hasattr(tensor, "local_shards"):  # ShardedTensor
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor]  # DTensor


def put_back(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Hand each part its state."""
    for name, part in parts.items():
        if name not in states:
            raise KeyError(f"the checkpoint has no state of {name!r}; it has {', '.join(sorted(states))}")
        if not hasattr(part, "load_state_dict"):
            raise TypeError(f"{name!r} has no load_state_dict")
    for name, part in parts.items():
        part.load_state_dict(_named_as_in(part, states[name]))


def _named_as_in(part: Any, state: Any) -> Any:
    """Return a model's state by the names it has here: DistributedDataParallel and torch.compile add to them."""
    if not isinstance(part, torch.nn.Module) or not isinstance(state, dict):
        return state
    names = list(part.state_dict())
    if set(state) == set(names) or not all(isinstance(name, str) for name in (*state, *names)):
        return state
    here = dict(zip(_unwrapped(names), names, strict=True))
    saved = dict(zip(_unwrapped(list(state)), state.values(), strict=True))
    if saved.keys() != here.keys():
        return state
    return {here[bare]: value for bare, value in saved.items()}


def _unwrapped(names: list[str]) -> list[str]:
    names = [name.replace("_orig_mod.", "") for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


# -- nested and flat


def flattened(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return a nested state's values by key, and where each stands.

    Dictionaries with text for keys are opened, and lists that hold tensors or such dictionaries. Anything else is
    one value: torch would make text of a scheduler's numbered milestones, and forget what is empty.
    """
    values: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in _walked(state, ()):
        key = ".".join(map(str, path))
        if key in values:
            raise ValueError(f"two values of the state are called {key}")
        if not isinstance(value, torch.Tensor) and holds_shards(value):
            raise UnreadableStateError(key, type(value))
        values[key], paths[key] = value, path
    return values, paths


def nested(values: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """Return the nested state of which `flattened` made these."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        path, place = paths[key], root
        for step, following in itertools.pairwise(path):
            place = _entry(place, step, [] if isinstance(following, int) else {})
        _entry(place, path[-1], value)
    return root


def _entry(place: Any, step: str | int, value: Any) -> Any:
    if isinstance(step, str):
        return place.setdefault(step, value)
    place.extend([None] * (step + 1 - len(place)))
    if place[step] is None:
        place[step] = value
    return place[step]


def _walked(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if path and not _opens(value):
        yield path, value
        return
    for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _walked(inner, (*path, step))


def _opens(value: Any) -> bool:
    if type(value) in {dict, OrderedDict}:
        return bool(value) and all(type(key) is str for key in value)
    return type(value) is list and any(isinstance(one, torch.Tensor) or _opens(one) for one in value)


# -- copies in host memory


class HostCopy:
    """Copies states into host memory that is kept and used again: page faults would cost more than the copying.

    A copy is valid until the next `take`.
    """

    def __init__(self) -> None:
        self._layout: tuple[tuple[torch.dtype, torch.Size, bool], ...] = ()
        self._buffers: list[torch.Tensor] = []
        self._stager: BlockingAsyncStager | None = None

    def take(self, state: Any) -> Any:
        """Return `state` with every tensor copied to host memory; those that share memory still do."""
        found: dict[tuple[Any, ...], torch.Tensor] = {}
        _mapped(state, lambda tensor: found.setdefault(_identity(tensor), tensor))
        plain = {identity: tensor for identity, tensor in found.items() if _is_plain(tensor)}
        tensors = list(plain.values())
        self._make_room(tensors)
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        copies = dict(zip(plain, self._buffers, strict=True))
        for identity, tensor in found.items():
            if identity not in copies:
                copies[identity] = tensor.detach().to("cpu", copy=True)
        return _mapped(state, lambda tensor: copies[_identity(tensor)])

    def take_sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return `state` with this rank's parts of its tensors, DTensors among them, copied to host memory."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager  # noqa: PLC0415

        if self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=False)
        found: dict[str, torch.Tensor] = {}
        _mapped(state, lambda tensor: found.setdefault(str(id(tensor)), tensor))
        copies = self._stager.stage(found)
        return dict(_mapped(state, lambda tensor: copies[str(id(tensor))]))

    def _make_room(self, tensors: list[torch.Tensor]) -> None:
        layout = tuple((tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in tensors)
        if layout == self._layout:
            return
        self._buffers = []  # before the new ones: not both at once
        here = [tensor for tensor in tensors if not tensor.is_cuda]
        room = _pages(sum(_rounded(tensor.nbytes) for tensor in here))
        offset = 0
        for tensor in tensors:
            if tensor.is_cuda or not tensor.numel():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers.append(pinned)
                continue
            flat = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self._buffers.append(flat.view(tensor.shape))
            offset += _rounded(tensor.nbytes)
        self._layout = layout


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pages(size: int) -> mmap.mmap:
    room = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            room.madvise(mmap.MADV_HUGEPAGE)
        except OSError as problem:  # a kernel without: more page faults at the first copy
            log.debug("no huge pages: %s", problem)
    return room


def _is_plain(tensor: torch.Tensor) -> bool:
    # Sparse, quantised and nested ones hold more than numbers side by side: no buffer takes them. A subclass that
    # wraps other tensors (low-bit optimizers' states) has no memory itself, and all of them the address 0.
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_strided and (not tensor.numel() or tensor.data_ptr() != 0)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Tied weights are two names of one tensor: they are copied, and saved, once. A conjugate shares the
    # memory, too, but not the values: torch keeps that as a mark on the view.
    if not _is_plain(tensor) or not tensor.numel():
        return (id(tensor),)
    marks = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device), marks)


def _mapped(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `state` with its tensors changed, other values copied."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        mapped = {key: _mapped(value, change) for key, value in state.items()}
        return Counter(mapped) if isinstance(state, Counter) else mapped  # a scheduler's milestones
    if type(state) in {list, tuple}:
        return type(state)(_mapped(value, change) for value in state)
    try:
        return copy.deepcopy(state)
    except TypeError as problem:  # a generator, a lock
        raise UnreadableStateError("a value", type(state)) from problem


def nonfinite(state: Any) -> dict[str, str]:
    """Return the names of tensors that hold a number that is none, with `nan` or `inf`, whichever is worse."""
    found: dict[str, str] = {}
    for name, tensor in ((name, part) for name, whole in _tensors(state, "") for part in _local_parts(whole)):
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or not _is_plain(tensor):
            continue
        # A sum is finite only if all of it is: one pass without memory. Then a closer look: a sum may overflow.
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        if bool(torch.isfinite(tensor.sum(dtype=wide))) or bool(torch.isfinite(tensor).all()):
            continue
        if found.get(name) != "nan":
            found[name] = "nan" if bool(torch.isnan(tensor).any()) else "inf"
    return found


def _tensors(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


# -- files


def refuse_unreadable(state: Any) -> None:
    """Raise at the first save, not at a restart, if `read_state` would not read what `write_state` writes."""
    # Of tensors of other kinds than torch's own one of each kind is written; shards are not written so.
    others: dict[type, torch.Tensor] = {}
    stand_in = torch.empty(0)
    if _is_readable(
        _mapped(state, lambda one: stand_in if _needs_no_look(one) else others.setdefault(type(one), one))
    ):
        return
    for name, value in _leaves(state, ""):
        if not _is_readable(value):
            raise UnreadableStateError(name, type(value))
    raise UnreadableStateError("a key", object)


def _needs_no_look(value: Any) -> bool:
    return type(value) is torch.Tensor or (isinstance(value, torch.Tensor) and holds_shards(value))


def _is_readable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (PickleError, AttributeError, TypeError, RuntimeError):
        return False
    return True


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict) or type(state) in {list, tuple}:
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif not _needs_no_look(state):
        yield name, state


def write_state(state: Any, path: Path) -> None:
    """Write a state with torch.save."""
    failed = ""
    try:
        torch.save(state, path)
    except RuntimeError as problem:
        failed = str(problem)
        if not any(sign in failed for sign in _WRITE_FAILED):
            raise
    if failed:
        # Raised here, not above: torch's error would keep the half written file open, and its room taken.
        code = errno.ENOSPC if os.statvfs(path.parent).f_bavail == 0 else errno.EIO
        raise OSError(code, os.strerror(code), str(path))


def read_state(path: Path, map_location: Any = "cpu") -> Any:
    """Read what `write_state` wrote: tensors and plain values; nothing in the file is executed."""
    return torch.load(path, map_location=map_location, weights_only=True)


# -- who saves together


def group() -> SaveGroup:
    """Return this process's place among the ranks that torch.distributed knows; one of one without it."""
    if not (dist.is_available() and dist.is_initialized()):
        return SaveGroup(0, 1)
    return SaveGroup(dist.get_rank(), dist.get_world_size())


def agreed(text: str) -> str:
    """Return rank 0's text on every rank; a collective, bounded by the process group's timeout."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return text
    return broadcast_text(text, src=0)


# -- random numbers


def random_state() -> dict[str, Any]:
    """Return the states of this process's generators: Python's, numpy's, torch's on the CPU and on each GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def put_back_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned; GPUs that are not here any more are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415 - only where the saving process used it

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002 - the global generator's
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


# -- text between ranks, as bytes in tensors: torch's collectives of objects send pickles


def broadcast_text(text: str, *, src: int) -> str:
    """Return rank `src`'s text on every rank; a collective, bounded by the process group's timeout."""
    mine = text.encode()
    length = torch.tensor([len(mine)], device=_device())
    dist.broadcast(length, src)
    data = torch.zeros(_checked(int(length)), dtype=torch.uint8, device=_device())
    if dist.get_rank() == src:
        data.copy_(_bytes(mine))
    dist.broadcast(data, src)
    return _text(data)


def gathered_texts(text: str) -> list[str]:
    """Return every rank's text, in their order, on every rank; a collective, bounded as `broadcast_text`."""
    mine = text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=_device()) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=_device()))
    sizes = [_checked(int(length)) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
    padded[: len(mine)] = _bytes(mine)
    rows = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [_text(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _device() -> torch.device:
    """Return a device that the process group has: the CPU, else its first, as torch chooses for objects."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _checked(length: int) -> int:
    if not 0 <= length <= LONGEST:
        raise CheckpointError(f"a rank's text of {length} bytes, at most {LONGEST} are sent")
    return length


def _bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode()
