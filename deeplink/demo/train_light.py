"""Train a network of one hidden layer on packed images, in numpy: `deeplink.demo.train` where there is no torch.

The same options, the same checkpoints and the same result. Gradients go through rank 0, over plain sockets.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import deeplink
from deeplink.cache.reader import Reader
from deeplink.core.publish import write_text
from deeplink.data import DeliveryDigest, ResumableSampler
from deeplink.data.digest import receipt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HIDDEN = 64
TESTED_AT_ONCE = 256
MOMENTUM = 0.9
MEET_S, TURN_S = 60.0, 600.0  # How long ranks wait for each other at the start, and in each sum


def options(lr: float, about: str) -> argparse.Namespace:
    """Read the command line of both training scripts."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("dataset", help="name given to `deeplink pack`")
    parser.add_argument("--train-root", default="train")
    parser.add_argument("--test-root", default="test")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--size", type=int, default=28, help="pixels along an edge")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--result", type=Path, help="JSON file for accuracy and digests")
    return parser.parse_args()


class Ranks:
    """The sum of an array over all ranks; every rank must ask for it in the same order."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._peers = list(self._met(place)) if self.world > 1 else []

    def _met(self, place: tuple[str, int]) -> Iterator[socket.socket]:
        if self.rank:
            yield self._called(place)
            return
        with socket.create_server(("", place[1])) as server:
            server.settimeout(MEET_S)
            for _ in range(self.world - 1):
                peer, _address = server.accept()
                peer.settimeout(TURN_S)
                yield peer

    @staticmethod
    def _called(place: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + MEET_S
        while True:
            try:
                return socket.create_connection(place, timeout=TURN_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def sum(self, mine: np.ndarray) -> np.ndarray:
        """Return the sum; integers wrap."""
        if self.rank:
            self._peers[0].sendall(mine.tobytes())
            return self._received(self._peers[0], mine)
        total = mine.copy()
        for peer in self._peers:
            total += self._received(peer, mine)
        for peer in self._peers:
            peer.sendall(total.tobytes())
        return total

    @staticmethod
    def _received(peer: socket.socket, like: np.ndarray) -> np.ndarray:
        found = bytearray()
        while len(found) < like.nbytes:
            part = peer.recv(like.nbytes - len(found))
            if not part:
                raise ConnectionError("another rank has ended")
            found += part
        return np.frombuffer(found, like.dtype).reshape(like.shape)


class Images:
    """The images below a folder of a packed dataset: `deeplink.Dataset` is torch's."""

    def __init__(self, name: str, root: str, size: int) -> None:
        self._reader = Reader.open(name)
        self.name, self.version, self._size = name, self._reader.version, size
        self._rows = self._reader.index.rows_below(root)
        self._labels = self._reader.index.classed(root)
        self.classes = self._labels.classes

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return pixels, floats around 0 of shape (images, size * size), labels, and a receipt for each."""
        rows = [self._rows.start + position for position in positions]
        files = [bytes(view) for view in self._reader.read(rows)]
        images = np.stack([self._decoded(file) for file in files])
        return images, self._labels.of(np.array(positions)), list(map(receipt, rows, files))

    def _decoded(self, file: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(file)).convert("L")
        if image.size != (self._size, self._size):
            image = image.resize((self._size, self._size))
        return np.asarray(image, np.float64).ravel() / 255 - 0.5


@dataclass
class LightNetwork:
    """Its weights, and how they move; a step takes the mean gradient of all ranks."""

    weights: list[np.ndarray]
    speeds: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of(cls, pixels: int, classes: int) -> LightNetwork:
        """Return one that has learnt nothing, the same on every rank."""
        random = np.random.default_rng(0)
        first = random.normal(0, pixels**-0.5, (pixels, HIDDEN))
        weights = [first, np.zeros(HIDDEN), random.normal(0, HIDDEN**-0.5, (HIDDEN, classes)), np.zeros(classes)]
        return cls(weights, [np.zeros_like(part) for part in weights])

    def scores(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the hidden layer and the scores of (batch, pixels)."""
        first, first_bias, second, second_bias = self.weights
        hidden = np.maximum(images @ first + first_bias, 0)
        return hidden, hidden @ second + second_bias

    def learn(self, images: np.ndarray, labels: np.ndarray, ranks: Ranks, lr: float) -> float:
        """Take one step; returns this rank's loss."""
        hidden, scores = self.scores(images)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        chosen = np.arange(len(labels)), labels
        loss = float(-np.log(shares[chosen] + 1e-12).mean())
        shares[chosen] -= 1
        shares /= len(labels)
        below = (shares @ self.weights[2].T) * (hidden > 0)
        mine = [images.T @ below, below.sum(axis=0), hidden.T @ shares, shares.sum(axis=0)]
        total = ranks.sum(np.concatenate([part.ravel() for part in mine])) / ranks.world
        for number, weight in enumerate(self.weights):
            part, total = total[: weight.size], total[weight.size :]
            self.speeds[number] = MOMENTUM * self.speeds[number] - lr * part.reshape(weight.shape)
            self.weights[number] = weight + self.speeds[number]
        return loss


