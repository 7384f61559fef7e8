from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NoReturn

import pytest

from deeplink.cache.errors import ShardCorruptError, ShardIdError, StoreError, StoreFullError
from deeplink.cache.format import block
from deeplink.cache.store.store import Store
from deeplink.core.types import ShardId
from tests.cache.pack.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.pack.building import SealedShard


@pytest.fixture
def sealed(tmp_path: Path) -> SealedShard:
    return write(tmp_path / "draft", PAYLOADS)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_store_is_its_users_alone_and_becomes_it_where_it_was_there(tmp_path: Path) -> None:
    assert stat.S_IMODE(Store(tmp_path / "disk" / "store").root.stat().st_mode) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    assert stat.S_IMODE(Store(shared).root.stat().st_mode) == 0o700


def chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(10_000):
            yield chunk


def names(store: Store) -> set[str]:
    return {path.name for path in store.root.iterdir()}


def test_a_shard_that_came_whole_is_held_and_verified(tmp_path: Path, store: Store, sealed: SealedShard) -> None:
    assert store.add(sealed.id, chunks(tmp_path / "draft"), sealed.bytes)
    assert store.has(sealed.id)
    assert store.is_verified(sealed.id)
    assert store.path(sealed.id).read_bytes() == (tmp_path / "draft").read_bytes()
    status = store.status()
    assert (status.shards, status.bytes, status.ids) == (1, sealed.bytes, (sealed.id,))
    assert not store.add(sealed.id, chunks(tmp_path / "draft"), sealed.bytes)


def test_what_is_not_the_shard_is_refused_and_leaves_nothing(
    tmp_path: Path, store: Store, sealed: SealedShard
) -> None:
    whole = (tmp_path / "draft").read_bytes()
    flipped = bytearray(whole)
    flipped[int(sealed.layout.offsets[-1]) + 50] ^= 1
    for content, total in (
        (whole[:-1], len(whole)),
        (whole + b"x", len(whole)),
        (bytes(flipped), len(whole)),
        (b"", 0),
    ):
        with pytest.raises(ShardCorruptError):
            store.add(sealed.id, [content], total)
        assert not names(store)


def test_a_sender_that_dies_leaves_nothing(tmp_path: Path, store: Store, sealed: SealedShard) -> None:
    def dying() -> Iterator[bytes]:
        yield from list(chunks(tmp_path / "draft"))[:3]
        raise ConnectionResetError

    with pytest.raises(StoreError):
        store.add(sealed.id, dying(), sealed.bytes)
    assert not names(store)


def test_no_room_is_said_before_anything_is_written(store: Store, sealed: SealedShard) -> None:
    with pytest.raises(StoreFullError) as refused:
        store.add(sealed.id, [], 1 << 60)
    assert refused.value.needed == 1 << 60
    assert not names(store)


def test_names_with_path_tricks_never_become_paths(store: Store) -> None:
    for name in ("../x", "/etc/passwd", "", "a" * 39):
        for ask in (store.path, store.has, store.remove):
            with pytest.raises(ShardIdError):
                ask(ShardId(name))


def test_the_mark_holds_for_that_very_file_only(tmp_path: Path, store: Store, sealed: SealedShard) -> None:
    store.adopt(tmp_path / "draft", sealed.id)
    assert store.is_verified(sealed.id)
    path = store.path(sealed.id)
    facts = path.stat()
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # the same bytes, another file
    assert not store.is_verified(sealed.id)
    assert store.verify(sealed.id)
    assert store.is_verified(sealed.id)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert not store.is_verified(sealed.id)


def test_scrubbing_marks_the_whole_and_sets_the_damaged_aside(
    tmp_path: Path, store: Store, sealed: SealedShard
) -> None:
    store.adopt(tmp_path / "draft", sealed.id)
    other = write(tmp_path / "other", PAYLOADS[:2])
    store.adopt(tmp_path / "other", other.id)
    for shard in (sealed.id, other.id):
        (store.root / f"{shard}.verified").unlink()
    os.truncate(store.path(other.id), 10_000)
    assert store.verify(sealed.id)
    assert not store.verify(other.id)
    assert store.is_verified(sealed.id)
    assert not store.has(other.id)
    assert len(list((store.root / "quarantine").iterdir())) == 1
    assert store.ids() == [sealed.id]


def test_a_damaged_shards_successor_is_left_alone(tmp_path: Path, store: Store, sealed: SealedShard) -> None:
    store.adopt(tmp_path / "draft", sealed.id)
    assert not store.quarantine(sealed.id, "seen on another inode", inode=store.inode(sealed.id) + 1)
    assert store.has(sealed.id)
    assert store.quarantine(sealed.id, "this one", inode=store.inode(sealed.id))
    assert not store.has(sealed.id)
    assert store.inode(sealed.id) == 0


