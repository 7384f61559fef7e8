"""A rank that saves on its node's own disk, and says where it goes on from. A user's file.

    keeping_rank.py FOLDER STEPS [LEASE_S [EVERY SAVER]]

The last rank (or SAVER) saves every 5 steps (or EVERY), and when the job is about to end; FOLDER/run is the shared
folder of checkpoints, /local/ssd/run the node's own. FOLDER/end has all ranks end before their steps are done.
Each rank leaves FOLDER/<attempt>.from<N> with the step it begins at and where that was found.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deeplink

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
lease_s = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
every = int(sys.argv[4]) if len(sys.argv) > 4 else 5
saver = int(sys.argv[5]) if len(sys.argv) > 5 else world - 1
checkpoints = deeplink.Checkpoints(folder / "run", local="/local/ssd/run", lease_s=lease_s)
found = checkpoints.latest()
step = found.step if found else 0
state = (found.path / "state").read_text() if found else "0"
attempt = os.environ["DEEPLINK_ATTEMPT"]
origin = found.origin if found else "nowhere"
(folder / f"{attempt}.from{rank}").write_text(f"{step} {state} {os.environ['DEEPLINK_NODE']} {origin}\n")
while step < steps and not (folder / "end").exists():
    time.sleep(0.1)
    step += 1
    deeplink.report(step=step)
    if (step % every == 0 or deeplink.should_save(step=step)) and rank == saver:
        with checkpoints.save(step=step) as draft:
            (draft / "state").write_text(str(step))
        (folder / "saved").write_text(str(step))
