"""Which shards a user of a node may read, and reads by the agent's Unix socket."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import SampleForbiddenError
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.readers import ShardReaders, groups_of
from deeplink.cache.replicate.shard_recovery import KnownShards
from deeplink.cache.source.home import FolderHome, HomeCopy
from deeplink.core.clock import ManualClock
from deeplink.core.types import ShardId
from deeplink.rpc.listeners import ListenError
from tests.cache.agents import write_tree
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.core.config import Config
    from tests.cache.keepers import Keepers

MEMBER, OTHER = 54_321, 54_322
"""Users that no machine of ours has."""
_AGAIN_S, _SOON_S = 61.0, 21.0
"""After the longer one nothing counts any more; after the shorter one it is looked at again."""


@pytest.fixture
def open_source_folder(source: Path) -> Path:
    for folder in (source, *source.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    source.chmod(0o755)
    return source


class Asked:
    """Which of a dataset's shards are forbidden to whom, as an agent of another user's finds out."""

    def __init__(self, config: Config, group: int) -> None:
        self.clock, self._config = ManualClock(), config
        known = KnownShards(Catalog(config.catalog), self.clock)
        groups = {MEMBER: frozenset({group})}
        self._readers = ShardReaders(
            known, self.clock, own=1, groups=lambda user: groups.get(user, frozenset[int]())
        )

    def may(self, name: str, version: str = "", *, some: bool = False, after_s: float = _AGAIN_S) -> set[int]:
        """Return who of publisher, member of the group and other user may read all; time has passed before.

        `some`: that there are shards which one may read and others which one may not is fine.
        """
        self.clock.now += after_s
        shards = len(Catalog(self._config.catalog).open(name, version or None).shards)
        found = set()
        for user in (os.geteuid(), MEMBER, OTHER):
            forbidden = self.forbidden(name, user, version)
            assert len(forbidden) in {0, shards} or some
            if not forbidden:
                found.add(user)
        return found

    def forbidden(self, name: str, user: int, version: str = "") -> set[ShardId]:
        """Return which of a dataset's shards a user may not read at this moment."""
        index = Catalog(self._config.catalog).open(name, version or None)
        return self._readers.forbidden([entry.id for entry in index.shards], user)


ALL = {os.geteuid(), MEMBER, OTHER}


def test_a_dataset_is_read_as_far_as_its_newest_version_says(open_source_folder: Path, config: Config) -> None:
    source, asked = open_source_folder, Asked(config, open_source_folder.stat().st_gid)
    first = pack(str(source), "digits", config=config)
    assert asked.may("digits") == ALL
    source.chmod(0o750)
    pack(str(source), "digits", config=config)
    assert asked.may("digits") == ALL - {OTHER}
    source.chmod(0o700)
    pack(str(source), "digits", config=config)
    assert asked.may("digits", first.version) == {os.geteuid()}  # it is of the same dataset, and as private
    source.chmod(0o755)
    pack(str(source), "digits", config=config)
    assert asked.may("digits") == ALL


def test_no_other_dataset_opens_what_one_keeps_private(
    open_source_folder: Path, config: Config, files: dict[str, bytes]
) -> None:
    source, asked = open_source_folder, Asked(config, -1)
    source.chmod(0o700)
    pack(str(source), "secret", config=config)
    copy = write_tree(source.with_name("copy"), files)
    pack(str(copy), "copy", config=config)
    assert asked.may("copy") == {os.geteuid()}
    Catalog(config.catalog).remove_all("secret")
    # Both were of one publisher, who has left the open one.
    assert asked.may("copy") == ALL


