"""What can go wrong between a small file and its reader: one class for each thing a caller may do differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.types import NodeName, SampleKey, ShardId


class BadKeyError(DeepLinkError):
    """A file's path below the source root cannot be a sample's key."""

    exit_code = 2

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(
            f"{key!r} cannot be packed: {problem}", remedy="Rename the file, or leave it out of the source folder."
        )
        self.key, self.problem = key, problem


class KeyCollisionError(DeepLinkError):
    """Two files of a source have one key, or one's key is a folder of the other's."""

    exit_code = 2

    def __init__(self, key: str, other: str) -> None:
        what = "twice in the source" if key == other else f"a file and, because of {other!r}, also a folder"
        super().__init__(f"{key!r} is {what}", remedy="Rename one of the two: a key names one sample.")
        self.key, self.other = key, other


class SourceError(DeepLinkError):
    """The source as a whole cannot be used: it is not there, not a folder, empty, or its kind is unknown."""

    exit_code = 2

    def __init__(
        self, url: str, problem: str, remedy: str = "Name a folder or an fsspec URL that holds files."
    ) -> None:
        super().__init__(f"source {url}: {problem}", remedy=remedy)
        self.url, self.problem = url, problem


class SourceFileError(DeepLinkError):
    """One file of the source cannot be read."""

    def __init__(self, url: str, key: str, problem: str) -> None:
        super().__init__(
            f"source {url}: {key!r} cannot be read: {problem}",
            remedy="Make it readable or remove it, then run the same command again: sealed shards are kept.",
        )
        self.url, self.key, self.problem = url, key, problem


class SourceChangedError(DeepLinkError):
    """A file is not what it was when the source was listed, or packed."""

    def __init__(self, url: str, key: str, problem: str) -> None:
        super().__init__(
            f"source {url}: {key!r} has changed: {problem}",
            remedy="Run `deeplink pack` again once nothing writes to the source any more.",
        )
        self.url, self.key, self.problem = url, key, problem


class DatasetNameError(DeepLinkError):
    """A text cannot be a dataset's name."""

    exit_code = 2

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} cannot be a dataset's name",
            remedy="Use up to 100 letters, digits, dots, hyphens and underscores, a letter or digit first.",
        )
        self.name = name


def _rebuilt(name: str, versions: Sequence[str]) -> str:
    return " or ".join(f"`deeplink index rebuild {name}@{version}`" for version in versions[:-4:-1])


class DatasetMissingError(DeepLinkError):
    """The catalog has no dataset of this name, or not this version of it, or not what says which is the newest."""

    exit_code = 2

    def __init__(
        self, name: str, version: str, catalog: Path, versions: Sequence[str] = (), *, lost: Sequence[str] = ()
    ) -> None:
        wanted = f"version {version} of {name!r}" if version else f"dataset {name!r}"
        problem = f"the catalog {catalog} has no {wanted}"
        remedy = "`deeplink pack SOURCE NAME` makes one; DEEPLINK_CATALOG says where to look."
        if lost:
            problem = f"the catalog {catalog} has lost the index of {wanted}"
            remedy = f"`deeplink index rebuild {name}@{lost[0]}` makes it anew of its shards."
        elif versions and not version:
            problem = f"the catalog {catalog} has lost which version of {name!r} is the newest"
            remedy = f"{_rebuilt(name, versions)} says it anew; or name the version."
        elif versions:
            remedy = f"Versions there are, the newest last: {', '.join(versions[-5:])}."
        super().__init__(problem, remedy=remedy)
        self.name, self.version, self.catalog, self.versions = name, version, catalog, tuple(versions)
        self.lost = tuple(lost)


class NewestVersionError(DeepLinkError):
    """The version a name points at was to be removed while there are others."""

    exit_code = 2

    def __init__(self, name: str, version: str) -> None:
        super().__init__(
            f"{version} is the newest version of {name!r}: whoever opens {name!r} reads it",
            remedy="Pack the dataset anew, or remove its other versions first.",
        )
        self.name, self.version = name, version


class CatalogError(DeepLinkError):
    """The catalog's folder cannot be read or written."""

    def __init__(self, root: Path, problem: str) -> None:
        super().__init__(
            f"catalog {root}: {problem}",
            remedy="DEEPLINK_CATALOG names a folder on shared storage that you may write to.",
        )
        self.root, self.problem = root, problem


class IndexFormatError(DeepLinkError):
    """A file is not an index, is damaged, or of a format this release does not know."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"index {path}: {problem}",
            remedy="`deeplink index rebuild` makes it anew from its shards; a newer format needs a newer release.",
        )
        self.path, self.problem = path, problem


class NewestUnknownError(IndexFormatError):
    """What says which version of a dataset is the newest is damaged."""

    def __init__(self, name: str, path: Path, versions: Sequence[str]) -> None:
        super().__init__(path, f"it does not say which version of {name!r} is the newest")
        self.remedy = f"{_rebuilt(name, versions)} says it anew; or name the version." if versions else self.remedy
        self.name, self.versions = name, tuple(versions)


class IndexMendedError(IndexFormatError):
    """A part of an index was damaged and has been restored in memory: what is asked again will be right."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a part of it was damaged and is restored; ask again")


