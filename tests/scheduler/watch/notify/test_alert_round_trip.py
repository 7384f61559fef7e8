"""Through the real Prometheus and Alertmanager: an incident rings and is heard; it heals, and that is heard."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deeplink.core.clock import SystemClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.metrics_server import serve_metrics
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.notify.notifier import notifying
from tests.deeplink.core.test_alerts import RULES
from tests.processes import free_ports
from tests.scheduler.watch.notify.servers import Heard, web
from tests.scheduler.watch.notify.things import dead
from tests.waiting import LIMIT_S, until

ALERT, TOKEN = "DeepLinkRanksHung", "to-be-shown"


def at_once(rules: Path) -> dict[str, Any]:
    """The site's own rules, without their patience: how long each waits is another test's."""
    known: dict[str, Any] = yaml.safe_load(rules.read_text())
    for group in known["groups"]:
        for rule in group["rules"]:
            rule["for"] = "0s"
    return known


@contextlib.contextmanager
def daemon(folder: Path, *argv: str) -> Iterator[Path]:
    """Run a daemon of the distribution's until the end of the block; give the file of its log."""
    log = folder / f"{argv[0]}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LIMIT_S / 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT_S / 10)


@pytest.mark.slow  # needs both daemons, which only the whole test run installs
def test_an_incident_rings_is_heard_heals_and_that_is_heard(tmp_path: Path) -> None:
    metrics_port, prometheus, alertmanager = free_ports(3)
    heard, metrics, clock = Heard(), WatchMetrics(CollectorRegistry()), SystemClock()
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(at_once(RULES)))
    (tmp_path / "token").write_text(TOKEN)
    scrape = {
        "job_name": "deeplink-watch",
        "authorization": {"credentials_file": "token"},
        "static_configs": [{"targets": [f"127.0.0.1:{metrics_port}"], "labels": {"instance": "head"}}],
    }
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [scrape],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    unix = clock.unix()
    hung = replace(
        dead(17), kind=IncidentKind.RANKS_HUNG, id="17.0.0-ranks-hung-3", began_unix=unix, detected_unix=unix
    )

    def states() -> list[str]:
        return [
            alert["status"]
            for told in heard.documents
            for alert in told["alerts"]
            if alert["labels"]["alertname"] == ALERT
        ]

    with contextlib.ExitStack() as stack:
        stack.enter_context(web(heard))
        route = {"receiver": "hook", "group_wait": "0s", "group_interval": "250ms", "repeat_interval": "1h"}
        receiver = {"name": "hook", "webhook_configs": [{"url": heard.url, "send_resolved": True}]}
        told = {"route": route, "receivers": [receiver]}
        (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(told))
        journal = stack.enter_context(Journal(tmp_path / "watch.sqlite"))
        stack.enter_context(notifying((), journal, clock, metrics, "head"))
        metrics.loop_time.set(unix)
        stack.callback(serve_metrics(f"127.0.0.1:{metrics_port}", metrics.registry, TOKEN))
        listen = f"--web.listen-address=127.0.0.1:{alertmanager}"
        stack.enter_context(
            daemon(
                tmp_path,
                "prometheus-alertmanager",
                "--config.file=alertmanager.yml",
                "--storage.path=alerts",
                "--cluster.listen-address=",
                listen,
            )
        )
        log = stack.enter_context(
            daemon(
                tmp_path,
                "prometheus",
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=series",
                "--rules.alert.resend-delay=250ms",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            )
        )
        journal.record_incident(hung)
        until(lambda: "firing" in states(), told=lambda: (heard.documents, log.read_text()[-4000:]))
        (labels,) = {
            tuple(sorted(alert["labels"].items()))
            for told in heard.documents
            for alert in told["alerts"]
            if alert["labels"]["alertname"] == ALERT
        }
        wanted = {"severity": "critical", "instance": "head", "kind": "ranks-hung"}
        assert wanted.items() <= dict(labels).items()
        assert "resolved" not in states()
        journal.record_incident(
            replace(hung, outcome=IncidentOutcome.RECOVERED, recovered_unix=clock.unix(), action="relaunch")
        )
        until(lambda: "resolved" in states(), told=lambda: (heard.documents, log.read_text()[-4000:]))
