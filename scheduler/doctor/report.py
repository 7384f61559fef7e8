"""What one node tells of itself, and what it measured against the others: values that travel as JSON; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDERS = ("store", "state", "catalog")
"""The folders of the configuration that are looked at, by their keys."""


class ReportFormatError(DeepLinkError):
    """A node's report is none: another version of DeepLink runs there."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"a node's report cannot be read: {problem}",
            remedy="Install the same version of DeepLink on all nodes.",
        )
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """One of our folders as a node sees it.

    Attributes:
        path: as the configuration names it there.
        base: the nearest folder above (or itself) that is there.
        kind: the type of its file system; empty where that cannot be told.
        readable: whether this user may read there.
        writable: whether this user may write there.
        owner: user number.
        mode: of `base`, permission bits.
        free: bytes this user may still write.
        total: bytes of the file system.
        identity: inode and time of its last change, the same wherever the same folder is seen.
        marked: whether our marker could be left in `base`.
        problem: why nothing more is known; empty where all is.
    """

    path: str
    base: str = ""
    kind: str = ""
    readable: bool = False
    writable: bool = False
    owner: int = -1
    mode: int = 0
    free: int = 0
    total: int = 0
    identity: str = ""
    marked: bool = False
    problem: str = ""

    @property
    def there(self) -> bool:
        """Whether the folder itself exists."""
        return self.path == self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a node tells of itself at once.

    Attributes:
        node: its name in Slurm, else the host name.
        address: what other nodes reach it by.
        versions: by what: deeplink, code (digest of its files), python, slurm, torch, kernel, driver; an empty
        text
            where there is none.
        settings: keys of the configuration that must be alike everywhere.
        folders: by key of the configuration.
        tokens: problems of token files, by key of the configuration.
        limits: soft and hard ulimits by name, -1 where there is none.
        user_namespaces: how many an ordinary user may have; None where the kernel does not tell.
        shared_memory: free bytes of /dev/shm; None where there is none.
        infiniband: whether it has such adapters.
        ephemeral: the first and the last port that the kernel gives to whoever connects.
        listening: ports that were opened for the others to try, by what they stand for.
        step_nodes: all nodes of the step, folded; empty outside of one.
        problem: why there is no more, the configuration being unreadable, say.
    """

    node: str
    address: str = ""
    uid: int = -1
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, FolderReport] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    user_namespaces: int | None = None
    shared_memory: int | None = None
    infiniband: bool = False
    ephemeral: tuple[int, int] = (0, 0)
    listening: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    step_nodes: str = ""
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: object) -> Self:
        """Read what another process wrote.

        Raises:
            ReportFormatError: it is no report of this version.
        """
        try:
            fields = dict(said)  # type: ignore[call-overload]
            fields["folders"] = {key: FolderReport(**one) for key, one in fields.get("folders", {}).items()}
            fields["limits"] = {key: (one[0], one[1]) for key, one in fields.get("limits", {}).items()}
            fields["ephemeral"] = tuple(fields.get("ephemeral", (0, 0)))
            fields["listening"] = {key: tuple(ports) for key, ports in fields.get("listening", {}).items()}
            return cls(**fields)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as problem:
            raise ReportFormatError(repr(problem)) from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """How fast a folder's disk was for a moment.

    Attributes:
        written: bytes; fewer than were asked for where the time was up.
        write_s: seconds, until fsync had returned.
        read_s: seconds to read them back.
        cold: whether the read came from the disk, not from memory (O_DIRECT).
        random_reads: reads of 4 KiB at random places, one after another.
        random_s: seconds for all of them.
        problem: why nothing was measured.
    """

    written: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    cold: bool = False
    random_reads: int = 0
    random_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a node found when all were up.

    Attributes:
        markers: by key of the configuration, the nodes whose marker is seen there, itself left out.
        reached: by node, what came of connecting to its ports, by port; empty where it was connected.
        services: what came of connecting to the watchdog and the members, by address; empty where it answered.
        scripts: lines of the site's prolog and epilog that remove files or end processes.
        unread: those that cannot be read.
        disk: the store's; None where it was not asked for.
    """

    markers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reached: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    services: Mapping[str, str] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    disk: Disk | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: object) -> Self:
        """Read what another process wrote.

        Raises:
            ReportFormatError: it is no report of this version.
        """
        try:
            fields = dict(said)  # type: ignore[call-overload]
            fields["markers"] = {key: tuple(seen) for key, seen in fields.get("markers", {}).items()}
            fields["reached"] = {key: dict(ports) for key, ports in fields.get("reached", {}).items()}
            fields["services"] = dict(fields.get("services", {}))
            fields["scripts"] = tuple(fields.get("scripts", ()))
            fields["unread"] = tuple(fields.get("unread", ()))
            fields["disk"] = Disk(**fields["disk"]) if fields.get("disk") else None
            return cls(**fields)
        except (TypeError, ValueError, KeyError, AttributeError) as problem:
            raise ReportFormatError(repr(problem)) from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbePlan:
    """What the nodes are to do together.

    Attributes:
        peers: by node, the host to connect to and its ports.
        services: addresses of the watchdog and of members.
        scripts: the site's prologs and epilogs.
        disk_bytes: how much to write and read in the store; 0 for nothing.
    """

    peers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    services: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    disk_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: object) -> Self:
        """Read what another process wrote.

        Raises:
            ReportFormatError: it is no plan of this version.
        """
        try:
            fields = dict(said)  # type: ignore[call-overload]
            peers = {node: (str(host), tuple(ports)) for node, (host, ports) in fields["peers"].items()}
            services, scripts = tuple(fields["services"]), tuple(fields["scripts"])
            return cls(peers=peers, services=services, scripts=scripts, disk_bytes=int(fields["disk_bytes"]))
        except (TypeError, ValueError, KeyError, AttributeError) as problem:
            raise ReportFormatError(repr(problem)) from problem


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a clock is ahead of the clock of the host that asked, and how wrong that may be, in seconds."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """All that is known of one node."""

    host: HostFacts
    measured: Measured | None = None
    offset: Offset | None = None
