"""The operators' guide lists every metric there is, by the name that Prometheus sees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry

from deeplink import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

GUIDE = Path(__file__).parents[2] / "docs" / "operator.md"
_BEHIND = {"counter": "_total", "info": "_info"}


def served(registry: CollectorRegistry) -> Iterator[str]:
    for family in registry.collect():
        if family.name.startswith("deeplink_"):
            yield family.name + _BEHIND.get(family.type, "")


def test_the_guide_lists_every_metric_and_no_other() -> None:
    of_watch = metrics.WatchMetrics(CollectorRegistry()).registry
    listed = re.findall(r"^\| `(deeplink_\w+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted([*served(REGISTRY), *served(of_watch)])
