"""What the cost model knows: of the machines (constants), of a job (its profile), and where its ranks run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from math import inf, isinf
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.topology.graph import Path

_CONSTANTS_FORMAT = 2
_WITHOUT_READS = 1
_LINKS = ("gpu", "nic", "leaf", "spine")
_PROFILE_FORMAT = 1
_WHOLE = ("batch", "ranks_per_node")
_NEEDED = ("batch", "sample_s", "gradient_bytes")
_MEASURED = "step_s"


def _not_wanted(what: str, value: object, wanted: str) -> DeepLinkError:
    """Return the error of a value that must be another one."""
    remedy = f"Give {what} as {wanted}."
    return DeepLinkError(f"{what} is {value}, but must be {wanted}", remedy=remedy, exit_code=2)


def _no_constants(where: str, problem: str) -> DeepLinkError:
    remedy = "Make it again with `deeplink run -- deeplink calibrate --out FILE`."
    return DeepLinkError(f"{where}: no constants of the cost model: {problem}", remedy=remedy, exit_code=2)


def above_zero(what: str, value: float) -> None:
    """Check that a value is above zero (infinity is)."""
    if not value > 0:
        raise _not_wanted(what, value, "above zero")


def not_below_zero(what: str, value: float) -> None:
    """Check that a value is zero or more, and finite."""
    if not 0 <= value < float("inf"):
        raise _not_wanted(what, value, "zero or more")


def _a_share(what: str, value: float) -> None:
    """Check that a value is from 0 to 1."""
    if not 0 <= value <= 1:
        raise _not_wanted(what, value, "from 0 to 1")


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of one level's links."""

    bandwidth: float  # bytes a second
    latency_s: float  # seconds that a step of the collective needs besides, to reach a rank across this level

    def __post_init__(self) -> None:
        above_zero("a link's bandwidth", self.bandwidth)
        not_below_zero("a link's latency", self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpeeds:
    """How fast samples are read, in bytes a second; None where that was not timed."""

    local: float | None = None  # what a node reads from its own store
    peer: float | None = None  # what a node reads from other nodes' stores
    source: float | None = None  # what one node alone reads from the source
    # what all nodes together read from it at most; infinite where no such limit was seen
    source_of_all: float = inf

    def __post_init__(self) -> None:
        for name in ("local", "peer", "source", "source_of_all"):
            value = getattr(self, name)
            if value is not None:
                above_zero(f"the bandwidth of reading ({name})", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What holds for every job of a cluster.

    Calibrate or fit them where placements are to be compared in seconds; the defaults are a node of PCIe GPUs with
    one 100 Gbit/s port, on a fabric without oversubscription.
    """

    # between two GPUs of a node. Default: PCIe 3.0 x16 as NCCL counts it (`PCI_BW` 12 GB/s in src/graph/topo.h),
    # and its latency of a ring step over PCIe, protocol Simple (5.7 us, `hwLat` in src/graph/tuning.cc).
    gpu: LinkSpeed = LinkSpeed(12e9, 5.7e-6)
    # one port of a node. Default: 100 Gbit/s, 12 GB/s as above; 14 us, `hwLat` over a network.
    nic: LinkSpeed = LinkSpeed(12e9, 14e-6)
    nics: int = 1  # ports a node has, used side by side. Default 1.
    # what leads up from a leaf switch, for one flow; flows that cross at once share it. Default: one cable as fast
    # as a port. Latency as `nic`: a switch adds below 1 us, which vanishes in NCCL's 14.
    leaf: LinkSpeed = LinkSpeed(12e9, 14e-6)
    spine: LinkSpeed = LinkSpeed(12e9, 14e-6)  # the same from any switch above the leaves
    # the most that goes between one pair of nodes, however fast their ports are, in bytes a second. An all-reduce
    # over three nodes or more gives each node two neighbours, so two such paths; with two nodes there is one.
    # Default: no limit. Amazon's network limits one flow to 5 Gbit/s, or 10 inside a placement group ("Amazon EC2
    # instance network bandwidth"): in the measured steps of Pollux (OSDI 2021) two nodes lose to three and four at
    # the same number of GPUs, by up to 1.8 times.
    path_bandwidth: float = inf
    # by which share the transfer between nodes gets slower for each further rank on the busiest node (copies
    # through the host's memory, and their interrupts). Fits to those steps give 0.02 to 0.06 for four jobs;
    # default 0.03.
    nic_sharing: float = 0.03
    # by which share the computing gets slower where a node runs many ranks, against one (loaders, Python and PCIe
    # are shared): it grows as 1 - 1/ranks. There 0.07 to 0.3; default 0.1.
    host_contention: float = 0.1
    # by which share the transfer gets slower with each doubling of the nodes: all wait for the slowest. There 0.03
    # to 0.2; default 0.06.
    straggling: float = 0.06
    # the share of an all-reduce that no computing can hide: the last bucket of gradients is ready only when the
    # backward pass ends (Li et al., PyTorch Distributed, VLDB 2020). Default 0.1.
    unhidden: float = 0.1
    reads: ReadSpeeds = ReadSpeeds()  # how fast samples are read. Default: not known, and reading is left out.

    def __post_init__(self) -> None:
        above_zero("the number of a node's ports", self.nics)
        above_zero("the bandwidth of a path", self.path_bandwidth)
        not_below_zero("NIC sharing", self.nic_sharing)
        not_below_zero("host contention", self.host_contention)
        not_below_zero("straggling", self.straggling)
        _a_share("the share of an all-reduce that nothing hides", self.unhidden)


def constants_text(constants: Constants) -> str:
    """Return constants as JSON: bytes a second, seconds, shares; a bandwidth without limit is null."""
    values = asdict(constants)
    values["reads"] = {name: value for name, value in values["reads"].items() if value is not None}
    return json.dumps({"format": _CONSTANTS_FORMAT, **_finite(values)}, indent=2) + "\n"


def constants_from(text: str, where: str) -> Constants:
    """Read what `constants_text` wrote, also earlier, when nothing was known of reading (format 1)."""
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise _no_constants(where, f"not JSON ({problem})") from problem
    stamp = found.pop("format", None) if isinstance(found, dict) else None
    if stamp not in (_CONSTANTS_FORMAT, _WITHOUT_READS):
        raise _no_constants(where, f"not an object of format {_WITHOUT_READS} or {_CONSTANTS_FORMAT}")
    if stamp == _WITHOUT_READS:
        found.setdefault("reads", {})
    _check_names(found, Constants, where)
    values: dict[str, Any] = {
        name: _link(value, where, name) if name in _LINKS else _number(value, where)
        for name, value in found.items()
        if name != "reads"
    }
    if not isinstance(found["nics"], int):
        raise _no_constants(where, f"{found['nics']!r} is no number of ports")
    return Constants(**values | {"nics": found["nics"], "reads": _reads(found["reads"], where)})


def _reads(found: object, where: str) -> ReadSpeeds:
    names = {field.name for field in fields(ReadSpeeds)}
    if not isinstance(found, dict) or not found.keys() <= names:
        raise _no_constants(where, f"reads is no object of {', '.join(sorted(names))}")
    values = {name: _number(value, where) for name, value in found.items()}
    return ReadSpeeds(**values)


def _link(found: object, where: str, name: str) -> LinkSpeed:
    if not isinstance(found, dict):
        raise _no_constants(where, f"{name} is no object")
    _check_names(found, LinkSpeed, where)
    return LinkSpeed(_number(found["bandwidth"], where), _number(found["latency_s"], where))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _finite(value) if isinstance(value, dict) else None if isinf(value) else value
        for name, value in values.items()
    }


def _check_names(found: dict[str, Any], kind: type[Constants | LinkSpeed], where: str) -> None:
    wanted = {field.name for field in fields(kind)}
    if wanted != set(found):
        raise _no_constants(where, f"lacks or has too much: {', '.join(sorted(wanted ^ set(found)))}")


def _number(value: object, where: str) -> float:
    if value is None:
        return inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _no_constants(where, f"{value!r} is no number")
    return float(value)


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
        _a_share("overlap", self.overlap)

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
        _a_share(f"the share read from {self.name}", self.share)
        above_zero(f"the bandwidth of {self.name}", self.bandwidth)


def check_reads(reads: Sequence[Read]) -> None:
    """Check that the shares of all places come to one, or that there are none."""
    total = sum(read.share for read in reads)
    if reads and abs(total - 1) > 1e-6:  # noqa: PLR2004 (what adding up decimal fractions may lose)
        raise _not_wanted("the sum of the shares read", f"{total:g}", "1")


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
    return json.dumps({"format": _PROFILE_FORMAT, **values})


def profile_from(text: str, where: str) -> Profile:
    """Read a profile: what `profile_text` wrote, or somebody by hand; all but three values have defaults.

    Instead of `sample_s` there may be `step_s`, a measured step of one rank alone, where nothing is summed; of it
    `fixed_s` does not depend on the batch.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise _no_profile(where, f"not JSON ({problem})") from problem
    if not isinstance(found, dict) or found.pop("format", None) != _PROFILE_FORMAT:
        raise _no_profile(where, f"not an object of format {_PROFILE_FORMAT}")
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
            raise _not_wanted("the number of GPUs used of a node", self.gpus, f"from 1 to its {self.of}")
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
            raise _not_wanted("the number of nodes", 0, "at least 1")
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
        raise _not_wanted(f"the health of {what}", health, "above 0 and at most 1")
