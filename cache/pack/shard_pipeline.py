"""Makes shards as a pipeline: the next is read while the last is written, sealed and brought to its owners."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np

from deeplink.cache import membership
from deeplink.cache.errors import (
    HomeError,
    MemberError,
    PlacementError,
    ShardCorruptError,
    StoreError,
    StoreFullError,
)
from deeplink.cache.format import block
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.membership import CANDIDATES, RendezvousOrder
from deeplink.cache.pack.building import AbandonedError, FileReader, Piece, ShardBuilder
from deeplink.cache.transfer.client import MemberClient
from deeplink.core.descriptors import LockHeldError, opened, try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.publish import published_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.format.names import Names
    from deeplink.cache.source.home import PackedHome
    from deeplink.cache.source.source import Source
    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName, ShardId

log = logging.getLogger(__name__)

_PREFIX = ".packing-"
_KEPT_S = 86_400.0
_WRITERS = 2
"""One shard is hashed and written while the one before waits for the disk and for its copies to be taken."""


class Placer:
    """Brings shards to the members they belong on, or into this node's own store where there are no members.

    Use `with`; asks each member once when it is entered. Shards may be placed from several threads.
    """

    def __init__(
        self, store: Store, node: NodeName, members: Sequence[Member], token: str, *, replicas: int
    ) -> None:
        self._store, self._node = store, node
        self._names = [member.name for member in members] or [node]
        self._known = membership.standing(members)
        self._order = RendezvousOrder(self._names, self._known)
        self.wanted = min(replicas, len(self._names))  # copies of each shard
        self.needed: set[ShardId] = set()  # placed, or to be: of these none leaves this node's store for others
        self._clients = {member.name: MemberClient(member, token) for member in members if member.name != node}
        self._held: dict[NodeName, dict[ShardId, int]] = {}
        self._problems: dict[NodeName, str] = {}

    def __enter__(self) -> Self:
        for name, client in self._clients.items():
            try:
                self._held[name] = client.held()
            except MemberError as problem:
                self.give_up(name, str(problem))
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def give_up(self, name: NodeName, problem: str) -> None:
        """Count no longer on a member, nor on what it holds."""
        log.warning("%s", problem)
        self._problems[name] = problem
        self._held.pop(name, None)

    def silent(self, name: NodeName, problem: str) -> None:
        """Note that a member's agent does not answer; this node's own store needs no agent."""
        if name != self._node:
            self.give_up(name, problem)

    def _has(self, name: NodeName, shard: ShardId, size: int) -> bool:
        if name == self._node:
            return self._store.has_whole(shard, size)
        return self._held.get(name, {}).get(shard) == size

    def holders(self, shard: ShardId, size: int) -> tuple[NodeName, ...]:
        """Return the members that hold a shard, in the order in which they are to hold it."""
        holders = [name for name in self._names if self._has(name, shard, size)]
        return membership.ranked(shard, holders, self._known)

    def answers(self, name: NodeName) -> bool:
        """Tell whether a member has answered every request, or is this node."""
        return name not in self._problems

    def saw(self, shard: ShardId, size: int, holders: Sequence[NodeName]) -> None:
        """Note that others have brought a shard, whose file has `size` bytes, to `holders`."""
        for name in holders:
            if name in self._clients and name not in self._problems:
                self._held.setdefault(name, {})[shard] = size

    def is_placed(self, shard: ShardId, size: int) -> bool:
        """Tell whether a shard, whose file has `size` bytes, has all the copies that are wanted."""
        return len(self.holders(shard, size)) >= self.wanted

    def place(self, shard: ShardId, draft: Path) -> tuple[NodeName, ...]:
        """Bring a shard, whose sealed file is `draft`, to its owners and return its holders; `draft` is used up.

        An owner that cannot take it is replaced by the next member in order, and if all holders would then fail
        together, by one that does not. Fewer copies than wanted are logged.
        """
        self.needed.add(shard)
        held, problems = list(self.holders(shard, draft.stat().st_size)), []
        path = draft
        left = list(self._order.first(shard, CANDIDATES))
        while len(held) < self.wanted:
            name = membership.next_holder(left, held, self.wanted, self._known)
            if name is None:
                break
            left.remove(name)
            if name in self._problems:
                problems.append(self._problems[name])
                continue
            try:
                path = self._bring(name, shard, path)
                held.append(name)
            except (MemberError, StoreFullError, StoreError) as problem:
                if not self._clients and not isinstance(problem, MemberError):
                    raise
                problems.append(str(problem))
                self.give_up(name, str(problem))
        draft.unlink(missing_ok=True)
        if not held:
            raise PlacementError(shard, problems)
        if len(held) < self.wanted:
            log.warning("shard %s has %d of %d copies: %s", shard, len(held), self.wanted, "; ".join(problems))
        return tuple(held)

    def _bring(self, name: NodeName, shard: ShardId, path: Path) -> Path:
        if name != self._node:
            self._clients[name].put(shard, path)
            self._held.setdefault(name, {})[shard] = path.stat().st_size
            return path
        self._store.adopt(path, shard)
        return self._store.path(shard)

    def fetch(self, shard: ShardId, size: int, draft: Path) -> bool:
        """Write a copy of a shard that some member holds to `draft`. False: none gave one.

        Where this node's own store has it, `draft` is that very file.
        """
        if self._store.has_whole(shard, size):
            draft.hardlink_to(self._store.path(shard))
            return True
        for name in self.holders(shard, size):
            try:
                with draft.open("wb") as file:
                    for chunk in self._clients[name].get(shard, size):
                        file.write(chunk)
            except (MemberError, ShardCorruptError) as problem:
                self.give_up(name, str(problem))
                draft.unlink(missing_ok=True)
            else:
                return True
        return False


class Staging:
    """The working folder of one plan, which outlives a killed packer; use `staging` to enter it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draft(self, number: int) -> Path:
        """Return where to write the shard of this number; nothing is there."""
        path = self.folder / f"{number}.mdb"
        path.unlink(missing_ok=True)
        return path

    def note(self, number: int, piece: Piece) -> None:
        """Keep what is known of a shard that was sealed and placed."""
        with published_file(self.folder / f"{number}.npz", durable=False) as draft, draft.open("wb") as file:
            np.savez(
                file,
                id=np.frombuffer(piece.id.encode(), np.uint8),
                bytes=np.array([piece.bytes], np.int64),
                block_offsets=piece.block_offsets,
                checksums=piece.checksums,
            )

    def noted(self, number: int, samples: int) -> Piece | None:
        """Return what an earlier packer left of the shard of this number; None where that is nothing usable."""
        try:
            with np.load(self.folder / f"{number}.npz", allow_pickle=False) as kept:
                shard = checked_shard_id(kept["id"].tobytes().decode("ascii"))
                piece = Piece(shard, int(kept["bytes"][0]), kept["block_offsets"], kept["checksums"])
        except (OSError, ValueError, KeyError, IndexError, DeepLinkError):
            return None
        return piece if len(piece.checksums) == samples else None


