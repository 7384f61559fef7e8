"""Parts' states as torch.distributed.checkpoint has them: by fully qualified names, whatever wraps a model.

`model.layer.weight` is the same tensor under DDP, FSDP and torch.compile, and so is its optimizer's
`optimizer.state.layer.weight.exp_avg`: a checkpoint can be loaded at any number of ranks, and by others.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from deeplink.checkpoints.found import NoModelError, UnreadableStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

KeyPath: TypeAlias = tuple[str | int, ...]
"""The place of a value in a nested state: its part, then keys and numbers of elements."""
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


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
    if not optimizer.state:
        optimizer.state[parameters[0]] = {}
    for parameter in frozen:
        parameter.requires_grad_(True)  # noqa: FBT003 - torch's
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003
        if not optimizer.state.get(parameters[0], True):
            del optimizer.state[parameters[0]]


# -- nested and flat


def flattened(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return a nested state's values by key, and where each stands.

    Dictionaries with text for keys are opened, and lists that hold tensors or such dictionaries. Anything else is
    one value: torch would make text of a scheduler's numbered milestones, and forget what is empty.

    Raises:
        ValueError: two values have one key.
        UnreadableStateError: a shard lies in a value that is not opened.
    """
    values: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in _walked(state, ()):
        key = ".".join(map(str, path))
        if key in values:
            raise ValueError(f"two values of the state are called {key}")
        if not isinstance(value, torch.Tensor) and _holds_shards(value):
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


def _holds_shards(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_shards(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_shards(one) for one in value)
    return isinstance(value, DTensor)


# -- what a saved state is loaded into


class SavedPart:
    """A checkpoint's share of one part.

    Attributes:
        name: the part's.
        paths: where each value stands, by key.
        plain: the values that are not tensors, by key.
        tensors: size and dtype of the tensors, by key.
        refuse: makes an error of why the part cannot have this.
    """

    def __init__(self, name: str, refuse: Callable[[str], Exception]) -> None:
        self.name, self.refuse = name, refuse
        self.paths: dict[str, KeyPath] = {}
        self.plain: dict[str, Any] = {}
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def targets(self, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a tensor for each that was saved, to load it into; every rank's part of those that are sharded.

        Raises:
            what `refuse` makes: the part has something else than was saved.
        """
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
        """Return if a part has all that it was handed.

        Raises:
            what `refuse` makes: it does not.
        """
        _, has = flattened({self.name: state_of(self.name, parts)})
        if ignored := [key for key in self.paths if key not in has]:
            raise self.refuse(f"{self.name!r} did not take {_some(ignored)}")

    def _for_optimizer(self, optimizer: Optimizer, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        saved = nested({key: self.plain.get(key) for key in self.paths}, self.paths)
        groups = saved.get(self.name, {}).get(_GROUPS, [])
        here = state_of(self.name, parts)[_GROUPS]
        if not all(type(name) is str for group in groups for name in group.get(_PARAMS, [])):
            raise self.refuse(f"{self.name!r} was saved by an earlier version, which numbered its parameters")
        names, asked = ([sorted(group[_PARAMS]) for group in one] for one in (groups, here))
        self._compare({name for group in names for name in group}, {name for group in asked for name in group})
        if names != asked:
            raise self.refuse(f"the parameters of {self.name!r} were in other groups")
        for group, ours in zip(groups, optimizer.param_groups, strict=True):
            self._compare(set(group), set(group).union(ours))
        parameters = get_model_state_dict(_model_of(self.name, optimizer, parts))
        found = {}
        for key in self.tensors:
            path = self.paths[key]
            parameter = parameters.get(str(path[2])) if path[1] == _STATE else None
            found[key] = self._like(key, parameter)
        return found

    def _like(self, key: str, parameter: Any) -> torch.Tensor:
        size, dtype = self.tensors[key]
        if isinstance(parameter, DTensor) and parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype)
        return torch.empty(size, dtype=dtype)

    def _target(self, key: str, here: Any) -> torch.Tensor:
        size, dtype = self.tensors[key]
        if not isinstance(here, torch.Tensor):
            return torch.empty(size, dtype=dtype)
        if here.shape != size:
            raise self.refuse(f"{key} has shape {tuple(here.shape)}, saved was {tuple(size)}")
        return here

    def _compare(self, saved: set[str], asked: set[str]) -> None:
        differing = []
        if absent := asked - saved:
            differing.append(f"{self.name!r} asks for {_some(absent)}, not saved")
        if ignored := saved - asked:
            differing.append(f"of {self.name!r} was saved {_some(ignored)}, not asked for")
        if differing:
            raise self.refuse("; ".join(differing))


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")  # noqa: PLR2004
