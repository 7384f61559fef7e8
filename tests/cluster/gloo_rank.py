"""A rank that trains a little model with torch's DistributedDataParallel over gloo. A user's file.

    gloo_rank.py FOLDER STEPS

Rank 0 saves the step every 5 steps; whatever runs next goes on there. FOLDER/end has all ranks end at one step
before their steps are done. FOLDER/slow holds the rank that is to take three times as long, if one is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import deeplink

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = folder / "state"
step = int(state.read_text()) if state.exists() else 0
is_ending = torch.zeros(1)
while step < steps and not is_ending:
    slow = folder / "slow"
    time.sleep(0.15 if slow.exists() and slow.read_text() == str(rank) else 0.05)  # as if it read its batch
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    is_ending = torch.tensor([float((folder / "end").exists())])
    torch.distributed.all_reduce(is_ending)
    step += 1
    deeplink.report(step=step)
    if rank == 0 and step % 5 == 0:
        draft = folder / "state.draft"
        draft.write_text(str(step))
        draft.replace(state)
torch.distributed.destroy_process_group()
