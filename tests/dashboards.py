"""The Grafana boards, from one list of panels: `make reference` writes them where the role has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.house import ROOT

FOLDER = ROOT / "ansible" / "roles" / "watch" / "files" / "grafana"
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_JOB = 'job_id=~"$job_id"'
_LOST = "sum(increase(deeplink_watch_lost_rank_seconds_total[1d]))"
_OF_NODE = 'instance=~"$node"'

_WRITTEN = f"sum by (instance) (increase(deeplink_store_filled_bytes_total{{{_OF_NODE}}}[1d]))"


def _quantile(q: float, buckets: str) -> tuple[str, str]:
    return f"histogram_quantile({q}, sum by (le) (rate({buckets})))", f"p{q * 100:.0f}"


@dataclass(frozen=True)
class Panel:
    """One graph: its queries, each with what its lines are called."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False


@dataclass(frozen=True)
class Board:
    """A page of graphs; `variable` is a label to choose by, with the query of its values."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    variable: tuple[str, str] | None = None


BOARDS = (
    Board(
        "deeplink-cluster",
        "DeepLink: cluster",
        (
            Panel(
                "Nodes by health",
                (("deeplink_console_nodes", "{{health}}"),),
                stacked=True,
            ),
            Panel("Jobs by state", (("deeplink_console_jobs", "{{state}}"),), stacked=True),
            Panel(
                "Open incidents by kind", (("deeplink_watch_incidents_open_by_kind", "{{kind}}"),), stacked=True
            ),
            Panel(
                "Ended incidents per day",
                (
                    (
                        "sum by (kind, outcome) (increase(deeplink_watch_incidents_ended_total[1d]))",
                        "{{kind}} {{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Time to detect",
                tuple(_quantile(q, "deeplink_watch_detect_seconds_bucket[1d]") for q in (0.5, 0.95)),
                unit="s",
            ),
            Panel(
                "Time to resume",
                tuple(_quantile(q, "deeplink_watch_resume_seconds_bucket[1d]") for q in (0.5, 0.95)),
                unit="s",
            ),
            Panel(
                "Goodput: share of watched ranks' time that no incident cost",
                (
                    (
                        f"1 - {_LOST} / (300 * sum_over_time(sum(deeplink_job_ranks)[1d:5m]))",
                        "goodput",
                    ),
                ),
                unit="percentunit",
            ),
            Panel("Nodes to blame, seven days", (("topk(10, deeplink_watch_node_incidents)", "{{node}}"),)),
            Panel(
                "Age of the daemons' facts",
                (
                    ("time() - deeplink_watch_loop_time_seconds", "watchdog's loop"),
                    ("time() - deeplink_watch_journal_time_seconds", "journal"),
                    ("time() - (deeplink_console_source_read_time_seconds > 0)", "console: {{source}}"),
                    ("max(time() - (deeplink_health_attended_time_seconds > 0))", "the least heard agent"),
                ),
                unit="s",
            ),
            Panel(
                "Watchdog: verdicts and actions per hour",
                (
                    ("sum by (kind) (increase(deeplink_watch_verdicts_total[1h]))", "{{kind}}"),
                    (
                        "sum by (remedy, result) (increase(deeplink_watch_actions_total[1h]))",
                        "{{remedy}} {{result}}",
                    ),
                ),
            ),
            Panel(
                "Findings of node checks",
                (("sum by (check, severity) (deeplink_health_findings)", "{{check}} {{severity}}"),),
                stacked=True,
            ),
            Panel(
                "Messages by channel per hour",
                (
                    (
                        "sum by (channel, result) (increase(deeplink_watch_notify_messages_total[1h]))",
                        "{{channel}} {{result}}",
                    ),
                ),
            ),
        ),
    ),
    Board(
        "deeplink-jobs",
        "DeepLink: jobs",
        (
            Panel("State", ((f"deeplink_job_state{{{_OF_JOB}}}", "{{job_id}} {{state}}"),)),
            Panel("Step", ((f"deeplink_job_step{{{_OF_JOB}}}", "{{job_id}}"),)),
            Panel("Steps per second", ((f"deeplink_job_steps_per_second{{{_OF_JOB}}}", "{{job_id}}"),)),
            Panel(
                "Since the last report, and the last checkpoint",
                (
                    (f"time() - deeplink_job_report_time_seconds{{{_OF_JOB}}}", "{{job_id}} report"),
                    (f"time() - deeplink_job_checkpoint_time_seconds{{{_OF_JOB}}}", "{{job_id}} checkpoint"),
                ),
                unit="s",
            ),
            Panel(
                "Samples read by place, rank 0",
                (
                    (
                        f"sum by (job_id, place) (rate(deeplink_job_samples_total{{{_OF_JOB}}}[5m]))",
                        "{{job_id}} {{place}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Readers of rank 0 that wait",
                ((f"rate(deeplink_job_read_wait_seconds_total{{{_OF_JOB}}}[5m])", "{{job_id}}"),),
            ),
            Panel(
                "Attempts, and steps run again",
                (
                    (f"deeplink_job_attempts_total{{{_OF_JOB}}}", "{{job_id}} attempts"),
                    (f"deeplink_job_repeated_steps{{{_OF_JOB}}}", "{{job_id}} repeated steps"),
                ),
            ),
            Panel(
                "Whose",
                (
                    (
                        f"deeplink_job_ranks{{{_OF_JOB}}} * on (job_id) group_left (name, user) deeplink_job_info",
                        "{{job_id}} {{name}} of {{user}}",
                    ),
                ),
            ),
        ),
        ("job_id", "label_values(deeplink_job_info, job_id)"),
    ),
    Board(
        "deeplink-cache",
        "DeepLink: cache",
        (
            Panel(
                "Bytes held, and the budget",
                (
                    (f"sum(deeplink_store_verified_bytes{{{_OF_NODE}}})", "verified"),
                    (f"sum(deeplink_store_bytes{{{_OF_NODE}}})", "held"),
                    (f"sum(deeplink_store_budget_bytes{{{_OF_NODE}}})", "budget"),
                ),
                unit="bytes",
            ),
            Panel(
                "Free bytes, the least",
                ((f"bottomk(10, deeplink_store_free_bytes{{{_OF_NODE}}})", "{{instance}}"),),
                unit="bytes",
            ),
            Panel(
                "Filled, by origin",
                (
                    (
                        f"sum by (origin) (rate(deeplink_store_filled_bytes_total{{{_OF_NODE}}}[5m]))",
                        "{{origin}}",
                    ),
                ),
                unit="Bps",
                stacked=True,
            ),
            Panel(
                "Read from sources",
                ((f"sum(rate(deeplink_source_bytes_total{{{_OF_NODE}}}[5m]))", "bytes"),),
                unit="Bps",
            ),
            Panel(
                "Waiting for the cap on source load",
                (
                    (
                        f"avg(rate(deeplink_source_wait_seconds_total{{{_OF_NODE}}}[5m]))",
                        "of a node's time",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Shards evicted and filled per hour",
                (
                    (
                        f"sum by (reason) (increase(deeplink_store_evicted_shards_total{{{_OF_NODE}}}[1h]))",
                        "evicted: {{reason}}",
                    ),
                    (
                        f"sum by (outcome) (increase(deeplink_store_filled_shards_total{{{_OF_NODE}}}[1h]))",
                        "filled: {{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Sent to other nodes",
                ((f"sum(rate(deeplink_cache_served_bytes_total{{{_OF_NODE}}}[5m]))", "bytes"),),
                unit="Bps",
            ),
            Panel(
                "Time to answer a batch",
                (_quantile(0.95, f"deeplink_cache_read_seconds_bucket{{{_OF_NODE}}}[5m]"),),
                unit="s",
            ),
            Panel(
                "Written per day, in budgets",
                (
                    (
                        f"topk(10, {_WRITTEN} / on (instance) deeplink_store_budget_bytes{{{_OF_NODE}}})",
                        "{{instance}}",
                    ),
                ),
            ),
            Panel(
                "Damaged, refused, unhealthy",
                (
                    (
                        f"sum(increase(deeplink_cache_damaged_shards_total{{{_OF_NODE}}}[1h]))",
                        "damaged shards per hour",
                    ),
                    (
                        f"sum(increase(deeplink_cache_refused_samples_total{{{_OF_NODE}}}[1h]))",
                        "refused samples per hour",
                    ),
                    (f"sum(deeplink_store_healthy{{{_OF_NODE}}} == bool 0)", "unhealthy stores"),
                ),
            ),
        ),
        ("node", "label_values(deeplink_node_info, instance)"),
    ),
)


def boards() -> dict[Path, str]:
    """Return each board's file with what it should hold."""
    return {FOLDER / f"{board.name}.json": json.dumps(_board(board), indent=1) + "\n" for board in BOARDS}


def _board(board: Board) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"}
    ]
    if board.variable:
        name, query = board.variable
        variables.append(
            {
                "name": name,
                "type": "query",
                "datasource": _SOURCE,
                "query": query,
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return {
        "uid": board.name,
        "title": board.title,
        "tags": ["deeplink"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(board.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    stacking = {"mode": "normal" if panel.stacked else "none"}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"stacking": stacking}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }
