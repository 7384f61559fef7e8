"""The one configuration: built-in defaults, then the site's file, then the user's file, then the environment.

Files are TOML (`/etc/deeplink/config.toml`, `~/.config/deeplink/config.toml`, or the one file that DEEPLINK_CONFIG
names instead of both). A key of the file and a variable of the environment have one name: `store` is
DEEPLINK_STORE. Paths may hold `~` and environment variables. An unknown key is an error that names file and key.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.core.store_place import USUAL_STORE, StorePlace, chosen_store
from deeplink.core.text import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

SITE_FILE = Path("/etc/deeplink/config.toml")
USER_FILE = Path("~/.config/deeplink/config.toml")

WHOLE = "(file)"
"""Stands for a key where the file itself is at fault."""
# Not settings: what a job hands on to its ranks, and what other modules read on their own.
_OTHERS = frozenset(
    {"agent", "attempt", "launch", "paths", "path_roots", "plan", "shim", "sandbox_root", "sandbox_folder"}
)
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_CLOSE = 0.8  # of difflib; "stoer" is so close to "store"


class ConfigError(DeepLinkError):
    """A configuration file or variable holds something that cannot be used."""

    exit_code = 2

    def __init__(
        self, origin: str, key: str, problem: str, remedy: str = "Correct it, or leave it out for the default."
    ) -> None:
        super().__init__(f"{origin}: {problem}" if key == WHOLE else f"{origin}: {key}: {problem}", remedy=remedy)
        self.origin, self.key, self.problem = origin, key, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting, resolved; docs/configuration.md says what each means, in which unit."""

    catalog: Path = Path("~/.local/share/deeplink/catalog")
    store: Path = USUAL_STORE
    home: str = "auto"
    state: Path = Path("~/.local/state/deeplink")
    replicas: int = 2
    shard_bytes: int = 256 << 20
    agent_bind: str = "127.0.0.1:0"
    members: str = ""
    node: str = ""
    read_deadline_ms: int = 1500
    check_every_read: bool = False
    token_file: Path | None = None
    node_socket: Path | None = None
    site_members: str = ""
    site_token_file: Path | None = None
    watch: str = ""
    watch_token_file: Path | None = None
    notify_file: Path | None = None
    resubmit: bool = False
    recovery: str = ""
    console_bind: str = "127.0.0.1:8642"
    topology: Path | None = None
    model: Path | None = None
    interface: str = ""
    store_bytes: int = 0
    copies_bytes: int = 0
    fill_on_miss: bool = True
    step_aside: bool = True
    fill_bytes_per_s: int = 200_000_000
    source_bytes_per_s: int = 200_000_000
    source_requests_per_s: int = 2000
    scrub_days: int = 7
    unused_days: int = 30
    health: bool = True
    health_file: Path | None = None
    health_folder: Path | None = None
    slurmd_restart: str = ""
    boot_id_file: Path = Path("/proc/sys/kernel/random/boot_id")


def _converted(origin: str, key: str, kind: str, value: Any) -> Any:
    if "Path" in kind:
        return _as_path(origin, key, value, may_be_empty="None" in kind)
    if kind == "int":
        return _as_number(origin, key, value)
    if kind == "bool":
        found = value if isinstance(value, bool) else _SWITCH.get(str(value).lower())
        if found is None:
            raise ConfigError(origin, key, f"expected true or false, got {value!r}")
        return found
    if not isinstance(value, str):
        raise ConfigError(origin, key, f"expected a text, got {value!r}")
    return value


def _as_path(origin: str, key: str, value: Any, *, may_be_empty: bool) -> Path | None:
    if not isinstance(value, str):
        raise ConfigError(origin, key, f"expected a path, got {value!r}")
    if value:
        try:
            return Path(os.path.expandvars(value)).expanduser()
        except RuntimeError as problem:  # `~somebody`
            raise ConfigError(origin, key, f"{value!r}: there is no such user, or no home is known") from problem
    if not may_be_empty:
        raise ConfigError(origin, key, "the path is empty")
    return None


def _as_number(origin: str, key: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():  # 1e9
        value = int(value)
    try:
        number = int(str(value))  # as text: 2.7 and true are none
    except ValueError:
        raise ConfigError(origin, key, f"expected a whole number, got {value!r}") from None
    if number <= 0:
        raise ConfigError(origin, key, f"must be positive, got {number}")
    return number


def _file_values(path: Path, *, named: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        remedy = (
            "Make it, or unset DEEPLINK_CONFIG, which names it." if named else "Make it readable, or remove it."
        )
        raise ConfigError(str(path), WHOLE, problem.strerror or str(problem), remedy) from problem
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        remedy = 'It holds lines such as: store = "/local/deeplink".'
        raise ConfigError(str(path), WHOLE, f"not TOML: {problem}", remedy) from problem


def misspelt(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like settings but are none, each with the one that is probably meant.

    >>> misspelt({"DEEPLINK_STOER": "/ssd", "DEEPLINK_STORE": "/ssd", "DEEPLINK_ATTEMPT": "1.0.0", "HOME": "/"})
    {'DEEPLINK_STOER': 'DEEPLINK_STORE'}
    """
    settings = {field.name for field in dataclasses.fields(Config)} | {"config", "spares"}
    found: dict[str, str] = {}
    for name in env:
        key = name.removeprefix("DEEPLINK_").lower()
        if name.startswith("DEEPLINK_") and key not in settings | _OTHERS:
            close = difflib.get_close_matches(key, sorted(settings), 1, _CLOSE)
            found |= {name: f"DEEPLINK_{close[0].upper()}"} if close else {}
    return found


def load_config(env: Mapping[str, str] | None = None) -> Config:
    """Return the configuration that holds for this process."""
    env = os.environ if env is None else env
    settings, origins = _settings(env)
    if "store" not in origins:
        settings["store"] = chosen_store(env).path
    return Config(**settings)


def explained_store(env: Mapping[str, str] | None = None) -> StorePlace:
    """Return the store as `load_config` has it, and what chose it."""
    env = os.environ if env is None else env
    settings, origins = _settings(env)
    return StorePlace(settings["store"], f"set in {origins['store']}") if "store" in origins else chosen_store(env)


def _settings(env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the value of every key, and of those that are not the default, what set it."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Config)}
    settings: dict[str, Any] = {
        field.name: field.default.expanduser() if isinstance(field.default, Path) else field.default
        for field in dataclasses.fields(Config)
    }
    origins: dict[str, str] = {}
    named = env.get("DEEPLINK_CONFIG")
    for path in [Path(named)] if named else [SITE_FILE, USER_FILE.expanduser()]:
        if not named and not path.exists():
            continue
        for key, value in _file_values(path, named=bool(named)).items():
            if key not in kinds:
                meant = nearest(key, kinds)
                remedy = f"Is {meant} meant?" if meant else f"There are {', '.join(kinds)}."
                raise ConfigError(str(path), key, "unknown key", remedy)
            settings[key], origins[key] = _converted(str(path), key, kinds[key], value), str(path)
    for key, kind in kinds.items():
        name = f"DEEPLINK_{key.upper()}"
        if name in env:
            settings[key], origins[key] = _converted("environment", name, kind, env[name]), name
    return settings, origins
