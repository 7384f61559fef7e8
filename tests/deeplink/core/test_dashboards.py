"""The Grafana boards: every query is one that Prometheus reads, of metrics that daemons export."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.dashboards import BOARDS
from tests.deeplink.core.test_alerts import exported, promtool

QUERIES = [query for board in BOARDS for panel in board.panels for query, _ in panel.queries]


def test_queries_are_of_metrics_that_there_are() -> None:
    variables = [board.variable[1] for board in BOARDS if board.variable]
    used = {name for query in [*QUERIES, *variables] for name in re.findall(r"deeplink_\w+", query)}
    assert len(used) > 30
    assert used <= exported()


@pytest.mark.slow
def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(QUERIES)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    assert f"{len(QUERIES)} rules found" in promtool("check", "rules", path)
