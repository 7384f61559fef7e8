"""A file system that refuses: every open, listing, stat, rename and removal in this process passes here."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REFUSALS = [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT]


@dataclass
class _Faults:
    """What the audit hook does; Python never removes one."""

    is_hooked: bool = False
    meet: Callable[[str, str], None] | None = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.meet is None or not (event == "open" or event.startswith("os.")):
            return
        if args and isinstance(args[0], str | bytes | os.PathLike):
            self.meet(event, os.fsdecode(args[0]))


_faults = _Faults()


@contextmanager
def refusing(is_refused: Callable[[str, str], bool], *, code: int = errno.EACCES) -> Iterator[None]:
    """Have each call to the file system fail for which `is_refused` holds, by its kind and path."""
    if not _faults.is_hooked:
        sys.addaudithook(_faults)
        _faults.is_hooked = True

    def meet(event: str, path: str) -> None:
        if is_refused(event, path):
            raise OSError(code, os.strerror(code), path)

    stat, lstat = os.stat, os.lstat

    def looked(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike):
            meet("os.stat", os.fspath(path))
        return stat(path, *args, **more)

    def looked_at_link(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike):
            meet("os.stat", os.fspath(path))
        return lstat(path, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", looked)
        patch.setattr(os, "lstat", looked_at_link)
        _faults.meet = meet
        try:
            yield
        finally:
            _faults.meet = None
