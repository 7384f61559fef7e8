"""What a site says about its checks, in a TOML file: a table for each check, `[site.NAME]` for one of its own.

An unknown table or key is an error that names the file and the key.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from deeplink.core.config import SITE_FILE, WHOLE, ConfigError
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deeplink.core.config import Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST_S = 86_400.0
_MOST_LOOKS = 1_000
REFUSED = "site"  # the check that tells which of the site's programs cannot be checks
FILE = "health-off"
_LONGEST = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTiming(Rule):
    """What every check has: when it looks, and how its looks become findings."""

    interval_s: float = 60.0  # seconds from the beginning of one look to that of the next
    deadline_s: float = 20.0  # a look that takes longer counts as hung; the next one begins when it has ended
    off: bool = False  # leave this check out


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings(CheckTiming):
    """The store's disk."""

    interval_s: float = 30.0
    deadline_s: float = 15.0
    min_free_bytes: int = 1 << 30  # less free space than this is complained of
    slow_s: float = 2.0  # a probe (write 64 KiB, fsync, read back) that takes longer is complained of
    # a probe that has not ended for so long hangs, where the disk completes nothing else either
    hung_s: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings(CheckTiming):
    """Memory."""

    # Half a second after ranks have ended it is asked what was killed; what is available must be little for half a
    # minute.
    interval_s: float = 0.5
    deadline_s: float = 5.0
    bad: int = 60
    good: int = 60
    min_available: float = 1.0  # the least share of memory that should be available, in percent


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSettings(CheckTiming):
    """The clock."""

    deadline_s: float = 5.0
    most: Severity = Severity.WARNING


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings(CheckTiming):
    """Shared file systems."""

    interval_s: float = 30.0
    deadline_s: float = 10.0
    # Storage that is frozen for everybody is no fault of this node: a site may raise it.
    most: Severity = Severity.WARNING
    # mount points that must be there and answer, besides the shared file systems that are found
    paths: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()  # mount points to leave alone


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings(CheckTiming):
    """Network interfaces and InfiniBand ports."""

    interval_s: float = 15.0
    deadline_s: float = 5.0
    # A dead switch takes the links of a whole leaf down: nodes must not be drained for it.
    most: Severity = Severity.WARNING
    interfaces: tuple[str, ...] = ()  # those that must be up, besides the physical ones that were
    skip: tuple[str, ...] = ()  # interfaces and ports (`mlx5_0/1`) to leave alone
    errors: int = 10  # errors since the last look from which on they are complained of


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings(CheckTiming):
    """GPUs."""

    bad: int = 2
    deadline_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSettings(CheckTiming):
    """GPUs' errors in the kernel's log."""

    interval_s: float = 2.0
    deadline_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmdSettings(CheckTiming):
    """Slurm's daemon on this node."""

    interval_s: float = 2.0
    deadline_s: float = 30.0
    bad: int = 2
    good: int = 2
    most: Severity = Severity.WARNING
    port: int = 6818  # where it listens
    tries: int = 3  # how often it is started again before that is given up, until it has lived for ten minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings(CheckTiming):
    """Processes."""

    deadline_s: float = 10.0
    most: Severity = Severity.WARNING
    zombie_s: float = 600.0  # a process that is dead and not waited for so long is complained of
    stuck_s: float = 120.0  # the same for one that sleeps uninterruptibly


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSettings(CheckTiming):
    """A check of the site's own."""

    interval_s: float = 120.0
    deadline_s: float = 30.0
    # program and arguments; empty where this only says how one of the folder's is looked at
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """All checks' settings."""

    disk: DiskSettings = field(default_factory=DiskSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    clock: ClockSettings = field(default_factory=ClockSettings)
    mount: MountSettings = field(default_factory=MountSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    xid: XidSettings = field(default_factory=XidSettings)
    slurmd: SlurmdSettings = field(default_factory=SlurmdSettings)
    processes: ProcessSettings = field(default_factory=ProcessSettings)
    site: Mapping[str, SiteSettings] = field(default_factory=dict)


_CHECKS: dict[str, type[CheckTiming]] = {
    one.name: type(getattr(HealthSettings(), one.name))
    for one in dataclasses.fields(HealthSettings)
    if one.name != "site"
}
BUILT_IN = tuple(_CHECKS)  # the checks that DeepLink has, by name
_Settings = TypeVar("_Settings", bound=CheckTiming)


def is_check_name(name: str) -> bool:
    """Return whether a check may be called so."""
    return _NAME.fullmatch(name) is not None and name != REFUSED


def load_settings(path: Path | None) -> HealthSettings:
    """Return the settings of a file; the defaults where there is none."""
    if path is None:
        return HealthSettings()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(str(path), WHOLE, problem.strerror or str(problem)) from problem
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigError(str(path), WHOLE, f"not TOML: {problem}") from problem
    return parse_settings(tables, str(path))


def parse_settings(tables: Mapping[str, Any], origin: str) -> HealthSettings:
    """Return the settings that a file's tables say; `origin` names it in errors."""
    found: dict[str, Any] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(origin, name, "not a table", f"There are [{'], ['.join(BUILT_IN)}] and [site.NAME].")
        if name == "site":
            found["site"] = _site(table, origin)
        elif name in _CHECKS:
            found[name] = _filled(_CHECKS[name], table, f"{name}.", origin)
        else:
            raise ConfigError(
                origin, name, "no such check", f"There are {', '.join(BUILT_IN)}; your own are [site.{name}]."
            )
    return HealthSettings(**found)


def _site(tables: Mapping[str, Any], origin: str) -> dict[str, SiteSettings]:
    found = {}
    for name, table in tables.items():
        if not is_check_name(name) or name in BUILT_IN or not isinstance(table, dict):
            raise ConfigError(
                origin, f"site.{name}", "cannot be a check's name", "Letters, digits, '.', '_', '-'."
            )
        found[name] = _filled(SiteSettings, table, f"site.{name}.", origin)
    return found


def _filled(kind: type[_Settings], table: Mapping[str, Any], prefix: str, origin: str) -> _Settings:
    defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in defaults:
            raise ConfigError(origin, prefix + key, "unknown key", f"There are {', '.join(defaults)}.")
        values[key] = _converted(origin, prefix + key, defaults[key], value)
    return kind(**values)


def _converted(origin: str, key: str, default: object, value: object) -> object:
    if isinstance(default, Severity):
        severity = Severity.of_action(str(value))
        if severity is not Severity.UNKNOWN:
            return severity
        raise ConfigError(origin, key, f"expected observe, comment or drain, got {value!r}")
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ConfigError(origin, key, f"expected true or false, got {value!r}")
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(one, str) and one for one in value):
            return tuple(value)
        raise ConfigError(origin, key, f"expected a list of texts, got {value!r}")
    return _number(origin, key, default, value)


def _number(origin: str, key: str, default: object, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(origin, key, f"expected a number, got {value!r}")
    least, most = 0.0, math.inf
    if key.endswith("_s"):
        least, most = 0.1, _LONGEST_S
    elif key.endswith((".bad", ".good")):
        least, most = 1, _MOST_LOOKS
    if not least <= value <= most:
        raise ConfigError(origin, key, f"must be from {least:g} to {most:g}, got {value}")
    if isinstance(default, int) and not isinstance(value, int):
        raise ConfigError(origin, key, f"expected a whole number, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Off:
    """What is turned off."""

    everything: bool = False  # all checks
    names: frozenset[str] = frozenset()  # these

    def __contains__(self, name: str) -> bool:
        return self.everything or name in self.names


def parse_switch(text: str) -> Off:
    """Return what a switch file turns off: all where it names nothing.

    >>> parse_switch("").everything, sorted(parse_switch("gpu, mount  # broken driver").names)
    (True, ['gpu', 'mount'])
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    names = frozenset(" ".join(lines).replace(",", " ").split())
    return Off(everything=not names, names=names)


def switch_paths(config: Config) -> tuple[Path, ...]:
    """Return where switch files are looked for: beside the site's configuration, and in our state folder."""
    return (SITE_FILE.parent / FILE, config.state / FILE)


def read_switch(paths: Sequence[Path]) -> Off:
    """Return what the switch files turn off together; one that cannot be read turns all off. May hang."""
    everything, names = False, frozenset[str]()
    for path in paths:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                off = parse_switch(file.read(_LONGEST))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if not os.path.exists(path):  # noqa: PTH110 - False also where we may not look into its folder
                continue
            off = Off(everything=True)
        except OSError:
            continue
        everything, names = everything or off.everything, names | off.names
    return Off(everything, names)