def test_a_private_copy_takes_nothing_from_those_who_may_read_a_file_at_home_with_the_same_bytes(
    open_source_folder: Path, config: Config, files: dict[str, bytes], tmp_path: Path
) -> None:
    source, asked = open_source_folder, Asked(config, -1)
    home = tmp_path / "home"
    pack(str(source), "digits", config=config, home=str(home))
    private = write_tree(source.with_name("private"), files)
    private.chmod(0o700)
    pack(str(private), "private", config=config)
    until(lambda: asked.may("digits", some=True, after_s=0) == ALL)  # once the copies were read
    home.chmod(0o700)
    assert asked.may("digits") == {os.geteuid()}
    until(lambda: asked.may("digits", after_s=_SOON_S) == {os.geteuid()})
    home.chmod(0o755)
    until(lambda: asked.may("digits", some=True, after_s=_SOON_S) == ALL)
    for shard in home.glob("*.mdb"):
        shard.chmod(0o600)
    assert asked.may("digits") == {os.geteuid()}


def test_a_file_of_other_bytes_in_a_home_opens_nothing(
    open_source_folder: Path,
    config: Config,
    files: dict[str, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, asked = open_source_folder, Asked(config, -1)
    source.chmod(0o700)
    pack(str(source), "secret", config=config)
    home = tmp_path / "home"
    copy = write_tree(source.with_name("copy"), files)
    pack(str(copy), "copy", config=config, home=str(home))
    for shard in home.glob("*.mdb"):
        assert shard.stat().st_mode & 0o777 == 0o644
        shard.write_bytes(bytes(shard.stat().st_size))
    assert asked.may("copy") == {os.geteuid()}
    shards = len(list(home.glob("*.mdb")))
    for _ in range(4):
        until(
            lambda: asked.may("copy") == {os.geteuid()} and caplog.text.count("counts for nothing") == shards
        )  # each was read once


@pytest.fixture
def opened_by_copies(open_source_folder: Path, config: Config, files: dict[str, bytes], tmp_path: Path) -> Path:
    """The home of the dataset `copy`, whose shards only the files there open: `secret` has them, too."""
    open_source_folder.chmod(0o700)
    pack(str(open_source_folder), "secret", config=config)
    copy = write_tree(open_source_folder.with_name("copy"), files)
    pack(str(copy), "copy", config=config, home=str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_proof_of_one_shard_is_none_of_another(
    opened_by_copies: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HomeCopy, "identity", (1,))  # renamed within one tick of the file system's clock
    asked, other = Asked(config, -1), max(opened_by_copies.glob("*.mdb"))
    other.write_bytes(bytes(other.stat().st_size))
    for _ in range(3):
        until(lambda: len(asked.forbidden("copy", OTHER)) == 1)
        assert asked.forbidden("copy", OTHER) == {other.stem}


def test_a_copy_of_another_size_is_not_read(
    opened_by_copies: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    asked, large = Asked(config, -1), min(opened_by_copies.glob("*.mdb"))
    os.truncate(large, 1 << 42)
    until(lambda: asked.forbidden("copy", OTHER) == {large.stem})
    assert "it has 4,398,046,511,104 bytes instead of" in caplog.text


def test_a_home_that_does_not_answer_holds_up_neither_requests_nor_other_homes(
    opened_by_copies: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, answers = opened_by_copies.with_name("dead"), threading.Event()
    pack(str(opened_by_copies.with_name("copy")), "theirs", config=config, home=str(dead))
    copy_of = FolderHome.copy_of

    @contextmanager
    def stuck(self: FolderHome, shard: ShardId) -> Iterator[HomeCopy]:
        if self.url == str(dead):
            assert answers.wait(LIMIT_S)
            raise ValueError("what nobody foresaw")
        with copy_of(self, shard) as copy:
            yield copy

    with monkeypatch.context() as patched:
        patched.setattr(FolderHome, "copy_of", stuck)
        asked = Asked(config, -1)
        until(lambda: not asked.forbidden("copy", OTHER))
        assert not answers.is_set()
        for shard in opened_by_copies.glob("*.mdb"):
            shard.unlink()
        until(lambda: asked.may("copy") == {os.geteuid()})
    answers.set()
    until(lambda: asked.may("copy", some=True, after_s=_SOON_S) == ALL)


def test_what_nobody_recorded_is_for_its_publisher_alone(
    open_source_folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(config, -1)
    monkeypatch.setattr("deeplink.cache.source.local_source.SourceAccess.of_folder", lambda _folder: None)
    pack(str(open_source_folder), "old", config=config)
    assert not Catalog(config.catalog).open("old").access
    assert asked.may("old") == {os.geteuid()}


def test_a_shard_of_no_dataset_is_for_root_and_the_agents_own_user(config: Config) -> None:
    unknown = [ShardId("ab" * 20)]
    readers = ShardReaders(KnownShards(Catalog(config.catalog), ManualClock()), ManualClock(), own=MEMBER)
    assert readers.forbidden(unknown, OTHER) == set(unknown)
    assert readers.forbidden(unknown, MEMBER) == readers.forbidden(unknown, 0) == set()


def test_groups_are_those_of_this_machine() -> None:
    assert os.getegid() in groups_of(os.geteuid())
    assert groups_of(MEMBER) == frozenset()


@pytest.fixture
def at_socket(keepers: Keepers, open_source_folder: Path) -> Iterator[tuple[Keepers, Path, Config]]:
    """A member that answers at a socket, and the settings of a reader that holds no token."""
    config = keepers.config(store=keepers.root / "packed")
    pack(str(open_source_folder), "digits", config=config, home=str(keepers.root / "home"))
    path = keepers.root / "agent.sock"
    listener = keepers.start("n0").keeper.local_listener(path)
    listener.start()
    yield keepers, path, keepers.config(node_socket=path, store=keepers.root / "own", read_deadline_ms=20_000)
    listener.close()
    assert not path.exists()


def test_without_a_token_users_are_served_at_the_socket_and_what_is_missing_is_brought(
    at_socket: tuple[Keepers, Path, Config], files: dict[str, bytes], source: Path
) -> None:
    keepers, path, config = at_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    source.rename(source.with_name("moved"))
    agent = keepers.running["n0"]
    with Reader.open("digits", config=config) as reader:

        def epoch() -> int:
            before = reader.stats().local_samples
            views = reader.read(range(len(reader)))
            assert {reader.index.key(row): bytes(view) for row, view in enumerate(views)} == files
            return reader.stats().local_samples - before

        assert epoch() == 0
        assert reader.stats().home_samples == len(files)
        until(lambda: len(agent.store.ids()) == len(reader.index.shards), 10)
        reader.close()  # what was not held is not asked for again within seconds
        until(lambda: epoch() == len(files))
        assert reader.stats().source_samples == 0


def test_who_may_not_read_is_told_once_and_the_file_system_decides(
    at_socket: tuple[Keepers, Path, Config],
    files: dict[str, bytes],
    source: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keepers, _, config = at_socket
    keepers.running["n0"].keeper._serving.forbidden = lambda shards, _user: shards
    with Reader.open("digits", config=config) as reader:
        for _ in range(2):
            assert len(reader.read(range(len(reader)))) == len(files)
        assert (reader.stats().local_samples, reader.stats().home_samples) == (0, 2 * len(files))
        assert caplog.text.count("do not let this user read it") == 1

        def refused(path: object, *_args: object, **_settings: object) -> int:
            raise PermissionError(13, "Permission denied", str(path))

        (keepers.root / "home").rename(keepers.root / "away")
        with monkeypatch.context() as denied:
            denied.setattr("deeplink.cache.source.local_source.os.open", refused)
            with pytest.raises(PermissionError, match="Permission denied") as found:
                reader.read([1])
        assert isinstance(found.value, SampleForbiddenError)
    assert not keepers.running["n0"].store.ids()
    assert source.is_dir()


def test_a_socket_that_answers_is_not_taken_over_and_one_of_a_killed_agent_is(
    at_socket: tuple[Keepers, Path, Config],
) -> None:
    keepers, path, _ = at_socket
    keeper = keepers.running["n0"].keeper
    with pytest.raises(ListenError, match="another agent answers there"):
        keeper.local_listener(path)
    with pytest.raises(ListenError):
        keeper.local_listener(path.with_name("nowhere") / "agent.sock")
    left = path.with_name("left.sock")
    left.touch()
    again = keeper.local_listener(left)
    assert left.is_socket()
    again.close()
