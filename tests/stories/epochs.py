"""A loop of a user's own: read a dataset for some epochs, and say where the samples of each came from.

python epochs.py DATASET EPOCHS
"""

import os
import sys
import time

import deeplink

BATCH, STEP_S = 64, 0.25

dataset = deeplink.Dataset(sys.argv[1])
before = dataset.stats()
for epoch in range(1, int(sys.argv[2]) + 1):
    for first in range(0, len(dataset), BATCH):
        dataset.__getitems__(range(first, min(first + BATCH, len(dataset))))
        time.sleep(STEP_S)
    now = dataset.stats()
    came = [
        f"{place} {getattr(now, f'{place}_samples') - getattr(before, f'{place}_samples')}"
        for place in ("local", "peer", "home", "source")
    ]
    where = f"{os.environ['SLURMD_NODENAME']} task {os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    sys.stdout.write(f"{where} epoch {epoch}: {', '.join(came)}\n")
    sys.stdout.flush()
    before = now
