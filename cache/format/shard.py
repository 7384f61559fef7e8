"""Writes a sealed shard; the only module that touches LMDB.

Map size and commits follow from the content alone, so the same content gives the same file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lmdb

from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.format import block
from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deeplink.core.types import ShardId

LMDB_FORMAT = (0, 9)
"""Versions 0.9 and 1.0 of LMDB cannot read each other's files: 0.9 is what shards are."""
_COMMIT_BYTES = 16 << 20
_PROBE = bytes(1 << 20)
_NUMBER = struct.Struct(">Q")
_ONE_FILE: dict[str, Any] = {"subdir": False, "lock": False, "max_dbs": 0}


@dataclass(frozen=True, slots=True, eq=False)
class SealedShard:
    """A shard's file, complete and on stable storage."""

    id: ShardId
    bytes: int
    layout: block.FileLayout


def _check_machine() -> None:
    found, ours, page = lmdb.version(), ".".join(map(str, LMDB_FORMAT)), os.sysconf("SC_PAGESIZE")
    if found[:2] != LMDB_FORMAT:
        problem = f"this is LMDB {'.'.join(map(str, found))}, shards are LMDB {ours} files"
        remedy = "Install the py-lmdb release of constraints.txt, with its default library."
    elif page != block.PAGE:
        problem = f"memory pages of {page} bytes, shards have pages of {block.PAGE}"
        remedy = "Pack on a machine with 4 KiB pages; shards can be read on any."
    else:
        return
    raise DeepLinkError(f"shards cannot be written here: {problem}", remedy=remedy)


def _map_size(payloads: Iterable[int]) -> int:
    """Return room for the blocks and for LMDB's own pages; a function of the content, for it is in the file."""
    pages = [block.value_pages(payload) for payload in payloads]
    # A branch page names over a hundred leaves of over a hundred blocks each, copied at each commit.
    own = 64 + len(pages) // 16 + 16 * (sum(pages) * block.PAGE // _COMMIT_BYTES)
    return (sum(pages) + own) * block.PAGE


def write_shard(path: Path, payloads: list[int], values: Iterable[bytes | bytearray | memoryview]) -> SealedShard:
    """Write a new file at `path` and return it as a sealed shard, on stable storage.

    Its name is the digest of the values as they were given. That the file holds them is seen by each block's
    header, looked for in the file; reading all of it back at once would only show what is still in memory.
    """
    _check_machine()
    size, never = _map_size(payloads), {"sync": False, "metasync": False, "readahead": False}
    digests: list[bytes] = []
    try:
        with lmdb.open(str(path), map_size=size, mode=0o600, **_ONE_FILE, **never) as environment:
            digests += _put_all(environment, values)
    except (lmdb.Error, OSError) as problem:
        _raise_as_os_error(problem, path)
    return _seal(path, payloads, block.name_of(digests))


def _put_all(environment: lmdb.Environment, values: Iterable[bytes | bytearray | memoryview]) -> list[bytes]:
    """Put the values, and return their digests."""
    digests: list[bytes] = []
    transaction = environment.begin(write=True)
    try:
        pending = 0
        for number, value in enumerate(values):
            if pending >= _COMMIT_BYTES:
                transaction.commit()
                # The disk works while the next files are read, not all at once at the end.
                environment.sync(force=True)
                transaction = environment.begin(write=True)
                pending = 0
            # Neither of the two holds Python's lock: files are read in another thread meanwhile.
            digests.append(hashlib.sha256(value).digest())
            transaction.put(_NUMBER.pack(number), value, append=True)
            pending += len(value)
        transaction.commit()
    except BaseException:
        transaction.abort()
        raise
    return digests


def _raise_as_os_error(problem: Exception, path: Path) -> None:
    """Raise what LMDB reports in a sentence as the OSError it was."""
    if isinstance(problem, OSError):
        raise problem
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
        if os.strerror(number) in str(problem):
            raise OSError(number, os.strerror(number), str(path)) from problem
    _raise_true_cause(path)
    raise OSError(errno.EIO, str(problem), str(path)) from problem


def _raise_true_cause(path: Path) -> None:
    """Write on to the draft: LMDB calls it an I/O error when a disk took a part of what was written."""
    with opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
        for _ in range(_COMMIT_BYTES // len(_PROBE)):
            if os.write(descriptor, _PROBE) == len(_PROBE):
                return


def _seal(path: Path, payloads: list[int], shard: ShardId) -> SealedShard:
    with opened(path) as descriptor:
        os.fsync(descriptor)
        found = block.scan_shard(descriptor, shard)
        if found.payloads.tolist() != payloads:
            raise ShardCorruptError(shard, f"{len(found.headers)} of {len(payloads)} blocks found after writing")
        return SealedShard(shard, os.fstat(descriptor).st_size, found)
