"""What a training loop needs beside the Dataset, free of torch: order, place in it, audit of deliveries."""

from __future__ import annotations

from deeplink.data.blocks import BLOCK_WINDOW, BlockOrder, Blocks
from deeplink.data.digest import DeliveryDigest, receipt
from deeplink.data.errors import SamplerMisuseError, SamplerStateError, TooFewSamplesError
from deeplink.data.order import Order, shuffled
from deeplink.data.prefetch import Prefetcher
from deeplink.data.sampler import ResumableSampler
from deeplink.data.share import Residency

__all__ = [
    "BLOCK_WINDOW",
    "BlockOrder",
    "Blocks",
    "DeliveryDigest",
    "Order",
    "Prefetcher",
    "Residency",
    "ResumableSampler",
    "SamplerMisuseError",
    "SamplerStateError",
    "TooFewSamplesError",
    "receipt",
    "shuffled",
]
