"""Bounds on one process's memory and on how fast it reads from disk, by the kernel's control groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.cache.players import UnmeasuredError

if TYPE_CHECKING:
    from types import TracebackType

_ROOT = Path("/sys/fs/cgroup")


class Limits:
    """A control group of its own, of either version. Ended with the block; its processes must have ended then.

    Args:
        name: of the group.
        disk: a path on the disk whose reads are bounded.
        read_bytes_s: bytes a second that are read from it; no bound when None.
        memory: bytes of the process and of the files that it reads, from now on; no bound when None.

    Raises:
        UnmeasuredError: we may not make control groups here.
    """

    def __init__(
        self, name: str, disk: Path, *, read_bytes_s: int | None = None, memory: int | None = None
    ) -> None:
        number = os.stat(disk).st_dev  # noqa: PTH116 - of a path on it, for its number alone
        device = f"{os.major(number)}:{os.minor(number)}"
        self._groups: list[Path] = []
        try:
            if (_ROOT / "cgroup.controllers").exists():
                self._make_one(name, device, read_bytes_s, memory)
            else:
                self._make_each(name, device, read_bytes_s, memory)
        except OSError as problem:
            self.end()
            raise UnmeasuredError(f"no control groups to be had: {problem}") from problem

    def _make_one(self, name: str, device: str, read_bytes_s: int | None, memory: int | None) -> None:
        _write(_ROOT / "cgroup.subtree_control", "+memory +io")
        group = self._made(_ROOT / name)
        if memory is not None:
            _write(group / "memory.max", str(memory))
        if read_bytes_s is not None:
            _write(group / "io.max", f"{device} rbps={read_bytes_s}")

    def _make_each(self, name: str, device: str, read_bytes_s: int | None, memory: int | None) -> None:
        if memory is not None:
            _write(self._made(_ROOT / "memory" / name) / "memory.limit_in_bytes", str(memory))
        if read_bytes_s is not None:
            bound = f"{device} {read_bytes_s}"
            _write(self._made(_ROOT / "blkio" / name) / "blkio.throttle.read_bps_device", bound)

    def _made(self, group: Path) -> Path:
        group.mkdir()
        self._groups.append(group)
        return group

    def hold(self, pid: int) -> None:
        """Put a process into the group; what it has so far is not counted.

        Raises:
            UnmeasuredError: it cannot be put there.
        """
        try:
            for group in self._groups:
                _write(group / "cgroup.procs", str(pid))
        except OSError as problem:
            raise UnmeasuredError(f"no control groups to be had: {problem}") from problem

    def end(self) -> None:
        """Remove the group."""
        while self._groups:
            self._groups.pop().rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _write(path: Path, text: str) -> None:
    path.write_text(f"{text}\n", encoding="ascii")
