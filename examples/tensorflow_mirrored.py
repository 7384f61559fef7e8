"""TensorFlow: `deeplink run --recipe tensorflow -- python examples/tensorflow_mirrored.py`. TF_CONFIG is set."""

from __future__ import annotations

import tensorflow as tf
from digits import BATCH, CLASSES, digits, introduce, say

import deeplink

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank, world = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
introduce("tensorflow", rank, world)


class Reporting(tf.keras.callbacks.Callback):
    """Tells DeepLink of every step."""

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Report the step and its loss."""
        deeplink.report(step=batch + 1, loss=float((logs or {}).get("loss", 0.0)))


with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(CLASSES)])
    model.compile(
        optimizer=tf.keras.optimizers.SGD(0.05),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
dataset = tf.data.Dataset.from_tensor_slices(digits()).shuffle(1000, seed=0).repeat().batch(BATCH)
history = model.fit(dataset, steps_per_epoch=30, verbose=0, callbacks=[Reporting()])
if rank == 0:
    say(f"loss {history.history['loss'][-1]:.3f}")
