"""Pickles of others, read as data: the one module that touches `pickle`.

A pickle names what is called to rebuild it. Here it may name what the caller lists, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from enum import EnumMeta
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

PickleError: TypeAlias = pickle.PickleError
"""The errors that `loaded` and torch.load raise for a pickle that names something else."""


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        try:
            return self._known[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}") from None

    @override
    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an Enum: Python 3.11.0 to 3.11.3 write one as getattr(Enum, name)."""
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError("it names an attribute of what is no Enum")
    return kind[name]


def loaded(data: bytes, known: Mapping[tuple[str, str], Any]) -> Any:
    """Return what a pickle holds, where it names only what is `known`, by module and name."""
    try:
        return _Restricted(data, known).load()
    except pickle.PickleError:
        raise
    except Exception as problem:  # a damaged pickle may raise anything
        raise pickle.UnpicklingError(str(problem)) from problem
