"""PyTorch DDP: `deeplink run -- python examples/torch_ddp.py CHECKPOINTS`; with torchrun, add `--recipe torchrun`.

Goes on at the last whole checkpoint, on any number of ranks.
"""

from __future__ import annotations

import sys

import torch
from digits import CLASSES, PIXELS, STEPS, digits, introduce, say, share
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deeplink

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
introduce("torch", rank, world)

model = DistributedDataParallel(nn.Linear(PIXELS, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
checkpoints = deeplink.Checkpoints(sys.argv[1])
first = 0
if found := checkpoints.latest():  # the same answer on every rank
    model.module.load_state_dict(torch.load(found.path / "model.pt", weights_only=True))
    first = found.step
    say(f"rank {rank} goes on at step {first}")

pictures, classes = map(torch.from_numpy, digits())
for step in range(first, STEPS):
    rows = torch.from_numpy(share(step, rank, world))
    loss = nn.functional.cross_entropy(model(pictures[rows]), classes[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    deeplink.report(step=step + 1, loss=loss.item())
    if rank == 0 and (step + 1) % 10 == 0:
        with checkpoints.save(step=step + 1) as folder:
            torch.save(model.module.state_dict(), folder / "model.pt")
if rank == 0:
    say(f"loss {loss.item() if first < STEPS else 0.0:.3f} after step {STEPS}")
dist.destroy_process_group()
