"""JAX: `deeplink run --recipe jax -- python examples/jax_sgd.py`. The coordinator is rank 0 of the launch."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
from digits import CLASSES, PIXELS, STEPS, digits, introduce, say, share
from jax.experimental import multihost_utils

import deeplink

# Outside of Slurm JAX cannot find out who is who by itself; inside, these are what Slurm says, too.
jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
rank, world = jax.process_index(), jax.process_count()
introduce("jax", rank, world)


def loss_of(weights: jax.Array, batch: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of a linear classifier."""
    return -jnp.mean(jax.nn.log_softmax(batch @ weights)[jnp.arange(len(labels)), labels])


pictures, classes = digits()
weights = jnp.zeros((PIXELS, CLASSES))
slope = jax.jit(jax.value_and_grad(loss_of))
for step in range(STEPS):
    rows = share(step, rank, world)
    loss, own = slope(weights, pictures[rows], classes[rows])
    weights -= 0.05 * multihost_utils.process_allgather(own).reshape(world, PIXELS, CLASSES).mean(axis=0)
    deeplink.report(step=step + 1, loss=float(loss))
if rank == 0:
    say(f"loss {float(loss):.3f} after step {STEPS}")
jax.distributed.shutdown()
