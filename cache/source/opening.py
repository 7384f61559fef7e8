"""Opens the source that a path or a URL names: a folder, fsspec's URL, or files that hold many samples each."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.errors import SourceError
from deeplink.cache.source.cap import CappedSource
from deeplink.cache.source.containers import ContainerSource
from deeplink.cache.source.local_source import LocalSource
from deeplink.cache.source.source import ITERABLE
from deeplink.cache.source.tars import SUFFIX, TarContainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.cache.source.cap import SourceCap
    from deeplink.cache.source.containers import ContainerFile
    from deeplink.cache.source.source import Source

_COMPRESSED = re.compile(r".*\.(tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2|txz)")
TABLES = re.compile(r"(?P<files>.*(?P<suffix>\.parquet|\.arrow|\.feather))(?:#(?P<settings>.*))?")
_ANY = re.compile(r"[*?\[{]")


def open_source(url: str, cap: SourceCap | None = None) -> Source:
    """Return the source a local path or a URL names; nothing is read yet.

    Args:
        url: a folder, fsspec's URL, or files that hold many samples each.
        cap: counts and bounds all that is read from storage, also what only finds the samples in larger files.

    Raises:
        SourceError: no source can be meant by it.
    """
    if url == ITERABLE:
        from deeplink.cache.source.spool import spent  # noqa: PLC0415 - as below

        raise spent()
    if not url:  # a variable of a script that is not set: not the current folder
        raise SourceError(url, "no source is named")
    if "::" in url:
        return _remote(url, cap)
    path = url.removeprefix("file://")
    if "://" not in path and Path(path).is_dir():
        return _capped(LocalSource(path), cap)
    if _COMPRESSED.fullmatch(url):
        raise SourceError(
            url,
            "the files of a compressed tar cannot be read one by one",
            "Decompress it (gunzip, unzstd ...), and name the .tar.",
        )
    if url.endswith(SUFFIX):
        return _container_source(path, path, SUFFIX, TarContainer, cap)
    if table := TABLES.fullmatch(path):
        from deeplink.cache.source.tables import TableColumns, TableContainer  # noqa: PLC0415 - as below

        columns = TableColumns.parsed(path, table["settings"] or "")
        opened = partial(TableContainer, wanted=columns)
        return _container_source(path, table["files"], table["suffix"], opened, cap)
    return _capped(LocalSource(path), cap) if "://" not in path else _remote(path, cap)


def holds_many(url: str) -> bool:
    """Tell whether a sample of this source lies in a file with others: its file may have to be looked through."""
    return "::" in url or url.endswith(SUFFIX) or TABLES.fullmatch(url) is not None


def _capped(source: Source, cap: SourceCap | None) -> Source:
    return source if cap is None else CappedSource(source, cap)


def _remote(url: str, cap: SourceCap | None) -> Source:
    from deeplink.cache.source.remote import RemoteSource  # noqa: PLC0415 - fsspec: no agent needs it to start

    return _capped(RemoteSource(url), cap)


def _container_source(
    url: str,
    files: str,
    suffix: str,
    opened: Callable[[Source, str, int], ContainerFile],
    cap: SourceCap | None,
) -> ContainerSource:
    if "**" in files or re.search(r"\{[^}]*/", files):
        raise SourceError(
            url, "its files must lie equally deep: no ** and no slash in braces", "Name them by * and {}."
        )
    is_local = "://" not in files
    parts = (os.path.abspath(files) if is_local else files).split("/")  # noqa: PTH100 - keeps links and globs as they are
    # A URL's scheme and host are never a pattern; the last part is the file's own name.
    first = 1 if is_local else 3
    plain = next((at for at, part in enumerate(parts) if at >= first and _ANY.search(part)), len(parts) - 1)
    root = "/".join(parts[: min(plain, len(parts) - 1)])
    source = _capped(LocalSource(root or "/"), cap) if is_local else _remote(root, cap)
    shown = "/".join(parts) + url.removeprefix(files)
    return ContainerSource(shown, source, "/".join(parts[len(root.split("/")) :]), suffix, opened)
