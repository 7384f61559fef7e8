"""What a training loop needs beside the Dataset, free of torch: order, place in it, audit of deliveries.

Other packages import: `dataset`, `digest`, `grouped`, `iterable`.
"""

from __future__ import annotations

from deeplink.data.digest import DeliveryDigest, receipt
from deeplink.data.errors import BatchError, DatasetError, SamplerError
from deeplink.data.order import BLOCK_WINDOW, BlockOrder, Blocks, Order, Residency, shuffled
from deeplink.data.prefetch import Prefetcher
from deeplink.data.sampler import ResumableSampler

__all__ = [
    "BLOCK_WINDOW",
    "BatchError",
    "BlockOrder",
    "Blocks",
    "DatasetError",
    "DeliveryDigest",
    "Order",
    "Prefetcher",
    "Residency",
    "ResumableSampler",
    "SamplerError",
    "receipt",
    "shuffled",
]
