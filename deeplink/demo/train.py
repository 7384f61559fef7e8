"""Train a small convolutional network on packed images: the script a user would write, nothing of it for show.

Plain PyTorch DDP. What DeepLink adds is marked: where the samples come from, where training stands, and a line that
says how far it is. Start it with `deeplink run -- python -m deeplink.demo.train ...`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import deeplink
from deeplink.data import DeliveryDigest, ResumableSampler
from deeplink.publish import write_text


class Decode:
    """Image file bytes to a (1, size, size) tensor of floats around 0; a class, so that it can be pickled."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, data: bytes) -> torch.Tensor:
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


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", help="name given to `deeplink pack`")
    parser.add_argument("--train-root", default="train")
    parser.add_argument("--test-root", default="test")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--size", type=int, default=28, help="pixels along an edge")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--result", type=Path, help="JSON file for accuracy and digests")
    return parser.parse_args()


def main() -> None:
    """Train, resuming where the last whole checkpoint stands."""
    args = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    dataset = deeplink.Dataset(args.dataset, root=args.train_root, transform=Decode(args.size), receipts=True)  # DeepLink
    sampler = ResumableSampler(dataset, batch_size=args.batch_size, seed=0)  # DeepLink: exactly once, resumable
    loader = DataLoader(dataset, batch_sampler=sampler)
    digest = DeliveryDigest()  # DeepLink: the audit of what finished steps were fed

    model = DistributedDataParallel(network(len(dataset.classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0

    checkpoints = deeplink.Checkpoints(args.checkpoints)  # DeepLink: whole or not at all, fenced by attempt
    found = checkpoints.latest()
    if found is not None:
        state: dict[str, Any] = torch.load(found.path / "state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(found.meta["sampler"])
        step = found.step
        if rank == 0:  # the checkpoint holds the sum over ranks: one of them carries it on
            digest.load_state_dict(found.meta["digest"])
            print(f"resumed at step {step}, epoch {sampler.epoch}, from {found.path.name}", flush=True)

    def save() -> None:
        total = merged(digest, args.epochs)
        if rank == 0:
            meta = {"sampler": sampler.state_dict(), "digest": total.state_dict()}
            with checkpoints.save(step=step, meta=meta) as draft:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, draft / "state.pt")

    while sampler.epoch < args.epochs:
        model.train()
        epoch = sampler.epoch
        for images, labels, receipts in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            digest.add(epoch, receipts.tolist())
            sampler.finished()
            deeplink.report(step=step, loss=loss.item(), epoch=epoch, samples=len(labels))  # DeepLink
            if step % args.checkpoint_every == 0:
                save()
    save()

    total = merged(digest, args.epochs)
    test = deeplink.Dataset(args.dataset, root=args.test_root, transform=Decode(args.size))
    right = accuracy(model.module, test, 256)
    if rank == 0 and args.result:
        result = {
            "accuracy": right,
            "steps": step,
            "epochs": args.epochs,
            "attempt": os.environ.get("DEEPLINK_ATTEMPT", ""),
            "digest": total.state_dict(),
        }
        write_text(args.result, json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
