"""Compile what a rank imports, by training one step as the user who may write beside the sources.

Importing is not enough: torch loads a hundred modules more when the first optimiser is made.
"""

import importlib
import importlib.util
import os


def train() -> None:
    """Train one step with torch."""
    import torch  # noqa: PLC0415 - not there where the light training stands in
    from torch import distributed, nn  # noqa: PLC0415

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    distributed.destroy_process_group()


light = importlib.util.find_spec("torch") is None
if not light:
    train()
script = "deeplink.demo.train_light" if light else "deeplink.demo.train"
for name in (script, "deeplink.agent.agent", "deeplink.cli.sandbox", "rich.progress", "sklearn.datasets"):
    importlib.import_module(name)