def test_a_good_copy_that_came_while_a_damaged_one_was_read_stays(
    tmp_path: Path, store: Store, sealed: SealedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (tmp_path / "draft").read_bytes()
    path = store.path(sealed.id)
    path.write_bytes(good[:10_000])
    verify = block.verify_shard

    def replaced_meanwhile(descriptor: int, shard: ShardId) -> object:
        (tmp_path / "good").write_bytes(good)
        (tmp_path / "good").replace(path)
        return verify(descriptor, shard)

    monkeypatch.setattr(block, "verify_shard", replaced_meanwhile)
    assert not store.verify(sealed.id)
    assert path.read_bytes() == good


def test_what_comes_takes_the_place_of_one_that_was_cut_off(
    tmp_path: Path, store: Store, sealed: SealedShard
) -> None:
    good, path = (tmp_path / "draft").read_bytes(), store.path(sealed.id)
    path.write_bytes(good[:-1])
    assert not store.has_whole(sealed.id, sealed.bytes)
    with pytest.raises(ShardCorruptError):
        store.add(sealed.id, [good[:-2]], sealed.bytes)
    assert path.read_bytes() == good[:-1]
    assert store.add(sealed.id, [good], sealed.bytes)
    assert path.read_bytes() == good
    path.write_bytes(good[:-1])
    assert store.adopt(tmp_path / "draft", sealed.id)
    assert store.has_whole(sealed.id, sealed.bytes)
    assert store.is_verified(sealed.id)


def test_what_is_dropped_is_noted_before_it_goes(
    tmp_path: Path, store: Store, sealed: SealedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not store.drop(sealed.id)
    assert store.dismissed() == set()
    store.adopt(tmp_path / "draft", sealed.id)
    remove, noted = store.remove, []

    def removed(shard: ShardId) -> bool:
        noted.append(store.dismissed())
        return remove(shard)

    monkeypatch.setattr(store, "remove", removed)
    assert store.drop(sealed.id)
    assert noted == [{sealed.id}]


def test_quarantine_keeps_the_newest_few(tmp_path: Path, store: Store, sealed: SealedShard) -> None:
    content = (tmp_path / "draft").read_bytes()
    for _ in range(7):
        store.path(sealed.id).write_bytes(content)
        assert store.quarantine(sealed.id, "once more")
    assert len(list((store.root / "quarantine").iterdir())) == 4


def test_what_is_not_a_shard_is_not_listed(store: Store, sealed: SealedShard, tmp_path: Path) -> None:
    store.adopt(tmp_path / "draft", sealed.id)
    for name in ("notes.txt", "x.mdb", ".draft-abc.mdb-123"):
        (store.root / name).write_text("x")
    assert store.ids() == [sealed.id]
    assert store.remove(sealed.id)
    assert not store.remove(sealed.id)
    assert store.status().shards == 0


@pytest.mark.parametrize("kind", ["mdb", "verified"])
def test_drafts_nobody_writes_to_are_swept(store: Store, kind: str) -> None:
    draft = store.root / f".draft-{'0' * 40}.{kind}-abcdef"
    draft.write_text("x")
    assert store.sweep(draft.stat().st_mtime + 10) == 0
    assert store.sweep(draft.stat().st_mtime + 4000) == 1
    assert not draft.exists()


def test_a_lack_of_descriptors_is_no_damage(
    tmp_path: Path, store: Store, sealed: SealedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.adopt(tmp_path / "draft", sealed.id)

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(block, "verify_shard", refuse)
    with pytest.raises(OSError, match="Too many"):
        store.verify(sealed.id)
    assert store.has(sealed.id)


@pytest.mark.parametrize(
    ("code", "is_doubted"),
    [
        (errno.EIO, True),
        (errno.ESTALE, True),
        (errno.ETIMEDOUT, True),
        (errno.EUCLEAN, True),
        (errno.EACCES, False),
    ],
    ids=errno.errorcode.get,
)
def test_an_error_of_the_file_system_is_no_damage(
    tmp_path: Path, store: Store, sealed: SealedShard, code: int, *, is_doubted: bool
) -> None:
    store.adopt(tmp_path / "draft", sealed.id)

    def refuse(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        patch.setattr(os, "preadv", refuse)
        with pytest.raises(OSError, match=os.strerror(code)):
            store.verify(sealed.id)
    assert store.has(sealed.id)
    assert not (store.root / "quarantine").exists()
    assert store.is_verified(sealed.id) is not is_doubted  # no page of it is touched in a mapping meanwhile
    assert store.verify(sealed.id)
    assert store.is_verified(sealed.id)


def test_a_store_that_cannot_be_a_folder_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError) as refused:
        Store(tmp_path / "file" / "store")
    assert "DEEPLINK_STORE" in refused.value.remedy
