"""The rules for Prometheus: promtool finds them sound, and each rings when it should and not before."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deeplink.core.metrics import AGENT, CONSOLE, WatchMetrics
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
RULES = ROOT / "ansible" / "roles" / "watch" / "files" / "deeplink-alerts.yml"
RUNBOOK = ROOT / "docs" / "alerts.md"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


@dataclass(frozen=True)
class Case:
    """One alert: series, a value each 10 s, with which it rings at `at`, and not yet at `before`; and others."""

    alert: str
    rings: dict[str, str]
    at: str
    before: str  # it has not rung by then: what it is about may still pass
    quiet: dict[str, str]  # with these it does not ring at all
    labels: dict[str, str] = field(default_factory=dict)


# Time begins at 0 there, so that a gauge with "when" counts up with it, and stands still where it stops.
GOES = "0+10x720"
STANDS = "0+10x6 60x720"
HEAD, N1, JOB = {"instance": "head"}, {"instance": "n1"}, {"job_id": "17"}
CASES = (
    Case(
        "DeepLinkWatchdogGone",
        rings={'deeplink_watch_loop_time_seconds{instance="head"}': "0+10x30 stale"},
        before="5m",
        at="7m",
        quiet={'deeplink_watch_loop_time_seconds{instance="head"}': GOES},
    ),
    Case(
        "DeepLinkWatchdogStalled",
        rings={'deeplink_watch_loop_time_seconds{instance="head"}': STANDS},
        before="100s",
        at="150s",
        quiet={'deeplink_watch_loop_time_seconds{instance="head"}': GOES},
        labels=HEAD,
    ),
    Case(
        "DeepLinkWatchdogDeaf",
        rings={
            'deeplink_watch_beats_total{instance="head",answer="kept"}': "0+10x30 300x720",
            'deeplink_watch_jobs{instance="head",phase="running"}': "1x720",
        },
        before="9m",
        at="13m",
        quiet={
            'deeplink_watch_beats_total{instance="head",answer="kept"}': "0+10x30 300x720",
            'deeplink_watch_jobs{instance="head",phase="succeeded"}': "1x720",
        },
        labels=HEAD,
    ),
    Case(
        "DeepLinkWatchdogJournalStalled",
        rings={'deeplink_watch_journal_time_seconds{instance="head"}': STANDS},
        before="2m",
        at="210s",
        quiet={'deeplink_watch_journal_time_seconds{instance="head"}': GOES},
        labels=HEAD,
    ),
    Case(
        "DeepLinkNotificationsStuck",
        rings={'deeplink_watch_notify_time_seconds{instance="head",channel="chat"}': STANDS},
        before="5m",
        at="8m",
        quiet={'deeplink_watch_notify_time_seconds{instance="head",channel="chat"}': GOES},
        labels={**HEAD, "channel": "chat"},
    ),
    Case(
        "DeepLinkWatchdogInDoubt",
        rings={'deeplink_watch_in_doubt{instance="head"}': "0x6 1x720"},
        before="5m",
        at="8m",
        quiet={'deeplink_watch_in_doubt{instance="head"}': "0x6 1x20 0x720"},
        labels=HEAD,
    ),
    Case(
        "DeepLinkIncidentsOpen",
        rings={'deeplink_watch_incidents_open{instance="head"}': "0x6 1x720"},
        before="20m",
        at="35m",
        quiet={'deeplink_watch_incidents_open{instance="head"}': "1x60 0x720"},
        labels=HEAD,
    ),
    Case(
        "DeepLinkAgentGone",
        rings={'up{job="deeplink-node",instance="n1"}': "1x6 0x720"},
        before="10m",
        at="12m",
        quiet={'up{job="deeplink-node",instance="n1"}': "1x6 0x12 1x720", 'up{job="other"}': "0x720"},
        labels={**N1, "job": "deeplink-node"},
    ),
    Case(
        "DeepLinkAgentUnheard",
        rings={'deeplink_health_attended_time_seconds{instance="n1"}': STANDS},
        before="3m",
        at="6m",
        # One that has no watchdog never was heard by it.
        quiet={'deeplink_health_attended_time_seconds{instance="n1"}': "0x720"},
        labels=N1,
    ),
    Case(
        "DeepLinkConsoleStale",
        rings={'deeplink_console_source_up{instance="head",source="jobs"}': "1x6 0x720"},
        before="3m",
        at="5m",
        quiet={'deeplink_console_source_up{instance="head",source="jobs"}': "1x6 0x6 1x720"},
        labels={**HEAD, "source": "jobs"},
    ),
    Case(
        "DeepLinkJobStranded",
        rings={'deeplink_job_state{job_id="17",state="stranded"}': "1x720"},
        before="4m",
        at="6m",
        quiet={'deeplink_job_state{job_id="17",state="stranded"}': "1x6 stale"},
        labels={**JOB, "state": "stranded"},
    ),
    Case(
        "DeepLinkJobHeld",
        rings={'deeplink_job_state{job_id="17",state="held"}': "1x720"},
        before="9m",
        at="11m",
        quiet={'deeplink_job_state{job_id="17",state="pending"}': "1x720"},
        labels={**JOB, "state": "held"},
    ),
    Case(
        "DeepLinkJobHanging",
        rings={
            'deeplink_job_report_time_seconds{job_id="17"}': STANDS,
            'deeplink_job_state{job_id="17",state="running"}': "1x720",
        },
        before="34m",
        at="40m",
        quiet={
            'deeplink_job_report_time_seconds{job_id="17"}': STANDS,
            'deeplink_job_state{job_id="17",state="held"}': "1x720",
        },
        labels=JOB,
    ),
    Case(
        "DeepLinkRanksHung",
        rings={'deeplink_watch_incidents_open_by_kind{instance="head",kind="ranks-hung"}': "1x720"},
        before="9m",
        at="11m",
        quiet={
            'deeplink_watch_incidents_open_by_kind{instance="head",kind="ranks-hung"}': "1x30 stale",
            'deeplink_watch_incidents_open_by_kind{instance="head",kind="straggler"}': "1x720",
        },
        labels={**HEAD, "kind": "ranks-hung"},
    ),
    Case(
        "DeepLinkJobLooping",
        rings={
            'deeplink_job_attempts_total{job_id="17"}': "1x30 2x30 3x30 4x720",
            'deeplink_job_highest_step{job_id="17"}': "40x720",
        },
        before="14m",
        at="18m",
        # It is restarted often, and gets on all the same.
        quiet={
            'deeplink_job_attempts_total{job_id="17"}': "1x30 2x30 3x30 4x720",
            'deeplink_job_highest_step{job_id="17"}': "40x40 80x40 160x720",
        },
        labels=JOB,
    ),
    Case(
        "DeepLinkJobStarving",
        rings={
            'deeplink_job_read_wait_seconds_total{job_id="17"}': "0+20x720",
            'deeplink_job_samples_total{job_id="17",place="local"}': "0+1x720",
            'deeplink_job_samples_total{job_id="17",place="source"}': "0+9x720",
        },
        before="10m",
        at="25m",
        # It waits for what little is not there, while workers read on.
        quiet={
            'deeplink_job_read_wait_seconds_total{job_id="17"}': "0+20x720",
            'deeplink_job_samples_total{job_id="17",place="local"}': "0+90x720",
            'deeplink_job_samples_total{job_id="17",place="source"}': "0+9x720",
        },
        labels=JOB,
    ),
    Case(
        "DeepLinkNodeFinding",
        rings={'deeplink_health_findings{instance="n1",check="disk",severity="drain"}': "0x6 1x720"},
        before="5m",
        at="7m",
        quiet={'deeplink_health_findings{instance="n1",check="disk",severity="observe"}': "1x720"},
        labels={**N1, "check": "disk"},
    ),
    Case(
        "DeepLinkNodeLemon",
        rings={'deeplink_watch_node_incidents{instance="head",node="n7"}': "1x30 2x30 3x720"},
        before="10m",
        at="12m",
        quiet={'deeplink_watch_node_incidents{instance="head",node="n7"}': "1x30 2x720"},
        labels={**HEAD, "node": "n7"},
    ),
    Case(
        "DeepLinkStoreUnhealthy",
        rings={'deeplink_store_healthy{instance="n1"}': "1x6 0x720"},
        before="2m",
        at="4m",
        quiet={'deeplink_store_healthy{instance="n1"}': "1x720"},
        labels=N1,
    ),
    Case(
        "DeepLinkCacheThrashing",
        rings={
            'deeplink_store_evicted_shards_total{instance="n1",reason="budget"}': "0+1x720",
            'deeplink_store_shards{instance="n1"}': "40x720",
        },
        before="10m",
        at="40m",
        quiet={
            'deeplink_store_evicted_shards_total{instance="n1",reason="unused"}': "0+1x720",
            'deeplink_store_shards{instance="n1"}': "40x720",
        },
        labels=N1,
    ),
    Case(
        "DeepLinkSourceOverload",
        rings={
            'deeplink_source_wait_seconds_total{instance="n1"}': "0+9x720",
            'deeplink_source_wait_seconds_total{instance="n2"}': "0+8x720",
        },
        before="14m",
        at="25m",
        # One node alone waits.
        quiet={
            'deeplink_source_wait_seconds_total{instance="n1"}': "0+9x720",
            'deeplink_source_wait_seconds_total{instance="n2"}': "0x720",
        },
    ),
    Case(
        "DeepLinkStoreWear",
        rings={
            'deeplink_store_filled_bytes_total{instance="n1",origin="source"}': "0+100x720",
            'deeplink_store_budget_bytes{instance="n1"}': "5000x720",
        },
        before="50m",
        at="120m",
        quiet={
            'deeplink_store_filled_bytes_total{instance="n1",origin="source"}': "0+100x720",
            'deeplink_store_budget_bytes{instance="n1"}': "50000x720",
        },
        labels=N1,
    ),
    Case(
        "DeepLinkCopiesLost",
        rings={'deeplink_cache_damaged_shards_total{instance="n1"}': "0x60 1x720"},
        before="9m",
        at="12m",
        quiet={
            'deeplink_cache_damaged_shards_total{instance="n1"}': "1x720",
            'deeplink_store_filled_shards_total{instance="n1",outcome="fetched"}': "0+1x720",
            'deeplink_store_wiped{instance="n1"}': "0x720",
        },
        labels=N1,
    ),
)


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def exported() -> set[str]:
    """Names of all series that daemons export."""
    rows = [*AGENT.rows, *CONSOLE.rows, *WatchMetrics(CollectorRegistry()).rows]
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {f"{row.name}{part}" for row in rows for part in parts.get(row.kind, ("",))}


def test_rules_are_of_metrics_that_there_are() -> None:
    used = {name for rule in ALERTS.values() for name in re.findall(r"deeplink_\w+", rule["expr"])}
    assert len(used) > 20
    assert used <= exported()


def test_every_alert_has_a_case_and_a_section_of_the_runbook() -> None:
    assert [case.alert for case in CASES] == list(ALERTS)
    sections = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == list(ALERTS)
    assert [rule["annotations"]["runbook"] for rule in ALERTS.values()] == [
        f"docs/alerts.md#{name.lower()}" for name in ALERTS
    ]


@pytest.mark.slow
def test_promtool_finds_the_rules_sound() -> None:
    assert f"{len(CASES)} rules found" in promtool("check", "rules", RULES)


def example(case: Case, series: dict[str, str], at: dict[str, bool], name: str) -> dict[str, Any]:
    severity = ALERTS[case.alert]["labels"]["severity"]
    rung = [{"exp_labels": {"severity": severity, **case.labels}}]
    return {
        "name": f"{case.alert}: {name}",
        "interval": "10s",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "alert_rule_test": [
            {"alertname": case.alert, "eval_time": when, "exp_alerts": rung if rings else []}
            for when, rings in at.items()
        ],
    }


@pytest.mark.slow
def test_each_rule_rings_when_it_should_and_not_else(tmp_path: Path) -> None:
    # What the alerts say is for people; the test is about when.
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    tests = [example(case, case.rings, {case.before: False, case.at: True}, "rings") for case in CASES]
    tests += [example(case, case.quiet, {case.at: False, "110m": False}, "is quiet") for case in CASES]
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": tests}))
    promtool("test", "rules", path)
