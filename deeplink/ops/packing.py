"""`deeplink.pack`: makes a dataset from Python, of what the command takes, or of an iterable of samples."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.cache.catalog import Catalog, checked_name
from deeplink.cache.errors import SourceError
from deeplink.cache.packer import PackResult, check_pack
from deeplink.cache.packer import pack as pack_source
from deeplink.cache.source.selection import Selection
from deeplink.cache.source.source import ITERABLE
from deeplink.cache.source.spool import SpooledSource
from deeplink.cache.source.tables import TableColumns
from deeplink.core.config import load_config
from deeplink.ops.inventory import note_placed
from deeplink.ops.pack_target import chosen_home, target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.cache.source.source import Source
    from deeplink.core.config import Config

log = logging.getLogger(__name__)


def pack(  # noqa: PLR0913 - as the command has them
    source: str | os.PathLike[str] | Iterable[Any],
    name: str,
    *,
    key: str = "",
    columns: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    follow_links: bool = False,
    skip_bad: bool = False,
    append: bool = False,
    home: str = "",
    replace: bool = False,
    config: Config | None = None,
) -> PackResult:
    """Pack samples as the newest version of dataset `name`, and return what it came to.

    They go to the configured members, to the nodes of the allocation this runs in front of, or into this node's
    store. An iterable is written to a file in that store first; it has no source that could be read again, so that
    its copies at members, and `home`, are all there is of it.

    Args:
        source: a folder, URL, tars or tables, as `deeplink pack` takes them; or an iterable of pairs (key, bytes)
            or (key, {part: bytes}), or of mappings, such as a Hugging Face dataset, whose values are the parts of
            a sample. Text is packed as UTF-8, None is no part, other values as JSON.
        name: of the dataset.
        key: of tables and mappings, the column with the samples' keys; empty for their numbers.
        columns: of tables and mappings, those to pack; empty for all but `key`.
        include: globs of files to pack; empty for all.
        exclude: globs of files and folders to leave out, besides those left out by default.
        follow_links: follow links out of the folder and links to folders.
        skip_bad: leave out files that cannot be packed; the result names them.
        append: share shards of the newest version whose files are as they were.
        home: the packed home, a folder or URL that keeps shards and index besides; "none" for none, empty for what
            the configuration says, which is one where nodes share the catalog.
        replace: let a name whose newest version is of another source be of this one.
        config: settings; None for the configured ones.

    Raises:
        SourceError: the source cannot be packed, or a sample of it.
        CatalogError: the catalog cannot be written, or the name is of another source.
        DeepLinkError: shards cannot be placed, or agents not be started.
    """
    config = config or load_config()
    checked_name(name)
    wanted = Selection(
        include=tuple(include), exclude=tuple(exclude), follow_links=follow_links, skip_bad=skip_bad
    )
    with ExitStack() as stack:
        origin: str | Source
        if isinstance(source, str | os.PathLike):
            origin = TableColumns(key, tuple(columns)).url(os.fspath(source))
        elif append or wanted != Selection():
            raise SourceError(ITERABLE, "append, globs and links are for files", "Filter the iterable itself.")
        else:
            origin = stack.enter_context(SpooledSource(config.store))
        kept = chosen_home(config, home)
        named = kept.url if kept.named else ""
        check_pack(origin, name, config=config, append=append, home=named, replace=replace)
        home = kept.made(config.catalog).url
        if isinstance(origin, SpooledSource):
            origin.take(keyed(source, key, columns))  # type: ignore[arg-type]  # no path: an iterable
        to = stack.enter_context(target(config))
        result = pack_source(
            origin,
            name,
            config=to.config,
            wanted=wanted,
            members=to.members,
            token=to.token,
            append=append,
            home=home,
        )
        index = Catalog(to.config.catalog).open(result.name, result.version)
    note_placed(config.catalog, result.name, index, result.placed)
    copies = min(map(len, result.placed.values()), default=0)
    if isinstance(origin, SpooledSource) and (result.home_lacks or not result.home):
        log.warning(
            "%s has no source: its only copies are %d on nodes' SSDs; home= keeps one on shared storage",
            name,
            copies,
        )
    return result


def keyed(items: Iterable[Any], key: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield samples with their keys: pairs as they are, and of mappings the values of `columns`.

    Raises:
        SourceError: an item is neither, or a mapping lacks a column.
    """
    for number, item in enumerate(_undecoded(items)):
        if isinstance(item, Mapping):
            names = columns or [name for name in item if name != key]
            try:
                stem = str(item[key]) if key else f"{number:08d}"
                yield stem, {name: _with_bytes(item[name]) for name in names}
            except KeyError as missing:
                there = f"There are: {', '.join(map(str, item))}."
                raise SourceError(ITERABLE, f"item {number:,} has no {missing}", there) from None
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):  # noqa: PLR2004 - a pair
            yield item
        else:
            raise SourceError(
                ITERABLE,
                f"item {number:,} is a {type(item).__name__}, neither (key, bytes) nor a mapping",
                "Of several splits, pack one at a time.",
            )


def _undecoded(items: Iterable[Any]) -> Iterable[Any]:
    """Return a Hugging Face dataset whose images and audio come as the bytes they are stored as."""
    features = getattr(items, "features", None)
    if isinstance(features, Mapping):
        for column, feature in features.items():
            if getattr(feature, "decode", False) and dataclasses.is_dataclass(feature):
                stored = dataclasses.replace(feature, decode=False)  # type: ignore[type-var]
                items = items.cast_column(column, stored)  # type: ignore[attr-defined]
    return items


def _with_bytes(value: Any) -> Any:
    if isinstance(value, Mapping) and "bytes" in value and value["bytes"] is None and value.get("path"):
        try:
            return Path(value["path"]).read_bytes()
        except OSError as problem:
            raise SourceError.unreadable(ITERABLE, value["path"], problem.strerror or str(problem)) from problem
    return value
