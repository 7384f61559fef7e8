"""DeepSpeed, without its own launcher: `deeplink run --recipe deepspeed -- python examples/deepspeed_zero.py`."""

from __future__ import annotations

import deepspeed
import torch
from digits import BATCH, CLASSES, PIXELS, STEPS, digits, introduce, say, share
from torch import distributed as dist
from torch import nn

import deeplink

torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
rank, world = dist.get_rank(), dist.get_world_size()
introduce("deepspeed", rank, world)

model = nn.Linear(PIXELS, CLASSES)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    config={
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
pictures, classes = map(torch.from_numpy, digits())
for step in range(STEPS):
    rows = torch.from_numpy(share(step, rank, world))
    loss = nn.functional.cross_entropy(engine(pictures[rows]), classes[rows])
    engine.backward(loss)
    engine.step()
    deeplink.report(step=step + 1, loss=loss.item())
if rank == 0:
    say(f"loss {loss.item():.3f} after step {STEPS}")
dist.destroy_process_group()