class RowError(DeepLinkError):
    """A row number lies outside of the index."""

    def __init__(self, row: int, rows: int) -> None:
        super().__init__(f"row {row} is not in the index of {rows} rows")
        self.row, self.rows = row, rows


class KeyMissingError(DeepLinkError):
    """The index holds no sample, or no folder, of this name."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} is not in the dataset", remedy="Keys are paths below the packed source's root.")
        self.key = key


class ShardIdError(DeepLinkError):
    """A text is not a shard's name."""

    exit_code = 2

    def __init__(self, text: str) -> None:
        super().__init__(
            f"{text[:80]!r} is not a shard's name (40 hexadecimal digits)",
            remedy="`deeplink verify NAME --quick --json` lists the shards of a dataset.",
        )
        self.text = text


class ShardCorruptError(DeepLinkError):
    """A shard's file is not what its name promises: cut short, changed, or not a shard at all."""

    def __init__(self, shard: str, problem: str) -> None:
        super().__init__(
            f"shard {shard}: {problem}",
            remedy="Its samples are read from another copy or the source; look at this node's SSD.",
        )
        self.shard, self.problem = shard, problem


class ShardWriteError(DeepLinkError):
    """A shard cannot be written with this build of LMDB or on this machine."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"shards cannot be written here: {problem}", remedy=remedy)
        self.problem = problem


class StoreFullError(DeepLinkError):
    """The store's file system has no room for a shard."""

    def __init__(self, root: Path, needed: int, free: int) -> None:
        super().__init__(
            f"no room in {root}: {needed:,} bytes needed, {free:,} free",
            remedy="Free space there, raise `store_bytes`, or name another folder with DEEPLINK_STORE; "
            "nothing was published.",
        )
        self.root, self.needed, self.free = root, needed, free


class StoreError(DeepLinkError):
    """The store's folder cannot be used."""

    def __init__(self, root: Path, problem: str) -> None:
        super().__init__(
            f"store {root}: {problem}", remedy="DEEPLINK_STORE names a writable folder on a local disk."
        )
        self.root, self.problem = root, problem


class SampleUnavailableError(DeepLinkError):
    """No copy of a sample could be read: not here, not at any member, not at the source."""

    def __init__(self, key: SampleKey, shard: ShardId, tried: Sequence[str]) -> None:
        super().__init__(
            f"{key!r} (shard {shard}) cannot be read: " + ("; ".join(tried) or "nobody holds it"),
            remedy="`deeplink pack` places missing copies again; check members and source.",
        )
        self.key, self.shard, self.tried = key, shard, tuple(tried)


class MemberError(DeepLinkError):
    """A member did not do what it was asked."""

    def __init__(self, member: NodeName, problem: str, remedy: str = "") -> None:
        super().__init__(f"member {member}: {problem}", remedy=remedy)
        self.member, self.problem = member, problem


class MemberSilentError(MemberError):
    """A member did not answer in time (`is_late`), or cannot be reached."""

    def __init__(self, member: NodeName, problem: str, *, is_late: bool = False) -> None:
        super().__init__(member, problem, "Is `deeplink node` running there, and the address right?")
        self.is_late = is_late


class MemberRefusedError(MemberError):
    """A member refuses our token."""

    def __init__(self, member: NodeName) -> None:
        super().__init__(member, "it refuses our token", "DEEPLINK_TOKEN_FILE must hold the token of that agent.")


class MemberBusyError(MemberError):
    """A member has as many calls to answer as it takes at once; `retry_s`: when it may be asked again."""

    def __init__(self, member: NodeName, retry_s: float = 0.0) -> None:
        super().__init__(member, "it is busy", "More replicas spread the reading over more members.")
        self.retry_s = retry_s


class MemberDamagedError(MemberError):
    """A member could not read what it had begun to send; it has put that aside and will not offer it again."""

    def __init__(self, member: NodeName, problem: str) -> None:
        super().__init__(member, problem, "Its other samples are well; look at that node's SSD.")


class FrameError(DeepLinkError):
    """A message on the wire is not of the agreed layout."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"malformed message: {problem}", remedy="Both ends must run the same release of DeepLink."
        )
        self.problem = problem


class PlacementError(DeepLinkError):
    """No member took a copy of a shard."""

    def __init__(self, shard: ShardId, problems: Sequence[str]) -> None:
        super().__init__(
            f"shard {shard} found no member to hold it: " + "; ".join(problems),
            remedy="Start the agents or free space on their SSDs, then run the same command again.",
        )
        self.shard, self.problems = shard, tuple(problems)


class PackRunningError(DeepLinkError):
    """Another process is packing the same source into the same store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"another `deeplink pack` of this source works in {folder}", remedy="Wait until it is done."
        )
        self.folder = folder


class HomeError(DeepLinkError):
    """A packed home does not give, or does not take, a file."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(
            f"home {url}: {problem}", remedy="--home names a folder or an fsspec URL that you may write to."
        )
        self.url, self.problem = url, problem


class AppendError(DeepLinkError):
    """A version cannot be made from the one before it."""

    exit_code = 2

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"dataset {name!r} cannot be appended to: {problem}", remedy="Pack it without --append.")
        self.name, self.problem = name, problem
