"""Rules over what nodes told: of themselves, of their folders, and of each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deeplink.core.finding import Severity
from deeplink.scheduler.node.disk import Disk
from deeplink.scheduler.sitecheck.doctor_checks import CHECKS, CheckGroup
from deeplink.scheduler.sitecheck.site_evidence import Offset
from tests.scheduler.sitecheck.sites import (
    CONFIG,
    VERSIONS,
    folder,
    found,
    host,
    measured,
    other,
    settings,
    site,
    worst,
)

OF_NODES = [check for check in CHECKS if check.group in {CheckGroup.NODES, CheckGroup.FOLDERS, CheckGroup.NETWORK}]


@pytest.mark.parametrize("check", OF_NODES, ids=lambda check: check.name)
def test_a_healthy_site_is_healthy(check: Any) -> None:
    evidence = site(config=replace(CONFIG, watch_token_file=CONFIG.state / "token"), watch_answer="")
    assert {finding.severity for finding in found(check.name, evidence)} == {Severity.OK}


@pytest.mark.parametrize("check", OF_NODES, ids=lambda check: check.name)
def test_what_no_node_told_is_unknown_and_says_why(check: Any) -> None:
    told = settings(Epilog="/etc/slurm/epilog")
    evidence = site(reports={}, problems={"hosts": "it was not asked for"}, settings=told)
    finding = worst(check.name, evidence)
    if check.name != "members":  # none is configured
        assert finding.severity is Severity.UNKNOWN or check.name == "watchdog"
        assert any("it was not asked for" in one.text for one in found(check.name, evidence))


def with_host(**changed: Any) -> Any:
    return other(site(), "n1", host=host("n1", **changed))


@pytest.mark.parametrize(
    ("check", "changed", "severity"),
    [
        ("versions-alike", {"versions": {**VERSIONS, "deeplink": "0.2.0"}}, "error"),
        ("versions-alike", {"versions": {**VERSIONS, "code": "def"}}, "error"),
        ("versions-alike", {"versions": {**VERSIONS, "driver": "570.1"}}, "warning"),
        ("configuration-alike", {"settings": {"catalog": "/elsewhere"}}, "error"),
        ("token-files", {"tokens": {"token_file": "mode 0644 lets others in"}}, "error"),
        ("open-files", {"limits": {"nofile": (256, 1024)}}, "warning"),
        ("locked-memory", {"infiniband": True, "limits": {"memlock": (65536, 65536)}}, "error"),
        ("locked-memory", {"infiniband": True}, "ok"),
        ("shared-memory", {"shared_memory": 64 << 20}, "warning"),
        ("user-namespaces", {"user_namespaces": 0}, "note"),
        ("user-namespaces", {"user_namespaces": None}, "ok"),
        ("ephemeral-ports", {"ephemeral": (1024, 65535)}, "warning"),
        ("nodes-answer", {"problem": "/etc/deeplink/config.toml: stoer: unknown key"}, "error"),
        ("rank-ports", {"listening": {"agent": (1, 2), "rank": ()}}, "warning"),
    ],
)
def test_a_node_that_differs_is_named(check: str, changed: dict[str, Any], severity: str) -> None:
    finding = worst(check, with_host(**changed))
    assert finding.severity.word == severity
    assert severity == "ok" or "n1" in finding.where + finding.text


@pytest.mark.parametrize(
    ("check", "key", "changed", "severity"),
    [
        ("store-usable", "store", {"writable": False}, "error"),
        ("store-usable", "store", {"problem": "Stale file handle"}, "error"),
        ("store-usable", "store", {"free": 1 << 30}, "warning"),
        ("store-usable", "store", {"mode": 0o777}, "warning"),
        ("store-usable", "store", {"mode": 0o1777}, "ok"),
        ("store-on-disk", "store", {"kind": "nfs4"}, "error"),
        ("store-on-disk", "store", {"kind": "tmpfs"}, "warning"),
        ("store-on-disk", "store", {"kind": "overlay"}, "warning"),
        ("store-on-disk", "store", {"kind": ""}, "unknown"),
        ("store-private", "store", {"marked": False}, "unknown"),
        ("catalog-shared", "catalog", {"problem": "Permission denied"}, "error"),
        ("catalog-shared", "catalog", {"readable": False}, "error"),
        ("state-shared", "state", {"writable": False}, "error"),
    ],
)
def test_a_folder_that_is_not_as_it_should_be(
    check: str, key: str, changed: dict[str, Any], severity: str
) -> None:
    one = host("n1")
    folders = {**one.folders, key: replace(one.folders[key], **changed)}
    finding = worst(check, other(site(), "n1", host=replace(one, folders=folders)))
    assert finding.severity.word == severity
    assert severity == "ok" or "n1" in finding.where


def test_a_store_that_two_nodes_share_is_an_error() -> None:
    finding = worst("store-private", other(site(), "n1", measured=measured("n0", markers={"store": ("n0",)})))
    assert (finding.severity, finding.where) == (Severity.ERROR, "n[0-1]")


@pytest.mark.parametrize(("check", "severity"), [("catalog-shared", "error"), ("state-shared", "warning")])
def test_a_folder_that_is_each_nodes_own_and_should_not_be(check: str, severity: str) -> None:
    finding = worst(check, other(site(), "n1", measured=measured("n0", markers={})))
    assert (finding.severity.word, finding.where) == (severity, "n1")


def test_a_catalog_that_the_user_may_not_write_is_told_by_its_inode() -> None:
    def closed(node: str, identity: str) -> Any:
        one = host(node)
        catalog = folder("/shared/catalog", marked=False, writable=False, identity=identity)
        return replace(one, folders={**one.folders, "catalog": catalog})

    same = other(other(site(), "n0", host=closed("n0", "7-9")), "n1", host=closed("n1", "7-9"))
    assert worst("catalog-shared", same).severity is Severity.OK
    differs = other(same, "n1", host=closed("n1", "8-9"))
    assert (worst("catalog-shared", differs).severity, worst("catalog-shared", differs).where) == (
        Severity.ERROR,
        "n1",
    )


@pytest.mark.parametrize(
    ("disk", "severity"),
    [
        (Disk(written=256 << 20, write_s=9.0, read_s=0.3, cold=True, random_reads=9, random_s=0.001), "warning"),
        (Disk(written=256 << 20, write_s=0.3, read_s=0.3, cold=True, random_reads=50, random_s=0.5), "warning"),
        (Disk(written=256 << 20, write_s=0.3, read_s=0.3, cold=False, random_reads=50, random_s=0.5), "note"),
        (Disk(problem="No space left on device"), "unknown"),
    ],
)
def test_how_fast_a_disk_is(disk: Disk, severity: str) -> None:
    finding = worst("store-speed", other(site(), "n1", measured=measured("n0", disk=disk)))
    assert (finding.severity.word, finding.where) == (severity, "n1")


def test_a_blocked_port_is_told_with_both_ends() -> None:
    blocked = measured("n0", reached={"n0": {"40001": "", "40002": "", "20000": "No route to host", "24000": ""}})
    evidence = other(site(), "n1", measured=blocked)
    finding = worst("rank-ports", evidence)
    assert finding.severity is Severity.ERROR
    assert finding.text == "n1 to n0: port 20000: No route to host"
    assert worst("agent-ports", evidence).severity is Severity.OK


@pytest.mark.parametrize(
    ("offset", "severity"),
    [(Offset(3.0, 0.1), "warning"), (Offset(-90.0, 1.0), "error"), (Offset(90.0, 100.0), "ok")],
)
def test_clocks_count_as_apart_by_what_is_sure(offset: Offset, severity: str) -> None:
    assert worst("clocks", other(site(), "n1", offset=offset)).severity.word == severity


def test_the_watchdog_is_looked_at_from_the_nodes() -> None:
    away = other(site(), "n1", measured=measured("n0", services={"head:7412": "Connection refused"}))
    said = [(one.severity.word, one.where) for one in found("watchdog", away) if "Connection refused" in one.text]
    assert said == [("error", "n1")]
    loopback = site(config=replace(CONFIG, watch="127.0.0.1:7412"))
    assert worst("watchdog", loopback).severity is Severity.ERROR
    refused = site(config=replace(CONFIG, watch_token_file=CONFIG.state), watch_answer="it refuses our token")
    assert "refuses our token" in worst("watchdog", refused).text


def test_members_that_are_named_wrongly_or_away() -> None:
    assert worst("members", site(config=replace(CONFIG, members="n0"))).severity is Severity.ERROR
    evidence = site(config=replace(CONFIG, members="n0=n0:7411"))
    down = other(evidence, "n1", measured=measured("n0", services={"n0:7411": "Connection refused"}))
    assert worst("members", down).text == "member n0 at n0:7411: Connection refused"


def test_an_epilog_that_wipes_the_store_is_an_error_and_another_a_note() -> None:
    told = settings(Epilog="/etc/slurm/epilog")
    lines = ("/etc/slurm/epilog:3: rm -rf /local/ssd/*", "/etc/slurm/epilog:4: pkill -u $SLURM_JOB_USER")
    evidence = other(site(settings=told), "n1", measured=measured("n0", scripts=lines))
    assert [(one.severity.word, one.where) for one in found("site-scripts", evidence)] == [
        ("error", "n1"),
        ("note", "n1"),
    ]
    unread = other(site(settings=told), "n1", measured=measured("n0", unread=("/etc/slurm/epilog",)))
    assert worst("site-scripts", unread).severity is Severity.UNKNOWN
    assert worst("site-scripts", site(settings=told)).severity is Severity.OK


def test_nodes_that_said_nothing_are_errors_and_the_others_count() -> None:
    evidence = site(silent=("n2",), problems={"hosts": "1 of 3 nodes said nothing: srun: error: n2: exit 127"})
    first, last = found("nodes-answer", evidence)
    assert (first.severity, first.where) == (Severity.ERROR, "n2")
    assert last.text == "2 hosts answered"
