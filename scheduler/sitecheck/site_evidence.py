"""Everything the doctor's rules judge, as one value, and what they answer; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.slurm.nodeset import NodeSetError, fold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.scheduler.sitecheck.report import HostFacts, Measured, NodeReport
    from deeplink.scheduler.slurm.parse import NodeRow, PartitionRow, SwitchRow
    from deeplink.scheduler.slurm.settings import SlurmSettings

Value = TypeVar("Value")
_WITHOUT_NODES = {
    "hosts": "no node was looked at",
    "measured": "it takes a step on the nodes to tell: `deeplink doctor --nodes 2`",
    "pairs": "it takes two nodes to tell: `deeplink doctor --nodes 2`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEvidence:
    """What was gathered. What could not be had is None, or not there, and `problems` says why."""

    config: Config
    settings: SlurmSettings | None = None
    nodes: tuple[NodeRow, ...] | None = None
    partitions: tuple[PartitionRow, ...] | None = None
    switches: tuple[SwitchRow, ...] | None = None
    suspended: tuple[NodeName, ...] | None = None  # nodes on which suspended jobs lie
    # this host's clock before and after slurmctld was asked for its settings, Unix time
    asked: tuple[float, float] = (0.0, 0.0)
    # by what was asked for (settings, nodes, partitions, topology, suspended jobs, hosts), why there is none
    problems: Mapping[str, str] = field(default_factory=dict)
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    silent: tuple[str, ...] = ()  # nodes of the step that said nothing
    # what is wrong with the watchdog's answer to this host's token or MUNGE credential; empty where nothing is,
    # None where it was not asked
    watch_answer: str | None = None

    @property
    def hosts(self) -> dict[str, HostFacts]:
        """What nodes tell of themselves, of those that could tell everything."""
        return {node: report.host for node, report in self.reports.items() if not report.host.problem}

    @property
    def measured(self) -> dict[str, Measured]:
        """What nodes measured."""
        return {node: found for node in self.hosts if (found := self.reports[node].measured) is not None}

    @property
    def pairs(self) -> dict[str, Measured]:
        """What nodes measured against each other; empty where there are not two."""
        measured = self.measured
        return measured if len(measured) > 1 else {}

    def why_not(self, what: str) -> str:
        """Return why there is no such evidence: the name of an attribute."""
        if what in _WITHOUT_NODES:
            return self.problems.get("hosts") or _WITHOUT_NODES[what]
        return f"Slurm did not tell its {'topology' if what == 'switches' else what} (see slurm-answers)"


def together(nodes: Iterable[str]) -> str:
    """Return node names as one short text.

    >>> together(["n1", "n0", "my host"])
    'my host,n0,n1'
    """
    names = sorted(nodes)
    try:
        return fold(names)
    except NodeSetError:  # a host name need be no node's
        return ",".join(names)


def alike(by_node: Mapping[str, Value]) -> dict[Value, str]:
    """Return the nodes by what each of them tells, those of the commonest answer first."""
    found: dict[Value, list[str]] = {}
    for node, value in by_node.items():
        found.setdefault(value, []).append(node)
    return {value: together(nodes) for value, nodes in sorted(found.items(), key=lambda item: -len(item[1]))}


def _finding(severity: Severity, said: str, remedy: str = "", where: str = "") -> Finding:
    return Finding(severity, said, remedy=remedy, where=where)


note = partial(_finding, Severity.NOTE)
warning = partial(_finding, Severity.WARNING)
error = partial(_finding, Severity.ERROR)


def ok(said: str, where: str = "") -> Finding:
    """Return that all is well."""
    return Finding(Severity.OK, said, where=where)


def unknown(said: str, where: str = "") -> Finding:
    """Return what could not be looked at, and why."""
    return Finding(Severity.UNKNOWN, said, where=where)


class _UntoldError(LookupError):
    """This Slurm does not tell a setting that a rule needs."""


@dataclass(frozen=True, slots=True)
class SettingsView:
    """Slurm's settings and ours; a setting that is not told ends the rule."""

    told: SlurmSettings
    config: Config

    def text(self, name: str) -> str:
        """Return a setting that this Slurm knows; empty where it is not set."""
        if (value := self.told.text(name)) is None:
            raise _UntoldError(name)
        return value

    def number(self, name: str) -> int:
        """Return the number of a setting."""
        if (value := self.told.number(name)) is None:
            raise _UntoldError(name)
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """Return the items of a list."""
        self.text(name)
        return self.told.words(name)

    def item(self, name: str, key: str) -> str | None:
        """Return the value of `key=value` in a list; None where it is not there."""
        self.text(name)
        return self.told.item(name, key)


def judged(rule: Callable[[SettingsView], Finding], told: SlurmSettings, config: Config) -> Finding:
    """Return what a rule finds; UNKNOWN where this Slurm does not tell what it needs."""
    try:
        return rule(SettingsView(told, config))
    except _UntoldError as untold:
        return unknown(f"this Slurm does not tell {untold}, or in a form that is not known here")
