"""Evidence for tests: a healthy site of two nodes, and what is wrong with it put in place of something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deeplink.core.config import Config
from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.node.disk import Disk
from deeplink.scheduler.sitecheck.doctor_checks import check_named
from deeplink.scheduler.sitecheck.site_evidence import (
    FolderReport,
    HostFacts,
    Measured,
    NodeReport,
    Offset,
    SiteEvidence,
)
from deeplink.scheduler.slurm.parse import parse_nodes, parse_partitions, parse_topology
from deeplink.scheduler.slurm.settings import SlurmSettings, parse_settings

DATA = Path(__file__).parents[2] / "data" / "slurm"
RECORDED = DATA / "22.05.8"
CONFIG = Config(
    store=Path("/local/ssd/dl"), state=Path("/home/u/state"), catalog=Path("/shared/catalog"), watch="head:7412"
)
PORTS = {"agent": (40001, 40002), "rank": (20000, 24000)}
VERSIONS = {"deeplink": "0.1.0", "code": "abc", "python": "3.11.7", "slurm": "22.05.8", "torch": "2.13.0"}


def settings(folder: str = "5-leaked-gpus", **changed: str | None) -> SlurmSettings:
    """Return a real slurmctld's settings, some of them changed, or left out (None)."""
    told = parse_settings((RECORDED / folder / "scontrol-show-config.txt").read_text())
    values = dict(told.values)
    for name, value in changed.items():
        values.pop(name.casefold(), None)
        if value is not None:
            values[name.casefold()] = value
    return replace(told, values=values)


def folder(path: str, kind: str = "ext4", **changed: Any) -> FolderReport:
    return replace(
        FolderReport(
            path=path,
            base=path,
            kind=kind,
            readable=True,
            writable=True,
            mode=0o700,
            free=100 << 30,
            identity="1-2",
            marked=True,
        ),
        **changed,
    )


def host(node: str, **changed: Any) -> HostFacts:
    return replace(
        HostFacts(
            node=node,
            address=f"10.0.0.{1 + int(node[1:])}",
            versions=VERSIONS,
            settings={"catalog": "/shared/catalog"},
            folders={
                "store": folder("/local/ssd/dl"),
                "state": folder("/home/u/state", "nfs4"),
                "catalog": folder("/shared/catalog", "lustre"),
            },
            limits={"nofile": (1024, 65536), "memlock": (-1, -1)},
            user_namespaces=1000,
            shared_memory=8 << 30,
            ephemeral=(32768, 60999),
            listening=PORTS,
        ),
        **changed,
    )


def measured(*peers: str, **changed: Any) -> Measured:
    return replace(
        Measured(
            markers={"store": (), "state": peers, "catalog": peers},
            reached={peer: {str(port): "" for ports in PORTS.values() for port in ports} for peer in peers},
            services={"head:7412": ""},
            disk=Disk(written=256 << 20, write_s=0.5, read_s=0.2, cold=True, random_reads=1000, random_s=0.1),
        ),
        **changed,
    )


def site(**changed: Any) -> SiteEvidence:
    """Return the evidence of a healthy site."""
    reports = {
        "n0": NodeReport(host=host("n0"), measured=measured("n1"), offset=Offset(0.001, 0.001)),
        "n1": NodeReport(host=host("n1"), measured=measured("n0"), offset=Offset(-0.001, 0.001)),
    }
    told = settings()
    assert told.as_of is not None
    now = told.as_of.timestamp() + 0.5
    return replace(
        SiteEvidence(
            config=CONFIG,
            settings=told,
            nodes=tuple(parse_nodes((RECORDED / "1-busy" / "scontrol-show-node-o.txt").read_text())),
            partitions=tuple(
                parse_partitions((RECORDED / "6-unfit" / "scontrol-a-show-partition-o.txt").read_text())[:1]
            ),
            switches=tuple(parse_topology((RECORDED / "1-busy" / "scontrol-show-topology.txt").read_text())),
            suspended=(),
            asked=(now, now + 0.1),
            reports=reports,
        ),
        **changed,
    )


def other(evidence: SiteEvidence, node: str, **changed: Any) -> SiteEvidence:
    """Return the evidence with another report of one node: `host`, `measured` and `offset` in place of its own."""
    return replace(evidence, reports={**evidence.reports, node: replace(evidence.reports[node], **changed)})


def found(check: str, evidence: SiteEvidence) -> list[Finding]:
    return check_named(check).judge(evidence)


def worst(check: str, evidence: SiteEvidence) -> Finding:
    """Return the first of what a check finds; each thing to be changed comes with its remedy."""
    findings = found(check, evidence)
    assert findings
    for finding in findings:
        assert finding.text
        assert finding.remedy or finding.severity not in {Severity.ERROR, Severity.WARNING}
    return findings[0]
