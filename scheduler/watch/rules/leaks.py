"""Which GPUs does Slurm count as used though no job has them? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.verdict import Remedy, Verdict
from deeplink.text import counted, listed

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import Snapshot, WatchPolicy


def leaked_gpus(sight: Snapshot, policy: WatchPolicy) -> list[Verdict]:
    """Return that GPUs have leaked, with the cure for an operator to decide on; it is never done from here."""
    nodes = [node for node in sight.nodes.values() if node.leaked_gpus and node.leaked_s >= policy.leak_s]
    if not nodes:
        return []
    names = sorted(node.name for node in nodes)
    gpus = counted(sum(node.leaked_gpus for node in nodes), "GPU")
    return [
        Verdict(
            kind=IncidentKind.GRES_LEAKED,
            remedy=Remedy.NOTHING,
            reasons=(
                f"{gpus} counted as used on idle nodes ({listed(names)})",
                "`scontrol reconfigure` frees them",
            ),
            since_s=max(node.leaked_s for node in nodes),
        )
    ]
