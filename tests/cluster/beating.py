"""A launcher that only beats: for what `deeplink run` would cure itself before the watchdog may. A user's file.

    beating.py ADDRESS STEP_TIMEOUT_S

Its first incarnation makes 20 steps and no more; the next ones go on from there. Only what makes no more steps has
the limit: a machine that stands still for a moment must not make a hang of what goes on.
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

address, limit, PATIENCE_S = sys.argv[1], float(sys.argv[2]), 600.0
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
    beat = Beat(
        attempt=attempt,
        phase=Phase.RUNNING,
        user=os.environ["SLURM_JOB_USER"],
        job_name="beating",
        nodes=nodes,
        world_size=len(nodes),
        node_beats=tuple(NodeRecord(name=name, job=attempt.job) for name in nodes),
        progress=(ProgressPoint(attempt=attempt, step=step, unix=time.time()),),
        step_timeout_s=limit if (step, attempt.restart) == (20, 0) else PATIENCE_S,
    )
    deliver(beat)
    time.sleep(0.2)
