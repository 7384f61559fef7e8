"""What the model knows about a job: its computing, its gradients, its reading."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model.constants import (
    a_share,
    above_zero,
    not_below_zero,
    not_wanted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FORMAT = 1
_WHOLE = ("batch", "ranks_per_node")
_NEEDED = ("batch", "sample_s", "gradient_bytes")
_MEASURED = "step_s"
Path = tuple[str, ...]
"""Switch names from the root of the fabric to a leaf; empty where no one knows."""


class Scaling(Enum):
    """What stays the same when a job runs on more GPUs."""

    WEAK = "weak"
    """The batch of one GPU."""
    STRONG = "strong"
    """The batch of all GPUs together."""


class Algorithm(Enum):
    """How gradients are summed; the bytes are the same, the number of steps is not."""

    RING = "ring"
    """Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (JPDC 2009): steps grow with the ranks."""
    TREE = "tree"
    """Recursive halving and doubling (Thakur, Rabenseifner and Gropp, IJHPCA 2005), or NCCL's two trees: steps
    grow with the logarithm of the nodes."""


class Schedule(Enum):
    """How the levels of the fabric are used."""

    FLAT = "flat"
    """One ring or tree through all ranks, in rank order, as NCCL builds it: all levels work at once, and the
    slowest sets the pace."""
    HIERARCHICAL = "hierarchical"
    """Reduce-scatter inside each node, all-reduce between the nodes, all-gather inside: one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training step of a data-parallel job."""

    batch: int  # samples of a step: of one GPU when scaling is weak, of all when it is strong
    sample_s: float  # seconds of forward and backward pass for a sample, on one GPU that has its node to itself
    gradient_bytes: float  # bytes to be summed over the ranks in a step: parameters times bytes of one gradient
    fixed_s: float = 0.0  # seconds of a step that do not depend on the batch (launches, optimizer)
    scaling: Scaling = Scaling.WEAK  # what `batch` is
    # the share of the computing time in which gradients can travel. The backward pass is about two thirds of it;
    # default 0.5. Fits to the measured steps of Pollux (OSDI 2021) gave 0.1 to 0.6.
    overlap: float = 0.5
    sample_bytes: float = 0.0  # bytes read for a sample
    algorithm: Algorithm = Algorithm.TREE  # how gradients are summed
    schedule: Schedule = Schedule.FLAT  # how the levels are used

    def __post_init__(self) -> None:
        above_zero("the batch", self.batch)
        not_below_zero("the seconds of a sample", self.sample_s)
        not_below_zero("the fixed seconds of a step", self.fixed_s)
        not_below_zero("the bytes of gradients", self.gradient_bytes)
        not_below_zero("the bytes of a sample", self.sample_bytes)
        a_share("overlap", self.overlap)

    @classmethod
    def from_flops(
        cls, *, batch: int, sample_flops: float, gpu_flops: float, gradient_bytes: float, efficiency: float = 0.4
    ) -> Self:
        """Return a job whose computing is told in operations instead of seconds."""
        above_zero("the speed of a GPU", gpu_flops)
        above_zero("the efficiency", efficiency)
        return cls(batch=batch, sample_s=sample_flops / (gpu_flops * efficiency), gradient_bytes=gradient_bytes)

    def local_batch(self, ranks: int) -> float:
        """Return the samples of one GPU in a step, on so many ranks."""
        return self.batch if self.scaling is Scaling.WEAK else self.batch / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One place that samples are read from."""

    name: str  # what it is called in an explanation: `local`, `peer`, `source`
    share: float  # the share of a step's samples that come from there
    bandwidth: float  # bytes a second that one node reads from it; of all nodes together when `shared`
    shared: bool = False  # whether the nodes share one bandwidth, as they do that of a file server

    def __post_init__(self) -> None:
        a_share(f"the share read from {self.name}", self.share)
        above_zero(f"the bandwidth of {self.name}", self.bandwidth)


def check_reads(reads: Sequence[Read]) -> None:
    """Check that the shares of all places come to one, or that there are none."""
    total = sum(read.share for read in reads)
    if reads and abs(total - 1) > 1e-6:  # noqa: PLR2004 (what adding up decimal fractions may lose)
        raise not_wanted("the sum of the shares read", f"{total:g}", "1")


_ENUMS = {"scaling": Scaling, "algorithm": Algorithm, "schedule": Schedule}


def _no_profile(where: str, problem: str) -> DeepLinkError:
    remedy = (
        'It holds {"format": 1, "batch": 32, "sample_s": 0.0044, "gradient_bytes": 102e6}, or more: '
        "docs/cost-model.md."
    )
    return DeepLinkError(f"{where}: no profile of a job: {problem}", remedy=remedy, exit_code=2)


@dataclass(frozen=True, slots=True)
class Profile:
    """What the model must know of a job."""

    job: Job  # its computing, its gradients, its reading
    # ranks on each node; None for one on each GPU, and one where it asks for none
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None:
            above_zero("the number of a node's ranks", self.ranks_per_node)

    def ranks(self, gpus: int) -> int:
        """Return the ranks on each node, where the job asks for so many GPUs on each."""
        return self.ranks_per_node or gpus or 1


