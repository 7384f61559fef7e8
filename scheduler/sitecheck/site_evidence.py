"""What nodes tell of themselves in the doctor's step, all that its rules judge, and what they answer; pure."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.node.disk import Disk
from deeplink.scheduler.slurm.nodeset import NodeSetError, fold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.scheduler.slurm.parse import NodeRow, PartitionRow, SwitchRow
    from deeplink.scheduler.slurm.settings import SlurmSettings

FOLDERS = ("store", "state", "catalog")  # the folders of the configuration that are looked at, by their keys
_TAG = "deeplink-doctor"
_PIECE = 600  # characters, far below srun's bound
_MOST_PIECES = 2000
_MOST_BYTES = 4 << 20  # of one message, unpacked


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as problem:
        raise DeepLinkError(
            f"a node's report cannot be read: {problem!r}",
            remedy="Install the same version of DeepLink on all nodes.",
        ) from problem


def _known(kind: type[Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a report is known here: another version's has more, and its version is to be told."""
    names = {each.name for each in dataclasses.fields(kind)}
    return {key: value for key, value in said.items() if key in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """One of our folders as a node sees it."""

    path: str  # as the configuration names it there
    base: str = ""  # the nearest folder above (or itself) that is there
    kind: str = ""  # type of its file system; empty where that cannot be told
    readable: bool = False  # for this user
    writable: bool = False
    mode: int = 0  # permission bits of `base`
    free: int = 0  # bytes this user may still write
    identity: str = ""  # inode and time of its last change, the same wherever the same folder is seen
    marked: bool = False  # our marker could be left in `base`
    problem: str = ""  # why nothing more is known

    @property
    def there(self) -> bool:
        """Whether the folder itself exists."""
        return self.path == self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a node tells of itself at once."""

    node: str  # its name in Slurm, else the host name
    address: str = ""  # what other nodes reach it by
    versions: Mapping[str, str] = field(default_factory=dict)  # code: digest of DeepLink's files; empty: none
    settings: Mapping[str, str] = field(default_factory=dict)  # configuration that must be alike everywhere
    folders: Mapping[str, FolderReport] = field(default_factory=dict)  # by key of the configuration
    tokens: Mapping[str, str] = field(default_factory=dict)  # problems of token files, by key
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # soft and hard ulimits, -1: none
    user_namespaces: int | None = None  # how many an ordinary user may have; None: the kernel does not tell
    shared_memory: int | None = None  # free bytes of /dev/shm; None: there is none
    infiniband: bool = False
    ephemeral: tuple[int, int] = (0, 0)  # ports that the kernel gives to connections, first and last
    listening: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ports opened for the others to try
    step_nodes: str = ""  # of the step, folded; empty outside of one
    problem: str = ""  # why there is no more

    @classmethod
    def of(cls, said: object) -> Self:
        """Read what another process wrote."""
        with _reading():
            fields = dict(said)  # type: ignore[call-overload]
            folders = fields.get("folders", {}).items()
            fields["folders"] = {key: FolderReport(**_known(FolderReport, one)) for key, one in folders}
            fields["limits"] = {key: (one[0], one[1]) for key, one in fields.get("limits", {}).items()}
            fields["ephemeral"] = tuple(fields.get("ephemeral", (0, 0)))
            fields["listening"] = {key: tuple(ports) for key, ports in fields.get("listening", {}).items()}
            return cls(**_known(cls, fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a node found when all were up."""

    markers: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # other nodes whose marker is seen, by key
    reached: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # outcome by node and port; empty: connected
    services: Mapping[str, str] = field(default_factory=dict)  # outcome by address; empty: it answered
    scripts: tuple[str, ...] = ()  # lines of prolog and epilog that remove files or end processes
    unread: tuple[str, ...] = ()  # scripts that cannot be read
    disk: Disk | None = None  # the store's; None: not asked for

    @classmethod
    def of(cls, said: object) -> Self:
        """Read what another process wrote."""
        with _reading():
            fields = dict(said)  # type: ignore[call-overload]
            fields["markers"] = {key: tuple(seen) for key, seen in fields.get("markers", {}).items()}
            fields["reached"] = {key: dict(ports) for key, ports in fields.get("reached", {}).items()}
            fields["services"] = dict(fields.get("services", {}))
            fields["scripts"] = tuple(fields.get("scripts", ()))
            fields["unread"] = tuple(fields.get("unread", ()))
            fields["disk"] = Disk(**fields["disk"]) if fields.get("disk") else None
            return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbePlan:
    """What the nodes are to do together."""

    peers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # host and ports by node
    services: tuple[str, ...] = ()  # addresses of the watchdog and of members
    scripts: tuple[str, ...] = ()  # the site's prologs and epilogs
    disk_bytes: int = 0  # to write and read in the store

    @classmethod
    def of(cls, said: object) -> Self:
        """Read what another process wrote."""
        with _reading():
            fields = dict(said)  # type: ignore[call-overload]
            peers = {node: (str(host), tuple(ports)) for node, (host, ports) in fields["peers"].items()}
            services, scripts = tuple(fields["services"]), tuple(fields["scripts"])
            return cls(peers=peers, services=services, scripts=scripts, disk_bytes=int(fields["disk_bytes"]))


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


def to_lines(node: str, message: Mapping[str, Any]) -> list[str]:
    """Return the lines that carry a message of a node's: a JSON object, with reports as its values.

    >>> messages = Messages()
    >>> [messages.take(line) for line in to_lines("n1", {"a": 1})]
    [('n1', {'a': 1})]
    """
    packed = zlib.compress(json.dumps(message, default=dataclasses.asdict).encode())
    text = base64.b64encode(packed).decode()
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"{_TAG} {node} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces)]


@dataclass(slots=True)
class Messages:
    """Puts messages together again; pieces of one come in their order, those of different nodes mixed."""

    strange: list[str] = field(default_factory=list)  # the last lines that are none of ours
    _begun: dict[str, list[str]] = field(default_factory=dict)

    def take(self, line: str) -> tuple[str, dict[str, Any]] | None:
        """Take one line; return the node and its message where that is whole now."""
        words = line.strip().split(" ")
        numbers = words[2:4]
        if len(words) != 5 or words[0] != _TAG or not all(one.isascii() and one.isdigit() for one in numbers):  # noqa: PLR2004
            self.strange = [*self.strange, line.rstrip()][-20:]
            return None
        node, piece = words[1], words[4]
        number, count = int(numbers[0][:9]), int(numbers[1][:9])
        begun = self._begun.setdefault(node, [])
        if number == 0:
            begun.clear()
        if number != len(begun) or count > _MOST_PIECES:
            begun.clear()
            return None
        begun.append(piece)
        if len(begun) < count:
            return None
        del self._begun[node]
        message = _unpacked("".join(begun))
        return None if message is None else (node, message)


def _unpacked(text: str) -> dict[str, Any] | None:
    try:
        unpacking = zlib.decompressobj()
        message = json.loads(unpacking.decompress(base64.b64decode(text, validate=True), _MOST_BYTES))
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


Value = TypeVar("Value")
_WITHOUT_NODES = {
    "hosts": "no node was looked at",
    "measured": "it takes a step on the nodes to tell: `deeplink doctor --nodes 2`",
    "pairs": "it takes two nodes to tell: `deeplink doctor --nodes 2`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEvidence:
    """What was gathered. What could not be had is None, or not there, and `problems` says why."""

    config: Config
    settings: SlurmSettings | None = None
    nodes: tuple[NodeRow, ...] | None = None
    partitions: tuple[PartitionRow, ...] | None = None
    switches: tuple[SwitchRow, ...] | None = None
    suspended: tuple[NodeName, ...] | None = None  # nodes on which suspended jobs lie
    # this host's clock before and after slurmctld was asked for its settings, Unix time
    asked: tuple[float, float] = (0.0, 0.0)
    # by what was asked for (settings, nodes, partitions, topology, suspended jobs, hosts), why there is none
    problems: Mapping[str, str] = field(default_factory=dict)
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    silent: tuple[str, ...] = ()  # nodes of the step that said nothing
    # what is wrong with the watchdog's answer to this host's token or MUNGE credential; empty where nothing is,
    # None where it was not asked
    watch_answer: str | None = None

    @property
    def hosts(self) -> dict[str, HostFacts]:
        """What nodes tell of themselves, of those that could tell everything."""
        return {node: report.host for node, report in self.reports.items() if not report.host.problem}

    @property
    def measured(self) -> dict[str, Measured]:
        """What nodes measured."""
        return {node: found for node in self.hosts if (found := self.reports[node].measured) is not None}

    @property
    def pairs(self) -> dict[str, Measured]:
        """What nodes measured against each other; empty where there are not two."""
        measured = self.measured
        return measured if len(measured) > 1 else {}

    def why_not(self, what: str) -> str:
        """Return why there is no such evidence: the name of an attribute."""
        if what in _WITHOUT_NODES:
            return self.problems.get("hosts") or _WITHOUT_NODES[what]
        return f"Slurm did not tell its {'topology' if what == 'switches' else what} (see slurm-answers)"


def together(nodes: Iterable[str]) -> str:
    """Return node names as one short text.

    >>> together(["n1", "n0", "my host"])
    'my host,n0,n1'
    """
    names = sorted(nodes)
    try:
        return fold(names)
    except NodeSetError:  # a host name need be no node's
        return ",".join(names)


def alike(by_node: Mapping[str, Value]) -> dict[Value, str]:
    """Return the nodes by what each of them tells, those of the commonest answer first."""
    found: dict[Value, list[str]] = {}
    for node, value in by_node.items():
        found.setdefault(value, []).append(node)
    return {value: together(nodes) for value, nodes in sorted(found.items(), key=lambda item: -len(item[1]))}


def _finding(severity: Severity, said: str, remedy: str = "", where: str = "") -> Finding:
    return Finding(severity, said, remedy=remedy, where=where)


note = partial(_finding, Severity.NOTE)
warning = partial(_finding, Severity.WARNING)
error = partial(_finding, Severity.ERROR)


def ok(said: str, where: str = "") -> Finding:
    """Return that all is well."""
    return Finding(Severity.OK, said, where=where)


def unknown(said: str, where: str = "") -> Finding:
    """Return what could not be looked at, and why."""
    return Finding(Severity.UNKNOWN, said, where=where)


class _UntoldError(LookupError):
    """This Slurm does not tell a setting that a rule needs."""


@dataclass(frozen=True, slots=True)
class SettingsView:
    """Slurm's settings and ours; a setting that is not told ends the rule."""

    told: SlurmSettings
    config: Config

    def text(self, name: str) -> str:
        """Return a setting that this Slurm knows; empty where it is not set."""
        if (value := self.told.text(name)) is None:
            raise _UntoldError(name)
        return value

    def number(self, name: str) -> int:
        """Return the number of a setting."""
        if (value := self.told.number(name)) is None:
            raise _UntoldError(name)
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """Return the items of a list."""
        self.text(name)
        return self.told.words(name)

    def item(self, name: str, key: str) -> str | None:
        """Return the value of `key=value` in a list; None where it is not there."""
        self.text(name)
        return self.told.item(name, key)


def judged(rule: Callable[[SettingsView], Finding], told: SlurmSettings, config: Config) -> Finding:
    """Return what a rule finds; UNKNOWN where this Slurm does not tell what it needs."""
    try:
        return rule(SettingsView(told, config))
    except _UntoldError as untold:
        return unknown(f"this Slurm does not tell {untold}, or in a form that is not known here")
