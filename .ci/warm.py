"""Compile what a rank imports, by training one step as the user who may write beside the sources.

Importing is not enough: torch loads a hundred modules more when the first optimiser is made.
"""

import importlib
import os

import torch
from torch import distributed, nn

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.zeros(1, 2)).sum().backward()
optimizer.step()
distributed.destroy_process_group()

for name in ("deeplink.demo.train", "deeplink.agent", "deeplink.cli.demo", "rich.progress", "sklearn.datasets"):
    importlib.import_module(name)
