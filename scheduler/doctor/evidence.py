"""Everything the rules judge, as one value; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from deeplink.scheduler.slurm.nodeset import NodeSetError, fold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from deeplink.config import Config
    from deeplink.scheduler.doctor.report import NodeReport
    from deeplink.scheduler.slurm.parse import NodeRow, SwitchRow
    from deeplink.scheduler.slurm.partitions import PartitionRow
    from deeplink.scheduler.slurm.settings import SlurmSettings
    from deeplink.types import NodeName

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEvidence:
    """What was gathered. What could not be had is None, or not there, and `problems` says why.

    Attributes:
        config: of this process.
        asked: this host's clock before and after slurmctld was asked for its settings, Unix time.
        problems: by what was to be had (settings, nodes, partitions, topology, suspended jobs, hosts), why there
            is none.
        reports: by node.
        silent: nodes of the step that said nothing.
        suspended: nodes on which suspended jobs lie.
        watch_answer: what is wrong with the watchdog's answer to this host's token or MUNGE credential;
            empty where nothing is, None where it was not asked.
    """

    config: Config
    settings: SlurmSettings | None = None
    nodes: tuple[NodeRow, ...] | None = None
    partitions: tuple[PartitionRow, ...] | None = None
    switches: tuple[SwitchRow, ...] | None = None
    suspended: tuple[NodeName, ...] | None = None
    asked: tuple[float, float] = (0.0, 0.0)
    problems: Mapping[str, str] = field(default_factory=dict)
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    watch_answer: str | None = None

    def why_not(self, what: str) -> str:
        """Return why there is no such evidence."""
        if what == "hosts":
            return self.problems.get(what, "no node was looked at")
        return f"Slurm did not tell its {what} (see slurm-answers)"


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


def alike(reports: Mapping[str, NodeReport], of: Callable[[NodeReport], Value]) -> dict[Value, str]:
    """Return the nodes by what `of` tells of them, those of the commonest answer first."""
    found: dict[Value, list[str]] = {}
    for node, report in reports.items():
        found.setdefault(of(report), []).append(node)
    return {value: together(nodes) for value, nodes in sorted(found.items(), key=lambda item: -len(item[1]))}
