"""Every check there is, by name and group; pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.doctor import (
    cluster_rules,
    folder_rules,
    network_rules,
    node_rules,
    recovery_settings,
    running_settings,
)
from deeplink.scheduler.doctor.finding import DoctorSeverity, unknown

if TYPE_CHECKING:
    from deeplink.config import Config
    from deeplink.scheduler.doctor.evidence import SiteEvidence
    from deeplink.scheduler.doctor.finding import DoctorFinding
    from deeplink.scheduler.slurm.settings import SlurmSettings

Rule = Callable[["SiteEvidence"], Iterator["DoctorFinding"]]


class CheckGroup(StrEnum):
    """What belongs together on the page."""

    SLURM = "Slurm"
    RECOVERY = "Slurm's settings: recovery"
    RUNNING = "Slurm's settings: running"
    NODES = "Nodes"
    FOLDERS = "Folders"
    NETWORK = "Network"


class UnknownCheckError(DeepLinkError):
    """There is no check of that name."""

    exit_code = 2

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no check {name!r}", remedy=f"There are {', '.join(check.name for check in CHECKS)}."
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check: a rule, and what it is called.

    Attributes:
        name: what `--explain` takes, and the heading in docs/doctor.md.
        about: what it tells and why that matters, in paragraphs.
    """

    name: str
    group: CheckGroup
    about: str
    rule: Rule

    def judge(self, evidence: SiteEvidence) -> list[DoctorFinding]:
        """Return what it finds, worst first."""
        found = [replace(finding, check=self.name) for finding in self.rule(evidence)]
        return sorted(found, key=lambda finding: _WORST.index(finding.severity))


_WORST = (
    DoctorSeverity.ERROR,
    DoctorSeverity.WARNING,
    DoctorSeverity.UNKNOWN,
    DoctorSeverity.NOTE,
    DoctorSeverity.OK,
)


def judge(evidence: SiteEvidence) -> list[DoctorFinding]:
    """Return what all checks find, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check.judge(evidence)]


def check_named(name: str) -> DoctorCheck:
    """Return one check.

    Raises:
        UnknownCheckError: there is none of that name.
    """
    for check in CHECKS:
        if check.name == name:
            return check
    raise UnknownCheckError(name)


def _of_settings(
    rule: Callable[[SlurmSettings, Config], DoctorFinding], evidence: SiteEvidence
) -> Iterator[DoctorFinding]:
    if evidence.settings is None:
        yield unknown(evidence.why_not("settings"))
    else:
        yield rule(evidence.settings, evidence.config)


def _check(group: CheckGroup, rule: Rule) -> DoctorCheck:
    return DoctorCheck(rule.__name__.replace("_", "-"), group, inspect.getdoc(rule) or "", rule)


def _setting(group: CheckGroup, rule: Callable[[SlurmSettings, Config], DoctorFinding]) -> DoctorCheck:
    name, about = rule.__name__.replace("_", "-"), inspect.getdoc(rule) or ""
    return DoctorCheck(name, group, about, partial(_of_settings, rule))


_RECOVERY = (
    recovery_settings.kill_on_bad_exit,
    recovery_settings.credential_expiry,
    recovery_settings.preempt_mode,
    recovery_settings.min_job_age,
    recovery_settings.return_to_service,
    recovery_settings.slurmd_timeout,
    recovery_settings.job_requeue,
    recovery_settings.requeue_exit,
    recovery_settings.kill_wait,
    recovery_settings.unkillable_step_timeout,
    recovery_settings.inactive_limit,
    recovery_settings.wait_time,
    recovery_settings.prolog_failure,
)
_RUNNING = (
    running_settings.client_patience,
    running_settings.select_type,
    running_settings.topology_plugin,
    running_settings.switch_wait,
    running_settings.backfill,
    running_settings.private_tmp,
    running_settings.private_data,
    running_settings.process_tracking,
    running_settings.task_binding,
    running_settings.propagated_limits,
    running_settings.srun_ports,
    running_settings.step_limit,
    running_settings.power_saving,
    running_settings.accounting,
    running_settings.changed_submissions,
    running_settings.launch_parameters,
    running_settings.rate_limit,
)
_CLUSTER = (
    cluster_rules.slurm_answers,
    cluster_rules.controller_clock,
    cluster_rules.leaked_gpus,
    cluster_rules.node_states,
    cluster_rules.slurm_versions,
    cluster_rules.partitions,
    cluster_rules.topology,
)
_NODES = (
    node_rules.nodes_answer,
    node_rules.versions_alike,
    node_rules.configuration_alike,
    node_rules.token_files,
    node_rules.open_files,
    node_rules.locked_memory,
    node_rules.shared_memory,
    node_rules.user_namespaces,
    folder_rules.site_scripts,
)
_FOLDERS = (
    folder_rules.store_usable,
    folder_rules.store_on_disk,
    folder_rules.store_private,
    folder_rules.store_speed,
    folder_rules.catalog_shared,
    folder_rules.state_shared,
)
_NETWORK = (
    network_rules.clocks,
    network_rules.agent_ports,
    network_rules.rank_ports,
    node_rules.ephemeral_ports,
    network_rules.watchdog,
    network_rules.members,
)
CHECKS = (
    *(_check(CheckGroup.SLURM, rule) for rule in _CLUSTER),
    *(_setting(CheckGroup.RECOVERY, rule) for rule in _RECOVERY),
    *(_setting(CheckGroup.RUNNING, rule) for rule in _RUNNING),
    *(_check(CheckGroup.NODES, rule) for rule in _NODES),
    *(_check(CheckGroup.FOLDERS, rule) for rule in _FOLDERS),
    *(_check(CheckGroup.NETWORK, rule) for rule in _NETWORK),
)
"""All checks, in the order they are told in."""
