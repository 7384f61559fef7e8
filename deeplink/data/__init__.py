"""What a training loop needs beside the Dataset, free of torch: order, place in it, audit of deliveries."""

from __future__ import annotations

from deeplink.data.digest import DeliveryDigest, receipt
from deeplink.data.order import Order, shuffled
from deeplink.data.sampler import ResumableSampler, SamplerMisuseError, SamplerStateError, TooFewSamplesError

__all__ = [
    "DeliveryDigest",
    "Order",
    "ResumableSampler",
    "SamplerMisuseError",
    "SamplerStateError",
    "TooFewSamplesError",
    "receipt",
    "shuffled",
]
