"""A rank that trains next to nothing, on samples that its DataLoader workers take long for. A user's file.

    starved_rank.py FOLDER STEPS

Nothing in it measures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import deeplink

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def features(data: bytes) -> torch.Tensor:
    time.sleep(0.002)  # as if it decoded a picture
    return torch.frombuffer(bytearray(data[:64].ljust(64)), dtype=torch.uint8).float()


dataset = deeplink.Dataset("starved", features, labels=False)
step = 0
while step < steps:
    for batch in DataLoader(dataset, batch_size=100, num_workers=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        deeplink.report(step=step)
torch.distributed.destroy_process_group()
