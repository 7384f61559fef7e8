"""Types of parameters and options that several commands have."""

from __future__ import annotations

import functools
import math
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from click.core import Context, Parameter

    from deeplink.core.config import Config
    from deeplink.fs.library import Library
    from deeplink.ops.inventory import PackTarget

_OFFERED = 200  # completions offered at once
_AGO = re.compile(r"(\d{1,6})([mhdw])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class FiniteRange(click.FloatRange):
    """A range that `nan` and `inf` are outside of: click's own lets both in where they are below no bound."""

    @override
    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number", param, ctx)
        return found


class Verbatim(click.Command):
    """Stands for a program of Slurm's: takes every word as it is, as `words`; only a lone --help is its own."""

    @override
    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if args == ["--help"]:
            return super().parse_args(ctx, args)
        ctx.params = {"words": tuple(args)}
        return []


class PlaceType(click.ParamType[str]):
    """`NAME[@VERSION][/PATH]`, as text; the shell completes it as it does paths."""

    name = "place"

    @override
    def shell_complete(self, ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
        from deeplink.fs.library import Library

        try:
            found = _completions(Library(), incomplete)
        except (DeepLinkError, OSError):
            return []  # the command itself will say what is wrong
        return [CompletionItem(text) for text in found if text.startswith(incomplete)][:_OFFERED]


def _completions(library: Library, beginning: str) -> list[str]:
    folder, slash, name = beginning.rpartition("/")
    if slash:
        found = library.at(folder)
        below = [entry.path + "/" * entry.is_folder for entry in found.entries() if entry.path != found.entry.path]
        return [folder + slash + path.removeprefix(f"{found.place.inner}/").lstrip("/") for path in below]
    dataset, at, _ = name.partition("@")
    if at:
        return [f"{dataset}@{version}" for version in reversed(library.catalog.versions(dataset))]
    return library.catalog.names(lost=True)


class DatasetType(PlaceType):
    """`NAME` or `NAME@VERSION`, as a DatasetPath."""

    name = "dataset"

    @override
    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> Any:
        from deeplink.fs.library import DatasetPath

        if not value or "/" in value.removeprefix("deeplink://").rstrip("/"):
            raise click.UsageError(f"{value!r} is not NAME or NAME@VERSION")
        return DatasetPath.parse(value)


dataset_argument = click.argument("dataset", metavar="NAME[@VERSION]", type=DatasetType())


def option(usage: str, help_text: str, *, name: str = "", **more: Any) -> Callable[[Any], Any]:
    """Return an option, given as `-n --lines LINES`; its default is shown unless the help names it."""
    words = usage.split()
    switches = [word for word in words if word.startswith("-")]
    metavar = next((word for word in words if not word.startswith("-")), None)
    shown = more.get("default") not in {None, ""} and "[default" not in help_text
    more = {"metavar": metavar, "show_default": shown, **more}
    return click.option(*switches, *filter(None, [name]), help=help_text, **more)


def flag(usage: str, help_text: str, **more: Any) -> Callable[[Any], Any]:
    """Return an option without a value."""
    return option(usage, help_text, is_flag=True, **more)


def integer(usage: str, help_text: str, least: int, most: int | None = None, **more: Any) -> Callable[[Any], Any]:
    """Return an option that takes a whole number."""
    return option(usage, help_text, type=click.IntRange(least, most), **more)


def real(usage: str, help_text: str, least: float, most: float | None = None, **more: Any) -> Callable[[Any], Any]:
    """Return an option that takes a finite number."""
    kind = FiniteRange(least, most, min_open=more.pop("min_open", False))
    return option(usage, help_text, type=kind, **more)


def path_option(usage: str, help_text: str, *, dir_okay: bool = True, **more: Any) -> Callable[[Any], Any]:
    """Return an option that takes a path."""
    return option(usage, help_text, type=click.Path(dir_okay=dir_okay, path_type=Path), **more)


def json_option(help_text: str = "Print the result as JSON.") -> Callable[[Any], Any]:
    """Return the option --json, which a command gets as `as_json`."""
    return flag("--json", help_text, name="as_json")


json_and_progress = json_option("Print the result as JSON; progress goes to standard error.")


def grouped(name: str, value: type, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add options to a command, which gets them as one value: a dataclass whose fields are named as they are."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_value(**given: Any) -> Any:
            fields = {field: given.pop(field) for field in value.__dataclass_fields__ if field in given}  # type: ignore[attr-defined]
            return command(**given, **{name: value(**fields)})

        return functools.reduce(lambda inner, option: option(inner), reversed(options), with_value)

    return decorate


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Names the stores of a command: those of agents, of an allocation, of a local run, or this node's."""

    members: str | None
    here: bool
    local: int | None
    replicas: int | None = None

    def config(self, **more: Any) -> Config:
        """Return the configuration, with what was given in its place."""
        where = {"--members": self.members, "--here": self.here, "--local": self.local}
        named = [name for name, value in where.items() if value]
        if len(named) > 1:
            raise click.UsageError(f"{' and '.join(named)} exclude each other")
        given = {"members": self.members, "replicas": self.replicas, **more}
        return replace(load_config(), **{key: value for key, value in given.items() if value is not None})

    def target(self, config: Config) -> AbstractContextManager[PackTarget]:
        """Give the members; those that are started for it run until the end of the `with`."""
        from deeplink.ops.packing import target

        return target(config, local=self.local or 0, here=self.here)


members_option = option(
    "--members NAME=HOST:PORT,...", "Agents to ask, or to place shards on. [default: config members]"
)
replicas_option = integer("--replicas", "Copies of each shard. [default: config replicas]", 1)
_WHERE = (
    members_option,
    flag("--here", "This node's store alone, also inside an allocation."),
    integer("--local N", "The N nodes of `deeplink run --local N`.", 1),
)
where_options = grouped("where", StoreOptions, *_WHERE)
where_and_replicas = grouped("where", StoreOptions, _WHERE[0], replicas_option, *_WHERE[1:])


def standing_secret(bind: str, token_file: Path | None, default: Path) -> tuple[str, Path]:
    """Return the secret of a service that listens there, and its file, which is made where there is none."""
    from deeplink.rpc.daemon import is_loopback, split_bind, standing_token

    if token_file is None and not is_loopback(split_bind(bind)[0]):
        problem = f"cannot listen on {bind}: others can reach it, and there is no token file"
        raise click.UsageError(f"{problem}; give --token-file FILE, which is made when it is not there")
    return standing_token(token_file, default)


def metrics_token(bind: str, token_file: Path | None) -> str:
    """Return the token that who asks for metrics must show; empty where nobody need, on loopback alone."""
    from deeplink.rpc.daemon import is_loopback
    from deeplink.rpc.tokens import read_token

    host = bind.rpartition(":")[0].strip("[]")
    if token_file is None and host and not is_loopback(host):
        problem = f"metrics at {bind} can be read by others, and there is no token"
        raise click.UsageError(f"{problem}; give --metrics-token-file FILE")
    return read_token(token_file) if token_file else ""


def script_text(name: str, most: int) -> str:
    """Return the beginning of a script, found as a shell finds it; empty where it cannot be read."""
    found = name if "/" in name or Path(name).is_file() else shutil.which(name)
    try:
        with Path(found or name).open("rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


class Since(click.ParamType[float]):
    """A moment as Unix time: so long ago (30m, 12h, 7d, 4w), or a day or time (2026-11-22, 2026-11-22T08:30)."""

    name = "since"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from datetime import datetime

        if isinstance(value, float):
            return value
        ago = _AGO.fullmatch(str(value))
        if ago:
            return max(0.0, time.time() - int(ago[1]) * _UNIT_S[ago[2]])
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is neither so long ago (30m, 12h, 7d, 4w) nor a day (2026-11-22)", param, ctx)


journal_option = path_option(
    "--journal FILE",
    "Which journal. [default: the watchdog's, else those of your jobs, below config state]",
    name="journal_file",
)


def journal_paths(named: Path | None) -> tuple[tuple[Path, ...], bool]:
    """Return the journals to read: the one named, the watchdog's, or those of the user's jobs (then True)."""
    from deeplink.scheduler.journal.journal import default_journal

    state = load_config().state
    watchdog = default_journal(state)
    if named is None and not watchdog.exists():
        jobs = tuple(filter(_was_begun, sorted((state / "jobs").glob("*/journal.sqlite"))))
        if jobs:
            return jobs, True
    return ((named or watchdog).absolute(),), False


def _was_begun(path: Path) -> bool:
    """Tell whether a journal holds anything; an empty one was just made, or its launcher was killed then."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # its job's folder is being removed
        return False
