"""The inside of a node: its GPUs and network cards, and how each pair of them is joined; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Self

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

_NVLINKS = re.compile(r"NV(\d{1,3})", re.ASCII)


class Join(Enum):
    """How two devices of a node are joined, nearest first; words and order are those of `nvidia-smi topo -m`."""

    NVLINK = "NV"
    PIX = "PIX"
    """At most one PCIe bridge lies between."""
    PXB = "PXB"
    """Several PCIe bridges, no host bridge."""
    PHB = "PHB"
    """A PCIe host bridge, typically the CPU."""
    NODE = "NODE"
    """The way between the host bridges of one NUMA node."""
    SYS = "SYS"
    """The way between NUMA nodes."""

    @property
    def distance(self) -> int:
        """0 for the nearest."""
        return _NEAREST_FIRST.index(self)


_NEAREST_FIRST = tuple(Join)


@dataclass(frozen=True, slots=True)
class Joined:
    """How one pair is joined; `nvlinks` is how many NVLinks are bonded, 0 for any other way."""

    join: Join
    nvlinks: int = 0

    @classmethod
    def of(cls, word: str) -> Self | None:
        """Return what `nvidia-smi topo -m` calls so, `str`'s inverse; None where it is no such word."""
        if found := _NVLINKS.fullmatch(word):
            return cls(Join.NVLINK, int(found[1]))
        return next((cls(join) for join in Join if join is not Join.NVLINK and join.value == word), None)

    @override
    def __str__(self) -> str:
        return f"NV{self.nvlinks}" if self.join is Join.NVLINK else self.join.value


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `cpus` are the CPUs near to it as a list (`0-23,48-71`), `numa` its NUMA node; as far as told."""

    name: str
    cpus: str = ""
    numa: int | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """One network card: its name in the matrix, and its device's (`mlx5_0`), often the same."""

    name: str
    device: str


@dataclass(frozen=True, slots=True)
class Inside:
    """What is in a node, and how it is joined.

    Attributes:
        pairs: by the names of two devices in the order of `gpus` and then `nics`; a pair that is not told of is
            not there.
    """

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    pairs: Mapping[tuple[str, str], Joined]

    def between(self, one: str, other: str) -> Joined | None:
        """Return how two devices are joined, whichever is named first; None where nobody told."""
        return self.pairs.get((one, other)) or self.pairs.get((other, one))

    def nearest_nics(self, gpu: str) -> tuple[Nic, ...]:
        """Return the network cards that a GPU should use: those that no other is nearer than."""
        distances = {
            nic.name: joined.join.distance for nic in self.nics if (joined := self.between(gpu, nic.name))
        }
        least = min(distances.values(), default=0)
        return tuple(nic for nic in self.nics if distances.get(nic.name) == least)

    def far_nics(self) -> tuple[Nic, ...]:
        """Return the cards that are not for the GPUs: no GPU is nearest to them, though other cards are near some.

        On a DGX A100 these are the four of the storage and the management network.
        """
        near = {nic.name for gpu in self.gpus for nic in self.nearest_nics(gpu.name)}
        return tuple(nic for nic in self.nics if nic.name not in near) if near else ()

    def nvlinks(self, gpu: str) -> int:
        """Count the NVLinks from a GPU to the other GPUs."""
        told = (self.between(gpu, other.name) for other in self.gpus if other.name != gpu)
        return sum(joined.nvlinks for joined in told if joined)
