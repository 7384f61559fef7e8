"""What shuffle quality means for training: small images, packed class by class, a classifier trained on them."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from deeplink.data import BlockOrder, Blocks
from deeplink.data.order import shuffled

EPOCHS, STEP, SEEDS = 5, 16, 6


class Digits:
    """scikit-learn's handwritten digits, sorted by class as a packed folder is; each fifth is for testing."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        images = images / 16
        is_test = np.arange(len(images)) % 5 == 0
        self.test = images[is_test], labels[is_test]
        images, labels = images[~is_test], labels[~is_test]
        order = np.argsort(labels, kind="stable")
        self.images, self.labels = images[order], labels[order]

    def accuracy(self, blocks: BlockOrder | None, seed: int) -> float:
        """Train softmax regression by SGD with a falling rate; return the share of test images told right."""
        count = len(self.images)
        places = np.arange(count)
        weights, bias = np.zeros((64, 10)), np.zeros(10)
        for epoch in range(EPOCHS):
            if blocks is None:
                rows = shuffled(places, count, version="v", seed=seed, epoch=epoch)
            else:
                rows = blocks.rows(places, epoch)
            for start in range(0, count, STEP):
                step = rows[start : start + STEP]
                chance = np.exp(self.images[step] @ weights + bias)
                chance /= chance.sum(axis=1, keepdims=True)
                chance[np.arange(len(step)), self.labels[step]] -= 1
                rate = 0.3 * (1 - epoch / EPOCHS) / len(step)
                weights -= rate * self.images[step].T @ chance
                bias -= rate * chance.sum(axis=0)
        images, labels = self.test
        return float(((images @ weights + bias).argmax(axis=1) == labels).mean())

    def mean(self, block: int, window: int) -> tuple[float, float]:
        """Return the shuffle quality of blocks of so many samples, and the mean accuracy over seeds."""
        bounds = np.minimum(np.arange(0, len(self.images) + block, block), len(self.images))
        orders = [BlockOrder(Blocks(bounds), window, version="v", seed=seed) for seed in range(SEEDS)]
        found = [self.accuracy(order, seed) for seed, order in enumerate(orders)]
        return orders[0].quality(STEP), float(np.mean(found))


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def test_an_order_of_the_quality_that_is_the_default_trains_as_an_exact_shuffle(digits: Digits) -> None:
    exact = np.mean([digits.accuracy(None, seed) for seed in range(SEEDS)])
    quality, found = digits.mean(4, 45)
    assert 0.8 <= quality < 0.9
    # One run's accuracy varies by 0.004 from seed to seed.
    assert abs(found - exact) < 0.006
    assert exact > 0.92


def test_blocks_one_after_another_do_not_and_the_quality_says_so(digits: Digits) -> None:
    quality, found = digits.mean(144, 1)
    assert quality < 0.2
    assert found < 0.88
