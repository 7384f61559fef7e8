"""What the model knows about a job: its computing, its gradients, its reading."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Self

from deeplink.scheduler.model.errors import ModelInputError, a_share, above_zero, not_below_zero

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """One training step of a data-parallel job.

    Attributes:
        batch: samples of a step: of one GPU when scaling is weak, of all when it is strong.
        sample_s: seconds of forward and backward pass for a sample, on one GPU that has its node to itself.
        fixed_s: seconds of a step that do not depend on the batch (launches, optimizer).
        gradient_bytes: bytes to be summed over the ranks in a step: parameters times bytes of one gradient.
        scaling: what `batch` is.
        overlap: the share of the computing time in which gradients can travel. The backward pass is about two
            thirds of it; default 0.5. Fits to the measured steps of Pollux (OSDI 2021) gave 0.1 to 0.6.
        sample_bytes: bytes read for a sample.
        algorithm: how gradients are summed.
        schedule: how the levels are used.
    """

    batch: int
    sample_s: float
    gradient_bytes: float
    fixed_s: float = 0.0
    scaling: Scaling = Scaling.WEAK
    overlap: float = 0.5
    sample_bytes: float = 0.0
    algorithm: Algorithm = Algorithm.TREE
    schedule: Schedule = Schedule.FLAT

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
        """Return a job whose computing is told in operations instead of seconds.

        Args:
            batch: samples of a step on one GPU.
            sample_flops: operations of forward and backward pass for a sample; for a transformer six times
                parameters times tokens (Kaplan et al., Scaling Laws for Neural Language Models, 2020).
            gpu_flops: operations a second of the GPU, by its data sheet.
            gradient_bytes: bytes to be summed over the ranks in a step.
            efficiency: the share of `gpu_flops` that training reaches. Default 0.4; Llama 3 reports 0.38 to 0.43
                on H100 (Grattafiori et al., 2024).

        Raises:
            ModelInputError: a value that cannot be.
        """
        above_zero("the speed of a GPU", gpu_flops)
        above_zero("the efficiency", efficiency)
        return cls(batch=batch, sample_s=sample_flops / (gpu_flops * efficiency), gradient_bytes=gradient_bytes)

    def local_batch(self, ranks: int) -> float:
        """Return the samples of one GPU in a step, on so many ranks."""
        return self.batch if self.scaling is Scaling.WEAK else self.batch / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One place that samples are read from.

    Attributes:
        name: what it is called in an explanation: `local`, `peer`, `source`.
        share: the share of a step's samples that come from there.
        bandwidth: bytes a second that one node reads from it; of all nodes together when `shared`.
        shared: whether the nodes share one bandwidth, as they do that of a file server.
    """

    name: str
    share: float
    bandwidth: float
    shared: bool = False

    def __post_init__(self) -> None:
        a_share(f"the share read from {self.name}", self.share)
        above_zero(f"the bandwidth of {self.name}", self.bandwidth)


def check_reads(reads: Sequence[Read]) -> None:
    """Check that the shares of all places come to one, or that there are none.

    Raises:
        ModelInputError: they do not.
    """
    total = sum(read.share for read in reads)
    if reads and abs(total - 1) > 1e-6:  # noqa: PLR2004 (what adding up decimal fractions may lose)
        raise ModelInputError("the sum of the shares read", f"{total:g}", "1")
