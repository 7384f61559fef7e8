"""Train a small convolutional network on packed images: the script a user would write, nothing of it for show.

Plain PyTorch DDP. What DeepLink adds is marked: where the samples come from, where training stands, and a line
that says how far it is. Start it with `deeplink run -- python -m deeplink.demo.train ...`.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import deeplink
from deeplink.core.publish import write_text
from deeplink.data import DeliveryDigest, ResumableSampler
from deeplink.demo.train_light import options


class Decode:
    """Image file bytes to a (1, size, size) tensor of floats around 0; a class, so that it can be pickled."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, data: bytes) -> torch.Tensor:
        """Return the tensor of one image file."""
        image = Image.open(io.BytesIO(data)).convert("L")
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(1, self.size, self.size).float().div(255.0).sub(0.5)


def network(classes: int) -> nn.Module:
    """Return two convolutions and a linear layer; takes (batch, 1, size, size), gives (batch, classes)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


def merged(digest: DeliveryDigest, epochs: int) -> DeliveryDigest:
    """Return the sum of all ranks' digests; every rank must call it. int64 sums wrap, as the digest's do."""
    table = torch.tensor(digest.table(epochs), dtype=torch.int64)
    dist.all_reduce(table)
    return DeliveryDigest.from_table(table.tolist())


def accuracy(model: nn.Module, dataset: deeplink.Dataset, batch_size: int) -> float:
    """Return the share of `dataset` that the model gets right; every rank tests its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = Subset(dataset, range(rank, len(dataset), world))
    counts = torch.zeros(2, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(mine, batch_size=batch_size):
            counts += torch.tensor([int((model(images).argmax(1) == labels).sum()), len(labels)])
    dist.all_reduce(counts)
    return float(counts[0]) / float(counts[1])


@dataclass
class Training:
    """All that moves while training, and how it is saved and found again."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    sampler: ResumableSampler
    digest: DeliveryDigest  # the audit of what finished steps were fed
    epochs: int
    step: int = 0

    def restore(self, found: deeplink.Checkpoint) -> None:
        """Go on where a checkpoint stands."""
        state: dict[str, Any] = torch.load(found.path / "state.pt", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(found.meta["sampler"])
        self.step = found.step
        if dist.get_rank() == 0:  # the checkpoint holds the sum over ranks: one of them carries it on
            self.digest.load_state_dict(found.meta["digest"])
            say(f"resumed at step {self.step}, epoch {self.sampler.epoch}, from {found.path.name}")

    def save(self, checkpoints: deeplink.Checkpoints) -> None:
        """Save from rank 0; every rank must call it."""
        total = merged(self.digest, self.epochs)
        if dist.get_rank() == 0:
            meta = {"sampler": self.sampler.state_dict(), "digest": total.state_dict()}
            with checkpoints.save(step=self.step, meta=meta) as draft:
                state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(state, draft / "state.pt")

    def run_epoch(self, loader: DataLoader[Any], checkpoints: deeplink.Checkpoints, every: int) -> None:
        """Train on what is left of the sampler's epoch."""
        self.model.train()
        epoch = self.sampler.epoch
        for images, labels, receipts in loader:
            loss = nn.functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.digest.add(epoch, receipts.tolist())
            self.sampler.finished()
            deeplink.report(step=self.step, loss=loss.item(), epoch=epoch, samples=len(labels))  # DeepLink
            if self.step % every == 0:
                self.save(checkpoints)


def say(line: str) -> None:
    """Write one line to the job's output at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train, resuming where the last whole checkpoint stands."""
    args = options(2e-3, "Train a small convolutional network on packed images.")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    # DeepLink: samples come from the cache, each exactly once an epoch at any number of ranks.
    dataset = deeplink.Dataset(args.dataset, root=args.train_root, transform=Decode(args.size), receipts=True)
    sampler = ResumableSampler(dataset, batch_size=args.batch_size, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)

    model = DistributedDataParallel(network(len(dataset.classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    training = Training(model, optimizer, sampler, DeliveryDigest(), args.epochs)

    checkpoints = deeplink.Checkpoints(args.checkpoints)  # DeepLink: whole or not at all, fenced by attempt
    if (found := checkpoints.latest()) is not None:
        training.restore(found)
    while sampler.epoch < args.epochs:
        training.run_epoch(loader, checkpoints, args.checkpoint_every)
    training.save(checkpoints)

    total = merged(training.digest, args.epochs)
    test = deeplink.Dataset(args.dataset, root=args.test_root, transform=Decode(args.size))
    right = accuracy(model.module, test, 256)
    if dist.get_rank() == 0 and args.result:
        facts = {"accuracy": right, "steps": training.step, "epochs": args.epochs, "digest": total.state_dict()}
        write_text(args.result, json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
