"""The cache's errors: one class for each thing a caller may do differently."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.core.types import NodeName, SampleKey, ShardId


class SourceError(DeepLinkError):
    """A source cannot be packed or read: all of it, or one file (`key`, else empty).

    `may_pass`: the storage did not answer, which says nothing about the file.
    """

    exit_code = 2

    def __init__(
        self,
        url: str,
        problem: str,
        remedy: str = "Name a folder or an fsspec URL that holds files.",
        *,
        key: str = "",
        may_pass: bool = False,
    ) -> None:
        super().__init__(f"source {url}: {problem}" if url else problem, remedy=remedy)
        self.key, self.may_pass = key, may_pass

    @staticmethod
    def bad_key(key: str, problem: str) -> SourceError:
        """A file's path below the source root cannot be a sample's key."""
        remedy = "Rename the file, or leave it out of the source folder."
        return SourceError("", f"{key!r} cannot be packed: {problem}", remedy, key=key)

    @staticmethod
    def unreadable(url: str, key: str, problem: str, *, may_pass: bool = False) -> SourceError:
        """One file of the source cannot be read."""
        remedy = "Make it readable or remove it, then run the same command again: sealed shards are kept."
        found = SourceError(url, f"{key!r} cannot be read: {problem}", remedy, key=key, may_pass=may_pass)
        found.exit_code = 1
        return found

    @staticmethod
    def gone(url: str, key: str, problem: str) -> SourceError:
        """One file is no more where it was when the source was listed."""
        found = SourceError.unreadable(url, key, f"it went away ({problem})")
        found.remedy = "Run `deeplink pack` again once nothing is removed there any more: sealed shards are kept."
        return found


class SourceChangedError(SourceError):
    """A file is not what it was when the source was listed, or packed."""

    exit_code = 1

    def __init__(self, url: str, key: str, problem: str) -> None:
        remedy = "Run `deeplink pack` again once nothing writes to the source any more."
        super().__init__(url, f"{key!r} has changed: {problem}", remedy, key=key)


class DatasetMissingError(DeepLinkError):
    """There is no such dataset or version, or it has lost what says which version is the newest."""

    exit_code = 2


class CatalogError(DeepLinkError):
    """The catalog's folder cannot be read or written, or a version must not be made or removed."""

    def __init__(
        self,
        message: str,
        remedy: str = "DEEPLINK_CATALOG names a folder on shared storage that you may write to.",
        *,
        exit_code: int = 1,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code = exit_code


class IndexFormatError(DeepLinkError):
    """A file is not an index, is damaged, or of a format this release does not know."""

    def __init__(
        self,
        path: Path,
        problem: str,
        remedy: str = "`deeplink index rebuild` makes it again of its shards; "
        "a newer format needs a newer release.",
    ) -> None:
        super().__init__(f"index {path}: {problem}", remedy=remedy)


class IndexMendedError(IndexFormatError):
    """A part of an index was damaged and has been restored in memory: the same call succeeds now."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a part of it was damaged and is restored; ask again")


class KeyMissingError(DeepLinkError):
    """The index holds no sample, or no folder, of this key or row number."""

    def __init__(self, key: str | int, rows: int = 0) -> None:
        if isinstance(key, int):
            super().__init__(f"row {key} is not in the index of {rows} rows")
            return
        super().__init__(f"{key!r} is not in the dataset", remedy="Keys are paths below the packed source's root.")


class ShardIdError(DeepLinkError):
    """A text is not a shard's name."""

    exit_code = 2

    def __init__(self, text: str) -> None:
        super().__init__(
            f"{text[:80]!r} is not a shard's name (40 hexadecimal digits)",
            remedy="`deeplink verify NAME --quick --json` lists the shards of a dataset.",
        )


class ShardCorruptError(DeepLinkError):
    """A shard's file is not what its name promises: cut short, changed, or not a shard at all."""

    def __init__(self, shard: str, problem: str) -> None:
        super().__init__(
            f"shard {shard}: {problem}",
            remedy="Its samples are read from another copy or the source; look at this node's SSD.",
        )


class StoreError(DeepLinkError):
    """The store's folder cannot be used."""

    def __init__(self, root: Path, problem: str) -> None:
        super().__init__(
            f"store {root}: {problem}", remedy="DEEPLINK_STORE names a writable folder on a local disk."
        )


class StoreFullError(DeepLinkError):
    """The store's file system has no room for a shard."""

    def __init__(self, root: Path, needed: int, free: int) -> None:
        super().__init__(
            f"no room in {root}: {needed:,} bytes needed, {free:,} free",
            remedy="Free space there, raise `store_bytes`, or name another folder with DEEPLINK_STORE; "
            "nothing was published.",
        )
        self.needed = needed


class SampleUnavailableError(DeepLinkError):
    """No copy of a sample could be read: not here, not at any member, not at the source."""

    def __init__(self, key: SampleKey, shard: ShardId, tried: Sequence[str]) -> None:
        super().__init__(
            f"{key!r} (shard {shard}) cannot be read: " + ("; ".join(tried) or "no member holds it"),
            remedy="`deeplink pack` places missing copies again; check members and source.",
        )
        self.key, self.shard, self.tried = key, shard, tuple(tried)


class SampleForbiddenError(SampleUnavailableError, PermissionError):
    """The sample's file may not be read by this user, and no copy of it was given out."""

    def __init__(self, key: SampleKey, shard: ShardId, tried: Sequence[str]) -> None:
        super().__init__(key, shard, tried)
        self.errno, self.strerror, self.filename = errno.EACCES, os.strerror(errno.EACCES), key
        self.remedy = "Ask the source's owner to let you read it."

    @override
    def __str__(self) -> str:
        return str(self.args[0])


class MemberError(DeepLinkError):
    """A member did not do what it was asked; it may be asked for other samples where `is_well`."""

    def __init__(self, member: NodeName, problem: str, remedy: str = "", *, is_well: bool = False) -> None:
        super().__init__(f"member {member}: {problem}", remedy=remedy)
        self.is_well = is_well

    @staticmethod
    def refused(member: NodeName) -> MemberError:
        """A member refuses our token."""
        remedy = "DEEPLINK_TOKEN_FILE must hold the token of that agent."
        return MemberError(member, "it refuses our token", remedy)


class MemberSilentError(MemberError):
    """A member did not answer in time (`is_late`), or cannot be reached."""

    def __init__(self, member: NodeName, problem: str, *, is_late: bool = False) -> None:
        super().__init__(member, problem, "Is `deeplink node` running there, and the address right?")
        self.is_late = is_late


class MemberBusyError(MemberError):
    """A member has as many calls to answer as it takes at once; `retry_s`: when it may be asked again."""

    def __init__(self, member: NodeName, retry_s: float = 0.0) -> None:
        super().__init__(member, "it is busy", "More replicas spread the reading over more members.")
        self.retry_s = retry_s


class FrameError(DeepLinkError):
    """A message on the wire is not of the agreed layout."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"malformed message: {problem}", remedy="Both ends must run the same release of DeepLink."
        )


class PlacementError(DeepLinkError):
    """No member took a copy of a shard."""

    def __init__(self, shard: ShardId, problems: Sequence[str]) -> None:
        super().__init__(
            f"shard {shard} found no member to hold it: " + "; ".join(problems),
            remedy="Start the agents or free space on their SSDs, then run the same command again.",
        )
        self.problems = tuple(problems)


class HomeError(DeepLinkError):
    """A packed home does not give, or does not take, a file."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(
            f"home {url}: {problem}", remedy="--home names a folder or an fsspec URL that you may write to."
        )
