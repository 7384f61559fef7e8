"""Text between the ranks of a process group, as bytes in tensors: torch's collectives of objects send pickles."""

from __future__ import annotations

from typing import Final

import torch
from torch import distributed as dist

from deeplink.errors import DeepLinkError

LONGEST: Final = 16 << 20
"""Bytes of one rank's text."""


class TextLengthError(DeepLinkError):
    """A rank's text is longer than ranks send each other, or its length is no length."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a rank's text of {length} bytes, at most {LONGEST} are sent")
        self.length = length


def broadcast_text(text: str, *, src: int) -> str:
    """Return rank `src`'s text on every rank; a collective, bounded by the process group's timeout.

    Raises:
        TextLengthError: it is too long; on every rank.
    """
    mine = text.encode()
    length = torch.tensor([len(mine)], device=_device())
    dist.broadcast(length, src)
    data = torch.zeros(_checked(int(length)), dtype=torch.uint8, device=_device())
    if dist.get_rank() == src:
        data.copy_(_bytes(mine))
    dist.broadcast(data, src)
    return _text(data)


def gathered_texts(text: str) -> list[str]:
    """Return every rank's text, in their order, on every rank; a collective, bounded as `broadcast_text`.

    Raises:
        TextLengthError: one is too long; on every rank.
    """
    mine = text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=_device()) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=_device()))
    sizes = [_checked(int(length)) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
    padded[: len(mine)] = _bytes(mine)
    rows = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [_text(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _device() -> torch.device:
    """Return a device that the process group has: the CPU, else its first, as torch chooses for objects."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _checked(length: int) -> int:
    if not 0 <= length <= LONGEST:
        raise TextLengthError(length)
    return length


def _bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode()