@contextlib.contextmanager
def staging(root: Path, plan: str, now: float) -> Iterator[Staging]:
    """Give the working folder of a plan; it is removed when the packing succeeds, and kept when it fails."""
    folder = root / f"{_PREFIX}{plan}"
    try:
        _remove_old(root, folder, now)
        private_folder(folder, parents=False)
    except OSError as problem:
        raise StoreError(root, problem.strerror or str(problem)) from problem
    with opened(folder) as descriptor:
        if not try_lock(descriptor):
            running = f"another `deeplink pack` of this source works in {folder}"
            raise LockHeldError(running, remedy="Wait until it is done.")
        try:
            yield Staging(folder)
        finally:
            for draft in folder.glob("*.mdb"):
                draft.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_old(root: Path, own: Path, now: float) -> None:
    """Remove what packers left a day ago and never came back for."""
    for folder in root.glob(f"{_PREFIX}*"):
        if folder != own:
            with contextlib.suppress(OSError), opened(folder) as descriptor:
                if try_lock(descriptor) and now - os.fstat(descriptor).st_mtime > _KEPT_S:
                    shutil.rmtree(folder, ignore_errors=True)


class ShardPipeline:
    """Makes one shard after another. Use `with`: at its end no thread works any more."""

    def __init__(
        self,
        origin: Source,
        store: Store,
        stage: Staging,
        placer: Placer,
        *,
        home: PackedHome | None,
        clock: Clock,
        done: Callable[[int, int], None],
    ) -> None:
        """Read `origin`, make drafts in `stage`, which lies on the file system of `store`, this node's own.

        Each shard goes where `placer` brings it and, unless None, to `home`; `done` counts files and bytes read.
        A home that takes no more is left alone from then on; `home_problem` says why.
        """
        self.origin, self.stage, self.placer = origin, stage, placer
        self._store, self._home, self._done = store, home, done
        self.home_problem = ""
        self._reader = FileReader(origin, clock)
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="deeplink-pack")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reader:
            self._pool.shutdown(wait=True)

    def build(self, number: int, names: Names, sizes: np.ndarray) -> Future[Piece]:
        """Return when all files of a shard were read; the future is done once it lies where it belongs."""
        builder = ShardBuilder(self.origin, self._reader, names, sizes, self._done)
        finished = self._pool.submit(self._finish, number, builder, builder.file_bytes())
        try:
            builder.read()
        except AbandonedError:
            finished.result()
            raise
        return finished

    def _finish(self, number: int, builder: ShardBuilder, size: int) -> Piece:
        try:
            with self._store.room_for(size):
                draft = self.stage.draft(number)
                piece = builder.write(draft)
                self._keep_at_home(piece, draft)
                self.placer.place(piece.id, draft)
            self.stage.note(number, piece)
        except OSError as problem:
            self._store.raise_as_store_error(problem, size)
        finally:
            builder.abandon()
        return piece

    def keep(self, number: int, piece: Piece) -> bool:
        """Give a shard that was packed before the copies it lacks. False: no whole one is left."""
        self.placer.needed.add(piece.id)
        if self._is_at_home(piece) and self.placer.is_placed(piece.id, piece.bytes):
            return True
        is_here = self._store.has_whole(piece.id, piece.bytes)
        with contextlib.nullcontext() if is_here else self._store.room_for(piece.bytes):
            draft = self.stage.draft(number)
            try:
                if not self._fetched(piece, draft):
                    return False
            except OSError as problem:
                self._store.raise_as_store_error(problem, piece.bytes)
            self._keep_at_home(piece, draft)
            self.placer.place(piece.id, draft)
        return True

    def _keep_at_home(self, piece: Piece, draft: Path) -> None:
        if self._home is not None:
            try:
                self._home.put(piece.id, draft)
            except HomeError as problem:
                self._give_up_home(problem)

    def _is_at_home(self, piece: Piece) -> bool:
        """Tell whether the home has a shard, or is none any more."""
        try:
            return self._home is None or self._home.has(piece.id, piece.bytes)
        except HomeError as problem:
            self._give_up_home(problem)
            return True

    def _give_up_home(self, problem: HomeError) -> None:
        """Go on without the home: it is one more copy, and no reason to end a pack."""
        log.warning("packing goes on without the home: %s", problem)
        self._home, self.home_problem = None, str(problem)

    def _fetched(self, piece: Piece, draft: Path) -> bool:
        """Write a whole copy of a shard to `draft`. False: there is none."""
        while self.placer.fetch(piece.id, piece.bytes, draft) or self._from_home(piece, draft):
            try:
                with opened(draft) as descriptor:
                    block.verify_shard(descriptor, piece.id)
            except ShardCorruptError as problem:
                log.warning("%s", problem)
                # The draft may be the very file of this node's store. That must be no holder any more, or what is
                # made in its place would be thrown away; and another holder's copy may be whole.
                own = self._store.quarantine(piece.id, str(problem), inode=draft.stat().st_ino)
                draft.unlink()
                if not own:
                    return False
            else:
                return True
        return False

    def _from_home(self, piece: Piece, draft: Path) -> bool:
        if self._home is None or not self._is_at_home(piece):
            return False
        try:
            with draft.open("wb") as file:
                for chunk in self._home.fetch(piece.id, piece.bytes):
                    file.write(chunk)
        except HomeError as problem:
            self._give_up_home(problem)
            return False
        return True
