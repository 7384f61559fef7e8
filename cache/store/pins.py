"""Pins: what running jobs need of a store, a small file each, `.pins/<holder>.json`, that its job renews.

The lease is the file's modification time and its `ttl_s`. A holder that was killed is forgotten: at once where its
process can be looked for, else in time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import uuid
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.errors import ShardIdError
from deeplink.cache.format.block import checked_shard_id
from deeplink.core.private import private_folder
from deeplink.core.process_identity import ProcessIdentity
from deeplink.core.publish import write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)

TTL_S = 1800.0
"""How long a job may read nothing before its pinned shards may leave (an evaluation, a checkpoint); the most."""
_RENEW = 1 / 20
_HOLDER = re.compile(r"[A-Za-z0-9._-]{1,200}")
_FOLDER = ".pins"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """One holder's pin."""

    holder: str
    version: str  # of the dataset
    shards: tuple[ShardId, ...]  # in the order of their next use
    needed: int  # how many of them, from the first, the running epoch still needs
    expires_unix: float  # unless renewed
    process: ProcessIdentity  # the holder's
    is_readable: bool = True  # whether its shards are known; else it may need any


@dataclass(frozen=True, slots=True)
class Demand:
    """What all holders together need."""

    needed: frozenset[ShardId]  # the shards that must stay
    next_use: Mapping[ShardId, int]  # how far off it is, in shards
    is_known: bool = True  # whether these are all; else any shard may be needed

    def needs(self, shard: ShardId) -> bool:
        """Tell whether a shard must stay."""
        return not self.is_known or shard in self.needed


def demand(pins: Iterable[Pinned]) -> Demand:
    """Return what these pins come to: a shard is needed if any holder needs it; its next use is the nearest."""
    needed: set[ShardId] = set()
    next_use: dict[ShardId, int] = {}
    is_known = True
    for pin in pins:
        is_known = is_known and pin.is_readable
        needed.update(pin.shards[: pin.needed])
        for distance, shard in enumerate(pin.shards):
            next_use[shard] = min(distance, next_use.get(shard, distance))
    return Demand(frozenset(needed), next_use, is_known)


def read_pins(root: Path, now: float) -> list[Pinned]:
    """Return the pins in the store at `root` that hold at `now` (seconds since 1970), by holder.

    What is no pin is logged and passed over; what has expired is removed. One that cannot be read holds for as
    long as any may.
    """
    found = []
    for path in sorted((root / _FOLDER).glob("*.json")):
        try:
            pin = _read(path)
        except FileNotFoundError:  # released since
            continue
        except OSError as problem:
            log.warning("pin %s cannot be read, so no shard leaves for now: %s", path, problem)
            pin = _unread(path, now)
        except (ValueError, KeyError, TypeError, ShardIdError) as problem:
            log.warning("pin %s cannot be used: %s", path, problem)
            continue
        if pin.expires_unix > now and not pin.process.has_ended():
            found.append(pin)
        else:
            log.info("pin %s is forgotten: its holder has ended, or did not renew it", path)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return found


def _unread(path: Path, now: float) -> Pinned:
    try:
        renewed = path.stat().st_mtime
    except OSError:
        renewed = now
    return Pinned(
        holder=path.stem,
        version="",
        shards=(),
        needed=0,
        expires_unix=renewed + TTL_S,
        process=ProcessIdentity(0, 0, ""),
        is_readable=False,
    )


def _read(path: Path) -> Pinned:
    with path.open(encoding="utf-8") as file:
        facts = os.fstat(file.fileno())
        if facts.st_size > _MOST_BYTES:
            raise ValueError(f"{facts.st_size:,} bytes")
        said = json.load(file)
    pid, started, namespace = said["process"]
    shards = tuple(checked_shard_id(str(shard)) for shard in said["shards"])
    return Pinned(
        holder=path.stem,
        version=str(said["version"]),
        shards=shards,
        needed=int(said["needed"]),
        expires_unix=facts.st_mtime + float(said["ttl_s"]),
        process=ProcessIdentity(int(pid), int(started), str(namespace)),
    )


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child's copy is not its own
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _path(root: Path, holder: str) -> Path:
    if not _HOLDER.fullmatch(holder):
        raise ValueError(f"{holder!r} cannot be a holder's name")
    return root / _FOLDER / f"{holder}.json"


class Pin:
    """One process's pin of a dataset's version in this node's store. Not to be carried across fork.

    Nothing here fails: a store that takes no writes is read without a pin.
    """

    def __init__(
        self, root: Path, index: Index, clock: Clock, *, holder: str = "", leader: str = "", ttl_s: float = TTL_S
    ) -> None:
        self.holder = holder or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._path = _path(root, self.holder)
        self._leader = _path(root, leader) if leader else None
        self._version, self._clock, self._ttl_s = index.version, clock, ttl_s
        self._shards: Sequence[ShardId] = [entry.id for entry in index.shards]
        self._needed = len(self._shards)
        self._renewed = float("-inf")
        # A process that ends without `release` leaves none behind; one that is killed does, for `ttl_s`.
        weakref.finalize(self, _remove, self._path, os.getpid())
        self.renew()

    def announce(self, shards: Sequence[ShardId], needed: int) -> None:
        """Say in which order shards are needed from now on, and how many of them the running epoch still needs."""
        if not 0 <= needed <= len(shards):
            raise ValueError(f"{needed} of {len(shards)} shards cannot be needed")
        before = (tuple(self._shards), self._needed, self._leader)
        self._shards, self._needed, self._leader = tuple(shards), needed, None
        if (self._shards, self._needed, self._leader) == before:  # epochs of a second say the same each time
            self.renew()
        else:
            self._write()

    def renew(self) -> None:
        """Keep the pin; next to nothing unless it is due. Call it with every batch."""
        now = self._clock.monotonic()
        if now - self._renewed < self._ttl_s * _RENEW:
            return
        self._renewed = now
        if self._leader is not None and self._touch(self._leader):
            self.release()  # from a time when the leader had none
        elif not self._touch(self._path):  # never written, or it expired while this process was stopped
            self._write()

    def _touch(self, path: Path) -> bool:
        """Renew a pin; False where it is not there."""
        try:
            unix = self._clock.unix()
            os.utime(path, (unix, unix))
        except FileNotFoundError:
            return False
        except OSError as problem:
            log.debug("pin %s cannot be renewed: %s", path, problem)
        return True

    def _write(self) -> None:
        said = {
            "version": self._version,
            "ttl_s": self._ttl_s,
            "needed": self._needed,
            "shards": list(self._shards),
            "process": ProcessIdentity.own()[:3],  # as releases read it that knew no more
        }
        try:
            private_folder(self._path.parent, parents=False)
            # Not waited for: it need not outlive the machine that the holder runs on, and training waits for it.
            write_text(self._path, json.dumps(said), mode=0o600, durable=False)
            unix = self._clock.unix()
            os.utime(self._path, (unix, unix))
        except OSError as problem:
            log.debug("pin %s cannot be written: %s", self._path, problem)

    def release(self) -> None:
        """Need nothing any more."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
