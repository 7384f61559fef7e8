"""Who may read a packed home's files, where several datasets have the same shards (docs/decisions/0039)."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from deeplink.cache.format.access import SourceAccess
from deeplink.cache.format.index import Index
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Version

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.source.home import PackedHome
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)


def readmit(home: PackedHome, catalog: Catalog, name: str, shards: Collection[ShardId]) -> None:
    """Let shards at home be read as the source of dataset `name` is, whoever put them there."""
    if stay := home.readmit(list(shards), _OtherDatasets(catalog, name, shards)):
        said = "%d shards at home %s, of another user, are readable by others than the source is"
        log.warning(said, len(stay), home.url)


class _OtherDatasets:
    """The access of datasets that have some shards, too, by their publisher; looked for when it is needed."""

    def __init__(self, catalog: Catalog, but: str, shards: Collection[ShardId]) -> None:
        self._catalog, self._but, self._shards = catalog, but, shards
        self._lock = threading.Lock()

    def __call__(self, publisher: int, shard: ShardId) -> list[SourceAccess]:
        with self._lock:
            return self._found.get((publisher, shard), [])

    @cached_property
    def _found(self) -> dict[tuple[int, ShardId], list[SourceAccess]]:
        found: dict[tuple[int, ShardId], list[SourceAccess]] = {}
        for index, access in self._indexes():
            with suppress(DeepLinkError, OSError):
                publisher = index.path.stat().st_uid
                for shard in {entry.id for entry in index.shards}.intersection(self._shards):
                    found.setdefault((publisher, shard), []).append(access)
        return found

    def _indexes(self) -> Iterator[tuple[Index, SourceAccess]]:
        """Yield the indexes of the other datasets, with the access of their newest; a part's is its own."""
        catalog, but = self._catalog, self._but  # who packs a dataset again says who may read it
        # What is damaged, removed meanwhile, or says nothing, opens nothing. Parts first: a merge hides none.
        for path in [path for path in catalog.unmerged() if path.parents[1].name != but]:
            with suppress(DeepLinkError, OSError, ValueError):
                index = Index(path, Version(""))
                yield index, SourceAccess.parse(index.access)
        for name in [name for name in catalog.names() if name != but]:
            with suppress(DeepLinkError, OSError, ValueError):
                access = SourceAccess.parse(catalog.open(name).access)
                for version in catalog.versions(name):
                    with suppress(DeepLinkError):
                        yield catalog.open(name, version), access
