"""The one configuration: built-in defaults, then the site's file, then the user's file, then the environment.

Files are TOML (`/etc/deeplink/config.toml`, `~/.config/deeplink/config.toml`, or the one file that DEEPLINK_CONFIG
names instead of both). A key of the file and a variable of the environment have one name: `store` is
DEEPLINK_STORE. Paths may hold `~` and environment variables. An unknown key is an error that names file and key.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

SITE_FILE = Path("/etc/deeplink/config.toml")
USER_FILE = Path("~/.config/deeplink/config.toml")


class ConfigError(DeepLinkError):
    """A configuration file or variable holds something that cannot be used."""

    exit_code = 2

    def __init__(self, origin: str, key: str, problem: str) -> None:
        super().__init__(f"{origin}: {key}: {problem}", remedy="docs/configuration.md lists every key.")
        self.origin, self.key, self.problem = origin, key, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting, resolved.

    Attributes:
        catalog: folder of the dataset indexes, readable from every node (shared storage).
        store: folder of the shards on this node's own SSD.
        state: folder of what DeepLink remembers for this user between runs (journals, records of jobs).
        replicas: copies of each shard (R).
        shard_bytes: most bytes of samples in a shard; `plan.shard_size` says when it is less.
        agent_bind: `host:port` a node agent listens on; port 0 picks a free one.
        members: agents of a standing cache (`NAME=HOST:PORT,...`); inside a job `deeplink run` sets it.
        node: this node's member name; the host name when empty.
        read_deadline_ms: how long a member may take to answer a batch of reads, besides the transfer.
        token_file: 0600 file with the token that calls carry.
        watch: `host:port` of the site's watchdog; empty where there is none.
        watch_token_file: file with the watchdog's token.
        console_bind: `host:port` the operator console listens on.
    """

    catalog: Path = Path("~/.local/share/deeplink/catalog")
    store: Path = Path("~/.cache/deeplink/store")
    state: Path = Path("~/.local/state/deeplink")
    replicas: int = 2
    shard_bytes: int = 256 << 20
    agent_bind: str = "127.0.0.1:0"
    members: str = ""
    node: str = ""
    read_deadline_ms: int = 2000
    token_file: Path | None = None
    watch: str = ""
    watch_token_file: Path | None = None
    console_bind: str = "127.0.0.1:8642"


def _converted(origin: str, key: str, kind: str, value: Any) -> Any:
    if "Path" in kind:
        if not isinstance(value, str):
            raise ConfigError(origin, key, f"expected a path, got {value!r}")
        if not value:
            if "None" in kind:
                return None
            raise ConfigError(origin, key, "the path is empty")
        return Path(os.path.expandvars(value)).expanduser()
    if kind == "int":
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ConfigError(origin, key, f"expected a whole number, got {value!r}") from None
        if number <= 0:
            raise ConfigError(origin, key, f"must be positive, got {number}")
        return number
    if not isinstance(value, str):
        raise ConfigError(origin, key, f"expected a text, got {value!r}")
    return value


def load_config(env: Mapping[str, str] | None = None) -> Config:
    """Return the configuration that holds for this process.

    Raises:
        ConfigError: a file cannot be read or parsed, a key is unknown, or a value is of the wrong kind.
    """
    env = os.environ if env is None else env
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Config)}
    settings: dict[str, Any] = {
        field.name: field.default.expanduser() if isinstance(field.default, Path) else field.default
        for field in dataclasses.fields(Config)
    }
    named = env.get("DEEPLINK_CONFIG")
    for path in [Path(named)] if named else [SITE_FILE, USER_FILE.expanduser()]:
        if not named and not path.exists():
            continue
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
            raise ConfigError(str(path), "(file)", str(problem)) from problem
        for key, value in values.items():
            if key not in kinds:
                raise ConfigError(str(path), key, "unknown key")
            settings[key] = _converted(str(path), key, kinds[key], value)
    for key, kind in kinds.items():
        name = f"DEEPLINK_{key.upper()}"
        if name in env:
            settings[key] = _converted("environment", name, kind, env[name])
    return Config(**settings)