def profile_text(profile: Profile) -> str:
    """Return a profile as JSON, on one line."""
    values: dict[str, Any] = asdict(profile.job)
    values |= {name: values[name].value for name in _ENUMS}
    if profile.ranks_per_node is not None:
        values["ranks_per_node"] = profile.ranks_per_node
    return json.dumps({"format": _FORMAT, **values})


def profile_from(text: str, where: str) -> Profile:
    """Read a profile: what `profile_text` wrote, or somebody by hand; all but three values have defaults.

    Instead of `sample_s` there may be `step_s`, a measured step of one rank alone, where nothing is summed; of it
    `fixed_s` does not depend on the batch.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise _no_profile(where, f"not JSON ({problem})") from problem
    if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
        raise _no_profile(where, f"not an object of format {_FORMAT}")
    if _MEASURED in found and "sample_s" not in found:
        found["sample_s"] = _of_one_sample(found, where)
    strange = found.keys() - {field.name for field in fields(Job)} - {"ranks_per_node"}
    lacking = [name for name in _NEEDED if name not in found]
    if strange or lacking:
        raise _no_profile(where, f"lacks or has too much: {', '.join(sorted([*strange, *lacking]))}")
    values = {name: _value(name, value, where) for name, value in found.items()}
    ranks = values.pop("ranks_per_node", None)
    return Profile(Job(**values), ranks)


def _of_one_sample(found: dict[str, Any], where: str) -> float:
    """Return the seconds of a sample, from a measured step; takes that out of what was found."""
    step_s = _value(_MEASURED, found.pop(_MEASURED), where)
    fixed_s = _value("fixed_s", found.get("fixed_s", 0.0), where)
    batch = _value("batch", found.get("batch", 1), where)
    above_zero("the measured step", step_s - fixed_s)
    above_zero("the batch", batch)
    return float((step_s - fixed_s) / batch)


def _value(name: str, value: object, where: str) -> Any:
    if name in _ENUMS:
        words = [one.value for one in _ENUMS[name]]
        if value not in words:
            raise _no_profile(where, f"{name} is {value!r}, but must be {' or '.join(words)}")
        return _ENUMS[name](value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _no_profile(where, f"{name} is {value!r}, no number")
    if name in _WHOLE and not isinstance(value, int):
        raise _no_profile(where, f"{name} is {value!r}, no whole number")
    return value


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What a job has of one node."""

    gpus: int  # GPUs used, each by one rank
    of: int  # GPUs the node has
    path: Path = ()  # the switches above it, root first
    health: float = 1.0  # the share of its ports' bandwidth that is left; 1 for a node in order

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= self.of:
            raise not_wanted("the number of GPUs used of a node", self.gpus, f"from 1 to its {self.of}")
        _check_health("a node's ports", self.health)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a job run."""

    # the nodes in rank order: ranks of one node are neighbours, the last node's neighbour is the first
    nodes: tuple[NodeShare, ...]
    # the share of bandwidth left to what leads up from a switch (named by its path), where it is not all of it
    uplink_health: Mapping[Path, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise not_wanted("the number of nodes", 0, "at least 1")
        for switch, health in self.uplink_health.items():
            _check_health(f"the uplinks of {'.'.join(switch)}", health)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(node.gpus for node in self.nodes)

    @property
    def busiest(self) -> int:
        """How many ranks the node with the most has."""
        return max(node.gpus for node in self.nodes)

    @property
    def neighbours(self) -> int:
        """How many other nodes a node exchanges gradients with, in a ring: 0, 1 or 2."""
        return min(len(self.nodes) - 1, 2)

    def port_load(self) -> float:
        """Return how many times the ring's bytes the weakest node's ports carry: 1 where all are in order."""
        if len(self.nodes) == 1:
            return 0.0
        return max(1 / node.health for node in self.nodes)

    def uplink_loads(self) -> tuple[float, float]:
        """Return how many flows the busiest uplinks carry: those of leaves, and those of switches above.

        The ring is a flow from each node to the next. It leaves each switch that has the one node below it and not
        the other; an uplink at half its health counts each flow twice.
        """
        flows: Counter[Path] = Counter()
        leaves = {node.path for node in self.nodes}
        for place, node in enumerate(self.nodes):
            previous = self.nodes[place - 1]
            for depth in range(1, len(previous.path) + 1):
                switch = previous.path[:depth]
                if node.path[:depth] != switch:
                    flows[switch] += 1
        loads = {switch: count / self.uplink_health.get(switch, 1.0) for switch, count in flows.items()}
        leaf = max((load for switch, load in loads.items() if switch in leaves), default=0.0)
        above = max((load for switch, load in loads.items() if switch not in leaves), default=0.0)
        return leaf, above


def _check_health(what: str, health: float) -> None:
    if not 0 < health <= 1:
        raise not_wanted(f"the health of {what}", health, "above 0 and at most 1")
