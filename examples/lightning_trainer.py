"""Lightning: `deeplink run --recipe lightning -- python examples/lightning_trainer.py CHECKPOINTS`.

Nodes and devices come from the launch, so that the script need not know them.
"""

from __future__ import annotations

import os
import sys

import lightning
import torch
from digits import BATCH, CLASSES, PIXELS, STEPS, digits, introduce, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import deeplink
from deeplink.checkpoints.lightning import latest_path, lightning_callback


class Classifier(lightning.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, CLASSES)

    @override
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pictures, classes = batch
        loss = nn.functional.cross_entropy(self.layer(pictures), classes)
        deeplink.report(step=self.global_step + 1, loss=loss.item())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


torch.set_num_threads(1)
lightning.seed_everything(0, verbose=False)
checkpoints = deeplink.Checkpoints(sys.argv[1])
trainer = lightning.Trainer(
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    strategy="ddp",
    max_steps=STEPS,
    callbacks=[lightning_callback(checkpoints, every=10)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
introduce("lightning", trainer.global_rank, trainer.world_size)
say(f"cluster environment: {type(trainer.strategy.cluster_environment).__name__}")
pictures, classes = map(torch.from_numpy, digits())
trainer.fit(
    Classifier(),
    DataLoader(TensorDataset(pictures, classes), BATCH // trainer.world_size, shuffle=True),
    ckpt_path=latest_path(checkpoints),
    weights_only=True,
)
if trainer.global_rank == 0:
    say(f"after step {trainer.global_step}")
