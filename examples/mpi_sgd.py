"""MPI: `deeplink run --recipe mpi -- python examples/mpi_sgd.py`, with mpi4py and MPICH or its kin."""

from __future__ import annotations

import numpy as np
from digits import CLASSES, PIXELS, STEPS, digits, introduce, say, share
from mpi4py import MPI

import deeplink

everyone = MPI.COMM_WORLD
rank, world = everyone.Get_rank(), everyone.Get_size()
introduce("mpi", rank, world)

pictures, classes = digits()
weights = np.zeros((PIXELS, CLASSES), np.float32)
for step in range(STEPS):
    rows = share(step, rank, world)
    scores = pictures[rows] @ weights
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    loss = float(-np.log(chances[np.arange(len(rows)), classes[rows]]).mean())
    chances[np.arange(len(rows)), classes[rows]] -= 1
    slope = (pictures[rows].T @ chances / len(rows)).astype(np.float32)
    everyone.Allreduce(MPI.IN_PLACE, slope)
    weights -= 0.05 * slope / world
    deeplink.report(step=step + 1, loss=loss)
if rank == 0:
    say(f"loss {loss:.3f} after step {STEPS}")
