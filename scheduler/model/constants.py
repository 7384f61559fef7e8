"""What the model knows about the machines: bandwidth and latency per level, and what sharing costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from deeplink.scheduler.model.errors import a_share, above_zero, not_below_zero


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of one level's links.

    Attributes:
        bandwidth: bytes a second.
        latency_s: seconds that a step of the collective needs besides, to reach a rank across this level.
    """

    bandwidth: float
    latency_s: float

    def __post_init__(self) -> None:
        above_zero("a link's bandwidth", self.bandwidth)
        not_below_zero("a link's latency", self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpeeds:
    """How fast samples are read, in bytes a second; None where that was not timed.

    Attributes:
        local: what a node reads from its own store.
        peer: what a node reads from other nodes' stores.
        source: what one node alone reads from the source.
        source_of_all: what all nodes together read from it at most; infinite where no such limit was seen.
    """

    local: float | None = None
    peer: float | None = None
    source: float | None = None
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

    Attributes:
        gpu: between two GPUs of a node. Default: PCIe 3.0 x16 as NCCL counts it (`PCI_BW` 12 GB/s in
            src/graph/topo.h), and its latency of a ring step over PCIe, protocol Simple (5.7 us, `hwLat` in
            src/graph/tuning.cc).
        nic: one port of a node. Default: 100 Gbit/s, 12 GB/s as above; 14 us, `hwLat` over a network.
        nics: ports a node has, used side by side. Default 1.
        leaf: what leads up from a leaf switch, for one flow; flows that cross at once share it. Default: one cable
            as fast as a port. Latency as `nic`: a switch adds below 1 us, which vanishes in NCCL's 14.
        spine: the same from any switch above the leaves.
        path_bandwidth: the most that goes between one pair of nodes, however fast their ports are, in bytes a
            second. An all-reduce over three nodes or more gives each node two neighbours, so two such paths; with
            two nodes there is one. Default: no limit. Amazon's network limits one flow to 5 Gbit/s, or 10 inside
            a placement group ("Amazon EC2 instance network bandwidth"): in the measured steps of Pollux
            (OSDI 2021) two nodes lose to three and four at the same number of GPUs, by up to 1.8 times.
        nic_sharing: by which share the transfer between nodes gets slower for each further rank on the busiest
            node (copies through the host's memory, and their interrupts). Fits to those steps give 0.02 to 0.06
            for four jobs; default 0.03.
        host_contention: by which share the computing gets slower where a node runs many ranks, against one
            (loaders, Python and PCIe are shared): it grows as 1 - 1/ranks. There 0.07 to 0.3; default 0.1.
        straggling: by which share the transfer gets slower with each doubling of the nodes: all wait for the
            slowest. There 0.03 to 0.2; default 0.06.
        unhidden: the share of an all-reduce that no computing can hide: the last bucket of gradients is ready
            only when the backward pass ends (Li et al., PyTorch Distributed, VLDB 2020). Default 0.1.
        reads: how fast samples are read. Default: not known, and reading is left out.
    """

    gpu: LinkSpeed = LinkSpeed(12e9, 5.7e-6)
    nic: LinkSpeed = LinkSpeed(12e9, 14e-6)
    nics: int = 1
    leaf: LinkSpeed = LinkSpeed(12e9, 14e-6)
    spine: LinkSpeed = LinkSpeed(12e9, 14e-6)
    path_bandwidth: float = inf
    nic_sharing: float = 0.03
    host_contention: float = 0.1
    straggling: float = 0.06
    unhidden: float = 0.1
    reads: ReadSpeeds = ReadSpeeds()

    def __post_init__(self) -> None:
        above_zero("the number of a node's ports", self.nics)
        above_zero("the bandwidth of a path", self.path_bandwidth)
        not_below_zero("NIC sharing", self.nic_sharing)
        not_below_zero("host contention", self.host_contention)
        not_below_zero("straggling", self.straggling)
        a_share("the share of an all-reduce that nothing hides", self.unhidden)