@dataclass
class LightTraining:
    """All that moves while training, and how it is saved and found again."""

    network: LightNetwork
    ranks: Ranks
    sampler: ResumableSampler
    digest: DeliveryDigest  # of what finished steps were fed
    epochs: int
    step: int = 0

    def merged(self) -> DeliveryDigest:
        """Return the sum of all ranks' digests."""
        total = self.ranks.sum(np.array(self.digest.table(self.epochs), np.int64))
        return DeliveryDigest.from_table(total.tolist())

    def restore(self, found: deeplink.Checkpoint) -> None:
        """Go on where a checkpoint stands."""
        with np.load(found.path / "state.npz") as state:
            parts = [state[f"arr_{number}"] for number in range(len(state.files))]
        half = len(parts) // 2
        self.network = LightNetwork(parts[:half], parts[half:])
        self.sampler.load_state_dict(found.meta["sampler"])
        self.step = found.step
        if self.ranks.rank == 0:  # the checkpoint holds the sum over ranks: one of them carries it on
            self.digest.load_state_dict(found.meta["digest"])

    def save(self, checkpoints: deeplink.Checkpoints) -> None:
        """Save from rank 0; every rank must call it."""
        total = self.merged()
        if self.ranks.rank == 0:
            meta = {"sampler": self.sampler.state_dict(), "digest": total.state_dict()}
            with checkpoints.save(step=self.step, meta=meta) as draft:
                np.savez(draft / "state.npz", *self.network.weights, *self.network.speeds)

    def run_epoch(self, dataset: Images, checkpoints: deeplink.Checkpoints, args: Any) -> None:
        """Train on what is left of the sampler's epoch."""
        epoch = self.sampler.epoch
        for rows in self.sampler:
            images, labels, receipts = dataset.read(rows)
            loss = self.network.learn(images, labels, self.ranks, args.lr)
            self.step += 1
            self.digest.add(epoch, receipts)
            self.sampler.finished()
            deeplink.report(step=self.step, loss=loss, epoch=epoch, samples=len(labels))
            if self.step % args.checkpoint_every == 0:
                self.save(checkpoints)

    def accuracy(self, dataset: Images) -> float:
        """Return the share of `dataset` that the network gets right; every rank tests its part."""
        right = np.zeros(2, np.int64)
        mine = range(self.ranks.rank, len(dataset), self.ranks.world)
        for start in range(0, len(mine), TESTED_AT_ONCE):
            images, labels, _receipts = dataset.read(mine[start : start + TESTED_AT_ONCE])
            right += int((self.network.scores(images)[1].argmax(axis=1) == labels).sum()), len(labels)
        right = self.ranks.sum(right)
        return float(right[0]) / float(right[1])


def main() -> None:
    """Train, resuming where the last whole checkpoint stands."""
    args = options(0.05, "Train a network of one hidden layer on packed images, in numpy.")
    ranks = Ranks()
    dataset = Images(args.dataset, args.train_root, args.size)
    sampler = ResumableSampler(dataset, batch_size=args.batch_size, seed=0)
    network = LightNetwork.of(args.size**2, len(dataset.classes))
    training = LightTraining(network, ranks, sampler, DeliveryDigest(), args.epochs)

    checkpoints = deeplink.Checkpoints(args.checkpoints)
    if (found := checkpoints.latest()) is not None:
        training.restore(found)
    while sampler.epoch < args.epochs:
        training.run_epoch(dataset, checkpoints, args)
    training.save(checkpoints)

    total = training.merged()
    right = training.accuracy(Images(args.dataset, args.test_root, args.size))
    if ranks.rank == 0 and args.result:
        facts = {"accuracy": right, "steps": training.step, "epochs": args.epochs, "digest": total.state_dict()}
        write_text(args.result, json.dumps(facts))


if __name__ == "__main__":
    main()
