"""Horovod built with MPI: `deeplink run --recipe horovod -- python examples/horovod_torch.py`."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from digits import CLASSES, PIXELS, STEPS, digits, introduce, say, share
from torch import nn

import deeplink

hvd.init()
rank, world = hvd.rank(), hvd.size()
introduce("horovod", rank, world)

torch.manual_seed(0)
model = nn.Linear(PIXELS, CLASSES)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
pictures, classes = map(torch.from_numpy, digits())
for step in range(STEPS):
    rows = torch.from_numpy(share(step, rank, world))
    loss = nn.functional.cross_entropy(model(pictures[rows]), classes[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    deeplink.report(step=step + 1, loss=loss.item())
if rank == 0:
    say(f"loss {loss.item():.3f} after step {STEPS}")
