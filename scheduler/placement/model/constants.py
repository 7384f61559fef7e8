"""What the model knows about the machines: bandwidth and latency per level, and what sharing costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from math import inf, isinf
from typing import Any

from deeplink.core.errors import DeepLinkError

_FORMAT = 2
_WITHOUT_READS = 1
_LINKS = ("gpu", "nic", "leaf", "spine")


def not_wanted(what: str, value: object, wanted: str) -> DeepLinkError:
    """Return the error of a value that must be another one."""
    remedy = f"Give {what} as {wanted}."
    return DeepLinkError(f"{what} is {value}, but must be {wanted}", remedy=remedy, exit_code=2)


def _no_constants(where: str, problem: str) -> DeepLinkError:
    remedy = "Make it again with `deeplink run -- deeplink calibrate --out FILE`."
    return DeepLinkError(f"{where}: no constants of the cost model: {problem}", remedy=remedy, exit_code=2)


def above_zero(what: str, value: float) -> None:
    """Check that a value is above zero (infinity is)."""
    if not value > 0:
        raise not_wanted(what, value, "above zero")


def not_below_zero(what: str, value: float) -> None:
    """Check that a value is zero or more, and finite."""
    if not 0 <= value < float("inf"):
        raise not_wanted(what, value, "zero or more")


def a_share(what: str, value: float) -> None:
    """Check that a value is from 0 to 1."""
    if not 0 <= value <= 1:
        raise not_wanted(what, value, "from 0 to 1")


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
        a_share("the share of an all-reduce that nothing hides", self.unhidden)


def constants_text(constants: Constants) -> str:
    """Return constants as JSON: bytes a second, seconds, shares; a bandwidth without limit is null.

    `reads` holds those places that were timed.
    """
    values = asdict(constants)
    values["reads"] = {name: value for name, value in values["reads"].items() if value is not None}
    return json.dumps({"format": _FORMAT, **_finite(values)}, indent=2) + "\n"


def constants_from(text: str, where: str) -> Constants:
    """Read what `constants_text` wrote, also earlier, when nothing was known of reading (format 1)."""
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise _no_constants(where, f"not JSON ({problem})") from problem
    stamp = found.pop("format", None) if isinstance(found, dict) else None
    if stamp not in (_FORMAT, _WITHOUT_READS):
        raise _no_constants(where, f"not an object of format {_WITHOUT_READS} or {_FORMAT}")
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
