"""PyTorch FSDP: `deeplink run -- python examples/torch_fsdp.py`."""

from __future__ import annotations

import torch
from digits import CLASSES, PIXELS, STEPS, digits, introduce, say, share
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deeplink

torch.manual_seed(0)
torch.set_num_threads(1)
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
introduce("fsdp", rank, world)

# Neighbours in the mesh are neighbours on the fabric: ranks are numbered along it.
mesh = init_device_mesh("cuda" if cuda else "cpu", (world,))
model = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

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
dist.destroy_process_group()
