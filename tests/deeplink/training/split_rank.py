"""A rank that trains with DistributedDataParallel and DataLoader workers over a packed dataset. A user's file.

    split_rank.py DATASET STEPS SLOW

Nothing in it measures. Rank SLOW takes 30 ms more before each forward pass. Rank 0 saves a checkpoint in between.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import deeplink

name, steps, slow = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def features(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[:64].float()


torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
dataset = deeplink.Dataset(name, features, labels=False)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while step < steps:
    for batch in DataLoader(dataset, batch_size=16, num_workers=2):
        if rank == slow:
            time.sleep(0.03)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == steps // 2 and rank == 0:
            with deeplink.section("checkpoint"):
                time.sleep(0.2)
        deeplink.report(step=step)
        if step == steps:
            break
Path(f"done.{rank}").touch()
torch.distributed.destroy_process_group()
