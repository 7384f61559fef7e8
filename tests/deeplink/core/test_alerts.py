"""The rules for Prometheus: promtool finds them sound, and each rings when it should and not before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.metrics import WatchMetrics
from tests.waiting import LIMIT_S

RULES = Path(__file__).parents[3] / "ansible" / "roles" / "watch" / "files" / "deeplink-alerts.yml"

# Time begins at 0 there, so that a gauge with "when" counts up with it, and stands still where it stops.
CASES = """
rule_files: [{rules}]
evaluation_interval: 10s
tests:
  - name: all is well
    interval: 10s
    input_series:
      - {{series: 'deeplink_watch_loop_time_seconds{{instance="head"}}', values: '0+10x360'}}
      - {{series: 'deeplink_watch_journal_time_seconds{{instance="head"}}', values: '0+10x360'}}
      - {{series: 'deeplink_watch_notify_time_seconds{{instance="head",channel="chat"}}', values: '0+10x360'}}
      - {{series: 'deeplink_watch_in_doubt{{instance="head"}}', values: '0x360'}}
      - {{series: 'deeplink_watch_incidents_open{{instance="head"}}', values: '1x60 0x300'}}
    alert_rule_test:
      - {{alertname: DeepLinkWatchdogGone, eval_time: 50m, exp_alerts: []}}
      - {{alertname: DeepLinkWatchdogStalled, eval_time: 50m, exp_alerts: []}}
      - {{alertname: DeepLinkWatchdogJournalStalled, eval_time: 50m, exp_alerts: []}}
      - {{alertname: DeepLinkNotificationsStuck, eval_time: 50m, exp_alerts: []}}
      - {{alertname: DeepLinkWatchdogInDoubt, eval_time: 50m, exp_alerts: []}}
      - {{alertname: DeepLinkIncidentsOpen, eval_time: 50m, exp_alerts: []}}
  - name: its process is gone
    interval: 10s
    input_series:
      - {{series: 'deeplink_watch_loop_time_seconds{{instance="head"}}', values: '0+10x30 stale'}}
    alert_rule_test:
      - {{alertname: DeepLinkWatchdogGone, eval_time: 5m, exp_alerts: []}}
      - alertname: DeepLinkWatchdogGone
        eval_time: 7m
        exp_alerts: [{{exp_labels: {{severity: critical}}}}]
  - name: everything stands still from the first minute on
    interval: 10s
    input_series:
      - {{series: 'deeplink_watch_loop_time_seconds{{instance="head"}}', values: '0+10x6 60x360'}}
      - {{series: 'deeplink_watch_journal_time_seconds{{instance="head"}}', values: '0+10x6 60x360'}}
      - {{series: 'deeplink_watch_notify_time_seconds{{instance="head",channel="chat"}}', values: '0+10x6 60x360'}}
      - {{series: 'deeplink_watch_in_doubt{{instance="head"}}', values: '0x6 1x360'}}
      - {{series: 'deeplink_watch_incidents_open{{instance="head"}}', values: '0x6 1x360'}}
    alert_rule_test:
      - {{alertname: DeepLinkWatchdogStalled, eval_time: 1m40s, exp_alerts: []}}
      - alertname: DeepLinkWatchdogStalled
        eval_time: 2m30s
        exp_alerts: [{{exp_labels: {{severity: critical, instance: head}}}}]
      - {{alertname: DeepLinkWatchdogJournalStalled, eval_time: 2m, exp_alerts: []}}
      - alertname: DeepLinkWatchdogJournalStalled
        eval_time: 3m30s
        exp_alerts: [{{exp_labels: {{severity: critical, instance: head}}}}]
      - {{alertname: DeepLinkNotificationsStuck, eval_time: 5m, exp_alerts: []}}
      - alertname: DeepLinkNotificationsStuck
        eval_time: 8m
        exp_alerts: [{{exp_labels: {{severity: warning, instance: head, channel: chat}}}}]
      - {{alertname: DeepLinkWatchdogInDoubt, eval_time: 5m, exp_alerts: []}}
      - alertname: DeepLinkWatchdogInDoubt
        eval_time: 8m
        exp_alerts: [{{exp_labels: {{severity: warning, instance: head}}}}]
      - {{alertname: DeepLinkIncidentsOpen, eval_time: 20m, exp_alerts: []}}
      - alertname: DeepLinkIncidentsOpen
        eval_time: 35m
        exp_alerts: [{{exp_labels: {{severity: warning, instance: head}}}}]
"""


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_of_metrics_that_there_are() -> None:
    registry = CollectorRegistry()
    WatchMetrics(registry)
    names = {metric.name for metric in registry.collect()}
    used = set(re.findall(r"deeplink_watch_\w+", RULES.read_text()))
    assert used
    assert used <= names


@pytest.mark.slow
def test_promtool_finds_the_rules_sound() -> None:
    assert "6 rules found" in promtool("check", "rules", RULES)


@pytest.mark.slow
def test_each_rule_rings_when_it_should(tmp_path: Path) -> None:
    cases = CASES.format(rules=RULES)
    rules = RULES.read_text()
    # What the alerts say is for people; the test is about when.
    silent = tmp_path / "rules.yml"
    silent.write_text(re.sub(r"(?m)^        annotations:\n(?:          .*\n)+", "", rules))
    path = tmp_path / "cases.yml"
    path.write_text(cases.replace(str(RULES), str(silent)))
    promtool("test", "rules", path)
