"""What is noted beside a shard: that it was verified, when it was last read, that it was lost and is wanted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import TYPE_CHECKING

from deeplink.cache import layout
from deeplink.private import private_folder
from deeplink.publish import write_text
from deeplink.types import ShardId

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

SUFFIX = ".mdb"
_VERIFIED, _USED, _WANTED, _DROPPED = ".verified", ".used", ".wanted", ".dropped"


def file_identity(facts: os.stat_result) -> dict[str, int]:
    """Return what tells a file from every other, and from itself before it was changed."""
    return {"dev": facts.st_dev, "ino": facts.st_ino, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def look_at(root: Path) -> tuple[dict[ShardId, os.stat_result], dict[ShardId, os.stat_result]]:
    """Return what the file system says of all shards below `root`, and of the marks that they were verified.

    Raises:
        OSError: the folder cannot be looked at.
    """
    files: dict[ShardId, os.stat_result] = {}
    marks: dict[ShardId, os.stat_result] = {}
    # One pass over the folder: an agent is asked twice a second, about thousands of shards.
    with os.scandir(root) as entries:
        for entry in entries:
            name, dot, kind = entry.name.partition(".")
            into = {SUFFIX: files, _VERIFIED: marks}.get(dot + kind)
            if into is not None and layout.is_shard_id(name):
                with contextlib.suppress(FileNotFoundError):  # removed since
                    into[ShardId(name)] = entry.stat()
    return files, marks


class Marks:
    """The marks in one store's folder. Safe to use from several threads and processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[ShardId, tuple[int, ...]] = {}

    def _verified(self, shard: ShardId) -> Path:
        return self._root / f"{shard}{_VERIFIED}"

    def is_verified(self, shard: ShardId, path: Path) -> bool:
        """Tell whether the very file that is at `path` now was read and found whole on this mount."""
        try:
            return self.is_of(shard, self._verified(shard).stat(), path.stat())
        except OSError:
            self._seen.pop(shard, None)
            return False

    def is_of(self, shard: ShardId, mark: os.stat_result, file: os.stat_result) -> bool:
        """Tell whether a shard's mark says that a file was verified; reads a mark only when it is new."""
        found = file_identity(file)
        seen = (mark.st_ino, mark.st_mtime_ns, *found.values())
        if self._seen.get(shard) == seen:  # asked of every shard twice a second
            return True
        try:
            if json.loads(self._verified(shard).read_text(encoding="ascii")) != found:
                return False
        except (OSError, ValueError):
            self._seen.pop(shard, None)
            return False
        self._seen[shard] = seen
        return True

    def verified_unix(self, shard: ShardId, path: Path) -> float:
        """Return when the file at `path` was last found whole as it is now, seconds since 1970; 0 for never."""
        try:
            return self._verified(shard).stat().st_mtime if self.is_verified(shard, path) else 0.0
        except FileNotFoundError:
            return 0.0

    def set_verified(self, shard: ShardId, identity: dict[str, int]) -> None:
        """Note that the file of this identity was read and found whole."""
        try:
            write_text(self._verified(shard), json.dumps(identity), durable=False)
        except OSError as problem:
            # Only speed is lost: an unmarked shard is read with system calls.
            log.warning("shard %s cannot be marked as verified: %s", shard, problem)

    def unset_verified(self, shard: ShardId) -> bool:
        """Take that back. False: it was not noted.

        Raises:
            OSError: the mark cannot be removed.
        """
        try:
            self._verified(shard).unlink()
        except FileNotFoundError:
            return False
        return True

    def welcome(self, shard: ShardId, identity: dict[str, int]) -> None:
        """Note that a shard has come, and was read and found whole."""
        self.set_verified(shard, identity)
        self.find(shard)
        with contextlib.suppress(OSError):
            (self._root / _DROPPED / shard).unlink(missing_ok=True)

    def dismiss(self, shard: ShardId) -> None:
        """Note that a shard was dropped, and is not to come again before somebody asks for it."""
        with contextlib.suppress(OSError):
            private_folder(self._root / _DROPPED, parents=False)
            (self._root / _DROPPED / shard).touch(mode=0o600)

    def dismissed(self) -> set[ShardId]:
        """Return the shards that were dropped and have not come again."""
        folder = self._root / _DROPPED
        return {ShardId(path.name) for path in folder.glob("*")} if folder.is_dir() else set()

    def touch(self, shard: ShardId) -> None:
        """Note that a shard is being read; a disk that takes no writes is no reason not to read it."""
        with contextlib.suppress(OSError):
            (self._root / f"{shard}{_USED}").touch(mode=0o600)

    def used_unix(self, shard: ShardId) -> float:
        """Return when a shard was last read, seconds since 1970; 0 where that was not noted."""
        with contextlib.suppress(OSError):
            return (self._root / f"{shard}{_USED}").stat().st_mtime
        return 0.0

    def lose(self, shard: ShardId) -> None:
        """Note that a shard was lost here and is to be brought again, if the disk takes that."""
        with contextlib.suppress(OSError):
            private_folder(self._root / _WANTED, parents=False)
            (self._root / _WANTED / shard).touch(mode=0o600)

    def lost(self) -> list[ShardId]:
        """Return the shards that were lost here, sorted."""
        found = ((self._root / _WANTED).glob("*")) if (self._root / _WANTED).is_dir() else ()
        return sorted(ShardId(path.name) for path in found if layout.is_shard_id(path.name))

    def find(self, shard: ShardId) -> None:
        """Note that a lost shard is here again, or is given up."""
        with contextlib.suppress(OSError):
            (self._root / _WANTED / shard).unlink(missing_ok=True)

    def forget(self, shard: ShardId) -> None:
        """Remove all that was noted of a shard.

        Raises:
            OSError: it cannot be removed.
        """
        self.unset_verified(shard)
        (self._root / f"{shard}{_USED}").unlink(missing_ok=True)
        self.find(shard)
