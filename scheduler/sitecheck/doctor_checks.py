"""Every check there is, by name and group; pure."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.sitecheck import cluster_rules, host_rules, recovery_settings, running_settings
from deeplink.scheduler.sitecheck.site_evidence import judged, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deeplink.scheduler.sitecheck.site_evidence import SettingsView, SiteEvidence
    from deeplink.scheduler.slurm.settings import SlurmSettings

_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.UNKNOWN, Severity.NOTE, Severity.OK)


class CheckGroup(StrEnum):
    """Checks that belong together on the page."""

    SLURM = "Slurm"
    RECOVERY = "Slurm's settings: recovery"
    RUNNING = "Slurm's settings: running"
    NODES = "Nodes"
    FOLDERS = "Folders"
    NETWORK = "Network"


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check: a rule over the evidence, and what else it takes of it."""

    name: str  # for `--explain`, and the heading in docs/doctor.md
    group: CheckGroup
    about: str  # what it tells and why that matters, in paragraphs
    rule: Callable[..., Iterable[Finding]]
    needs: tuple[str, ...]  # attributes of the evidence: without one of them nothing can be said

    def judge(self, evidence: SiteEvidence) -> list[Finding]:
        """Return what it finds, worst first."""
        values = [getattr(evidence, need) for need in self.needs]
        missing = [need for need, value in zip(self.needs, values, strict=True) if value is None or value == {}]
        found = [unknown(evidence.why_not(missing[0]))] if missing else self.rule(evidence, *values)
        named = [replace(finding, check=self.name) for finding in found]
        return sorted(named, key=lambda finding: _WORST_FIRST.index(finding.severity))


def judge(evidence: SiteEvidence) -> list[Finding]:
    """Return what all checks find, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check.judge(evidence)]


def check_named(name: str) -> DoctorCheck:
    """Return one check."""
    for check in CHECKS:
        if check.name == name:
            return check
    problem = DeepLinkError(
        f"there is no check {name!r}", remedy=f"There are {', '.join(check.name for check in CHECKS)}."
    )
    problem.exit_code = 2
    raise problem


def _check(group: CheckGroup, rule: Callable[..., Iterable[Finding]], *needs: str) -> DoctorCheck:
    return DoctorCheck(rule.__name__.replace("_", "-"), group, inspect.getdoc(rule) or "", rule, needs)


def _plain(group: CheckGroup, rule: Callable[..., Iterable[Finding]], *needs: str) -> DoctorCheck:
    # A rule over what it needs, and nothing else of the evidence.
    return replace(_check(group, rule, *needs), rule=lambda _evidence, *values: rule(*values))


def _setting(group: CheckGroup, rule: Callable[[SettingsView], Finding]) -> DoctorCheck:
    def found(evidence: SiteEvidence, told: SlurmSettings) -> list[Finding]:
        return [judged(rule, told, evidence.config)]

    return replace(_check(group, rule, "settings"), rule=found)  # type: ignore[arg-type]


CHECKS = (
    _check(CheckGroup.SLURM, cluster_rules.slurm_answers),
    _check(CheckGroup.SLURM, cluster_rules.controller_clock, "settings"),
    _check(CheckGroup.SLURM, cluster_rules.leaked_gpus, "nodes"),
    _plain(CheckGroup.SLURM, cluster_rules.node_states, "nodes"),
    _plain(CheckGroup.SLURM, cluster_rules.slurm_versions, "nodes", "settings"),
    _check(CheckGroup.SLURM, cluster_rules.partitions, "partitions"),
    _plain(CheckGroup.SLURM, cluster_rules.topology, "switches", "nodes"),
    *(_setting(CheckGroup.RECOVERY, rule) for rule in recovery_settings.RULES),
    *(_setting(CheckGroup.RUNNING, rule) for rule in running_settings.RULES),
    _check(CheckGroup.NODES, host_rules.nodes_answer),
    _plain(CheckGroup.NODES, host_rules.versions_alike, "hosts"),
    _plain(CheckGroup.NODES, host_rules.configuration_alike, "hosts"),
    _plain(CheckGroup.NODES, host_rules.token_files, "hosts"),
    _plain(CheckGroup.NODES, host_rules.open_files, "hosts"),
    _plain(CheckGroup.NODES, host_rules.locked_memory, "hosts"),
    _plain(CheckGroup.NODES, host_rules.shared_memory, "hosts"),
    _plain(CheckGroup.NODES, host_rules.user_namespaces, "hosts"),
    _check(CheckGroup.NODES, host_rules.site_scripts, "settings"),
    _plain(CheckGroup.FOLDERS, host_rules.store_usable, "hosts"),
    _plain(CheckGroup.FOLDERS, host_rules.store_on_disk, "hosts"),
    _check(CheckGroup.FOLDERS, host_rules.store_private, "pairs"),
    _check(CheckGroup.FOLDERS, host_rules.store_speed),
    _check(CheckGroup.FOLDERS, host_rules.catalog_shared, "pairs"),
    _check(CheckGroup.FOLDERS, host_rules.state_shared, "pairs"),
    _check(CheckGroup.NETWORK, cluster_rules.clocks),
    _check(CheckGroup.NETWORK, cluster_rules.agent_ports, "pairs"),
    _check(CheckGroup.NETWORK, cluster_rules.rank_ports, "pairs"),
    _plain(CheckGroup.NETWORK, host_rules.ephemeral_ports, "hosts"),
    _check(CheckGroup.NETWORK, cluster_rules.watchdog),
    _check(CheckGroup.NETWORK, cluster_rules.members),
)
"""All checks, in the order they are told in."""
