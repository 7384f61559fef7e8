"""The tests' one use of `pickle`: objects that must survive it, and pickles of strangers that must not be run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")


def pickled(value: Any) -> bytes:
    return pickle.dumps(value)


def copied(value: T) -> T:
    """Return what another process gets of `value`."""
    copy: T = pickle.loads(pickle.dumps(value))  # noqa: S301 - our own
    return copy


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def running(path: Path) -> bytes:
    """Return a pickle that makes a file where it is loaded."""
    return pickled([_Runs(path)])


class _Got:
    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    @override
    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def got(owner: Any, name: str) -> bytes:
    """Return a pickle that asks for an attribute where it is loaded."""
    return pickled(_Got(owner, name))


def unpickled(data: bytes) -> Any:
    """Return what our own pickle holds."""
    return pickle.loads(data)  # noqa: S301 - our own
