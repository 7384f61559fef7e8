"""Whose an adapter of an InfiniBand fabric is, and what for, from the description it gives itself; pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from deeplink.scheduler.topology.network import Role
from deeplink.scheduler.topology.sources.gathering import is_name

if TYPE_CHECKING:
    from collections.abc import Iterable

_ADAPTER = re.compile(r"(?:HCA-|mlx\d+_|ib|hfi\d+_|irdma|bnxt_re)\w*", re.ASCII)
UNSET = re.compile(r"MT\d+\b|.*Mellanox Technologies|Quantum\b|\(none\)|Node GUID", re.ASCII)
"""A description that firmware or a driver gives where no host has set one."""
_ALONE = re.compile(r"(?:HCA-|mlx\d+_|hfi\d+_)\d+", re.ASCII)  # an adapter without its host
# Set by an installer, not by a site.
_ANYBODY = {"localhost", "ubuntu", "debian", "centos", "rocky", "host", "node"}
_STORAGE = {
    "storage", "stor", "oss", "mds", "mgs", "ost", "nsd", "gpfs", "lustre", "beegfs", "bee", "weka", "vast",
    "ceph", "nfs", "daos", "ddn",
}  # fmt: skip
_MANAGEMENT = {"ufm", "cufm", "mgmt", "opensm"}


@dataclass(frozen=True, slots=True)
class AdapterHost:
    """An adapter: whose, which, and what for."""

    name: str
    label: str
    role: Role


def host_of(said: str, storage: tuple[str, ...]) -> AdapterHost:
    """Tell whose an adapter is from its description.

    >>> host_of("gpu-01 mlx5_5", ())
    AdapterHost(name='gpu-01', label='mlx5_5', role=<Role.COMPUTE: 'compute'>)
    >>> host_of("oss3 HCA-1", ()).role.value, host_of("MT4129 ConnectX7   Mellanox Technologies", ()).role.value
    ('storage', 'unnamed')
    """
    if "aggregation node" in said.casefold():
        return AdapterHost(said, "", Role.AGGREGATION)
    words = said.split()
    name, label = (words[0], "-".join(words[1:])) if words else ("", "")
    if any(fnmatchcase(said, pattern) for pattern in storage):
        return AdapterHost(name, label, Role.STORAGE)
    known = not label or _ADAPTER.fullmatch(label) or "stor" in label.casefold()
    plain = is_name(name) and not _ALONE.fullmatch(name) and not words[2:] and known  # a host and its adapter
    if not plain or UNSET.match(said) or name.partition(".")[0].casefold() in _ANYBODY:
        return AdapterHost(said or "(no description)", "", Role.UNNAMED)
    tokens = set(re.findall(r"[a-z]+", name.casefold()))
    if tokens & _MANAGEMENT:
        return AdapterHost(name, label, Role.MANAGEMENT)
    if tokens & _STORAGE or "stor" in label.casefold():
        return AdapterHost(name, label, Role.STORAGE)
    return AdapterHost(name, label, Role.COMPUTE)


def family(name: str) -> str:
    """Return what the names of like hosts have in common.

    >>> family("a08-p1-dgx-04-c17"), family("gpu7")
    ('a#-p#-dgx-#-c#', 'gpu#')
    """
    return re.sub(r"[0-9]+", "#", name)


def most_common(rates: Iterable[float]) -> float:
    """Return the most common of some rates; of equally common ones the highest.

    >>> most_common([400.0, 200.0, 400.0]), most_common([100.0, 20.0])
    (400.0, 100.0)
    """
    counts = Counter(rates)
    return max(counts, key=lambda gbps: (counts[gbps], gbps))
