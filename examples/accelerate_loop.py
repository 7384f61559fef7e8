"""Hugging Face accelerate: `deeplink run --recipe accelerate -- python examples/accelerate_loop.py`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from digits import BATCH, CLASSES, PIXELS, digits, introduce, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deeplink

torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
introduce("accelerate", accelerator.process_index, accelerator.num_processes)

pictures, classes = map(torch.from_numpy, digits())
loader = DataLoader(TensorDataset(pictures, classes), BATCH // accelerator.num_processes, shuffle=True)
model = nn.Linear(PIXELS, CLASSES)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
step = 0
for batch, labels in loader:
    loss = nn.functional.cross_entropy(model(batch), labels)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    step += 1
    deeplink.report(step=step, loss=loss.item())
if accelerator.is_main_process:
    say(f"loss {loss.item():.3f} after step {step}")
accelerator.end_training()
