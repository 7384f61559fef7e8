"""A rank that tells all it finds, leaves a process that left its session, and goes on until FOLDER/end is there.

    slot_rank.py FOLDER

FOLDER/ATTEMPT.rankN has its environment, CPUs and limits. Once FOLDER/fail is there rank 0 fails, if first.
What it left behind writes FOLDER/left.ATTEMPT every 50 ms.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

BEAT = """
import os, sys, time
os.setsid()
while True:
    open(sys.argv[1], "w").write(str(time.time()))
    time.sleep(0.05)
"""

folder, attempt = Path(sys.argv[1]), os.environ["DEEPLINK_ATTEMPT"]
started = time.time()
command = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BEAT!r}, sys.argv[1]])"
subprocess.run([sys.executable, "-c", command, str(folder / f"left.{attempt}.{os.environ['RANK']}")], check=True)
found = {
    "env": dict(os.environ),
    "cpus": sorted(os.sched_getaffinity(0)),
    "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)],
    "started": started,
}
draft = folder / f"draft.{os.environ['RANK']}"
draft.write_text(json.dumps(found))
draft.replace(folder / f"{attempt}.rank{os.environ['RANK']}")
while not (folder / "end").exists():
    time.sleep(0.05)
    if os.environ["RANK"] == "0" and attempt.endswith(".0.0") and (folder / "fail").exists():
        sys.exit(3)
