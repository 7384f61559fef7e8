"""The datasets of the catalog as the page shows them: versions, sizes, and which nodes were found to hold them."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deeplink.cache.catalog import Catalog
from deeplink.cache.replicate.residency import UnknownHoldingError, held
from deeplink.console.sources import FactSource, SourceState
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.types import Version

log = logging.getLogger(__name__)

CATALOG_PERIOD_S = 60.0
MOST_DATASETS = 500
MOST_VERSIONS = 10  # of each, the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetView:
    """One version of a dataset. None and the empty text mean that it is not known."""

    key: str  # name@version
    name: str
    version: str
    newest: bool
    files: int | None
    bytes: int | None  # of samples
    shards: int | None
    packed_unix: float
    source: str
    home: str  # where a copy of all shards is kept besides
    total: int | None  # bytes of its shards
    nodes: (
        tuple[tuple[str, int], ...] | None
    )  # verified bytes on each, as last noted; None: nobody has looked lately
    order: int = 0


class DatasetReader:
    """Reads the catalog, which may hang with its file system: `refresh` waits for it, `facts` never."""

    def __init__(self, catalog: Path | None, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._lock = threading.Lock()
        self._facts: tuple[DatasetView, ...] = ()
        state = SourceState.OFF if catalog is None else SourceState.WAITING
        self._source = FactSource(name="catalog", title="catalog", state=state, period_s=CATALOG_PERIOD_S)

    def facts(self) -> tuple[tuple[DatasetView, ...], FactSource]:
        """Return what is known, and how old it is."""
        with self._lock:
            return self._facts, self._source

    def refresh(self) -> None:
        """Read the catalog once."""
        if self._catalog is None:
            return
        try:
            found = tuple(
                replace(each, order=order) for order, each in enumerate(self._read(Catalog(self._catalog)))
            )
        except (DeepLinkError, OSError) as problem:
            said = problem if isinstance(problem, DeepLinkError) else DeepLinkError(f"the catalog: {problem}")
            with self._lock:
                self._source = self._source.failed(said)
            return
        with self._lock:
            self._facts, self._source = found, self._source.answered(self._clock.unix())

    def _read(self, catalog: Catalog) -> Iterator[DatasetView]:
        for name in catalog.names()[:MOST_DATASETS]:
            try:
                newest = catalog.latest(name)
            except DeepLinkError:
                newest = None
            for version in reversed(catalog.versions(name)[-MOST_VERSIONS:]):
                try:
                    yield self._view(catalog, name, version, newest=version == newest)
                except (DeepLinkError, OSError):
                    raise
                except Exception as problem:  # noqa: BLE001 - of one record: the others are shown
                    log.warning(
                        "dataset %s@%s is not shown: its record cannot be read (%r)", name, version, problem
                    )

    def _view(self, catalog: Catalog, name: str, version: Version, *, newest: bool) -> DatasetView:
        record, key = catalog.record(name, version), f"{name}@{version}"
        try:
            where = held(catalog.root, key, unix=self._clock.unix())
        except UnknownHoldingError:
            where = None
        return DatasetView(
            key=key,
            name=name,
            version=version,
            newest=newest,
            files=_number(record.files) if record else None,
            bytes=_number(record.bytes) if record else None,
            shards=_number(record.shards) if record else None,
            packed_unix=(_number(record.packed_unix) if record else None) or 0.0,
            source=_text(record.source) if record else "",
            home=_text(record.home) if record else "",
            total=where.total if where else None,
            nodes=tuple(sorted((_text(node), size) for node, size in where.bytes.items())) if where else None,
        )


# A record is JSON that anybody who may write to the catalog may have changed.


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: object) -> str:
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""
