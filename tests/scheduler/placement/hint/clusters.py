"""Small clusters for tests of hints."""

from __future__ import annotations

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.cluster_survey import ClusterState, KnownFabric, Ties, parse
from deeplink.scheduler.topology.graph import Fabric


def line(name: str, state: str = "idle", **said: str) -> str:
    """Return a line of sinfo; `said` by the fields' names in lower case."""
    fields = {
        "partition": "main*",
        "available": "up",
        "time": "infinite",
        "oversubscribe": "NO",
        "state": state,
        "features": "(null)",
        "gres": "gpu:4",
        "gresused": "gpu:0",
        "cpus": "0/16/0/16",
        "memory": "64000",
        "allocmem": "0",
        **said,
    }
    return "|".join([name, *fields.values(), ""]) + "\n"


def now(count: int = 8, busy: str = "", **said: str) -> ClusterState:
    """Return nodes n0, n1, ...; those named in `busy` have a job."""
    taken = set(busy.split())
    return parse(
        "".join(
            line(f"n{number}", "allocated" if f"n{number}" in taken else "idle", **said) for number in range(count)
        )
    )


def site(count: int = 8, leaves: int = 2) -> KnownFabric:
    """Return a fabric over whose leaves the nodes are dealt, as Slurm knows it too."""
    fabric = Fabric({NodeName(f"n{number}"): ("s", f"l{number % leaves}") for number in range(count)})
    return KnownFabric(Ties(fabric), fabric)


def nodes(text: str) -> tuple[NodeName, ...]:
    """Return names."""
    return tuple(map(NodeName, text.split()))
