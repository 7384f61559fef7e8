"""A launcher that only beats: for what `deeplink run` would cure itself before the watchdog may. A user's file.

    beating.py ADDRESS

Its first incarnation makes 20 steps, misses the agent of its last node then, and has no way on; the next ones go
on from there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from deeplink.core.config import Config
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.launch.event_log import to_watchdog
from deeplink.scheduler.recovery.records import Beat, NodeRecord, Phase, ProgressPoint

address = sys.argv[1]
listed = subprocess.run(
    ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
)
nodes = tuple(NodeName(name) for name in listed.stdout.split())
attempt = Attempt(int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0")), 0)
deliver = to_watchdog(Config(watch=address))
assert deliver is not None
step = 15 * attempt.restart
while True:
    step = min(step + 1, 20) if attempt.restart == 0 else step + 1
    stranded = (step, attempt.restart) == (20, 0)
    beat = Beat(
        attempt=attempt,
        phase=Phase.STRANDED if stranded else Phase.RUNNING,
        user=os.environ["SLURM_JOB_USER"],
        job_name="beating",
        nodes=nodes,
        world_size=len(nodes),
        node_beats=tuple(
            NodeRecord(name=name, job=attempt.job, silent_s=10.0 if stranded and name == nodes[-1] else 0.0)
            for name in nodes
        ),
        progress=(ProgressPoint(attempt=attempt, step=step, unix=time.time()),),
    )
    deliver(beat)
    time.sleep(0.2)
