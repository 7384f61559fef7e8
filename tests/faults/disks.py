"""Small file systems that fill up, take no writes, or fail; and files that rot."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deeplink.cache.store.store import Store
from deeplink.core.types import ShardId
from tests.waiting import LIMIT_S, until

_PROCESS_MADVISE = 440
_MADV_PAGEOUT = 21


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=LIMIT_S, capture_output=True)


def _unmount(path: Path) -> None:
    """Unmount, as soon as nothing uses it: a loop device lets go of its image some time after it was unmounted."""
    said = ""

    def is_done() -> bool:
        nonlocal said
        done = subprocess.run(["umount", path], check=False, timeout=LIMIT_S, capture_output=True, text=True)
        said = done.stderr
        return done.returncode == 0

    until(is_done, told=lambda: said)


@dataclass(frozen=True)
class Disk:
    """A file system of its own at `path`; `image` is the file below it, where there is one."""

    path: Path
    image: Path | None = None

    def fail(self) -> None:
        """Have reads of what is not in memory, and writes, fail with EIO from now on; irrevocable."""
        assert self.image is not None
        os.truncate(self.image, 64 << 10)
        # Or what is written would lengthen the image again, and what was cut off would read as zeros.
        Disk(self.image.parent).fill()

    def refuse_writes(self) -> None:
        """Make it read-only, as Linux does to a file system that it finds damaged."""
        _run("mount", "-o", "remount,ro", self.path)

    def fill(self) -> Path:
        """Leave no byte free; return the file that takes them."""
        ballast = self.path / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
        return ballast


@contextmanager
def disk_in_memory(path: Path, size: int) -> Iterator[Disk]:
    """Mount a file system of so many bytes, which lies in memory."""
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", path)
    try:
        yield Disk(path)
    finally:
        _unmount(path)


@contextmanager
def disk_on_loop(path: Path, size: int) -> Iterator[Disk]:
    """Mount an ext4 of so many bytes, which lies in a file in memory."""
    with disk_in_memory(path.with_suffix(".below"), size + (1 << 20)) as below:
        image = below.path / "image"
        with image.open("wb") as file:
            file.truncate(size)
        # No journal: a file system that fails must not also stop itself, as that would be another fault.
        _run("mkfs.ext4", "-q", "-O", "^has_journal", image)
        path.mkdir()
        _run("mount", "-o", "loop,errors=continue", image, path)
        try:
            yield Disk(path, image)
        finally:
            _unmount(path)


def forget_pages(folder: Path, pid: int) -> None:
    """Have the kernel drop what it holds in memory of the files in `folder`, also where `pid` has mapped them."""
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        if str(folder) in line:
            start, stop = (int(number, 16) for number in line.split()[0].split("-"))
            _page_out(pid, start, stop - start)
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _page_out(pid: int, address: int, length: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        piece = (ctypes.c_uint64 * 2)(address, length)
        library = ctypes.CDLL(None, use_errno=True)
        done = library.syscall(_PROCESS_MADVISE, descriptor, piece, 1, _MADV_PAGEOUT, 0)
        assert done == length, os.strerror(ctypes.get_errno())
    finally:
        os.close(descriptor)


def flip(path: Path, *offsets: int) -> None:
    """Flip a bit at each of these places of a file; negative ones count from its end."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in offsets:
            at = offset % size
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))


def copy_shards(found: Store, store: Store) -> list[ShardId]:
    """Bring every shard of one store into another, verified; return their names."""
    for shard in found.ids():
        data = found.path(shard).read_bytes()
        store.add(shard, [data], len(data))
    return found.ids()
