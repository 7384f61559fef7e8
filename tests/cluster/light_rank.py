"""A rank as light as can be: it says who it is, counts steps, and saves them now and then. A user's file.

    light_rank.py FOLDER STEPS [PAUSE_S]

Rank 0 saves every 5 steps; whatever runs next goes on from there. FOLDER/end has all ranks end before their steps
are done. Each rank leaves FOLDER/<attempt>.rank<N> with its node, leaf and rank, and rank 0
FOLDER/<attempt>.members with the list it finds. Signals are noted in FOLDER/signals. FOLDER/fail holds
`RANK STEP CODE` if one is to fail.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import deeplink
from deeplink.core.publish import read_members
from deeplink.core.types import format_members

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.1
rank = int(os.environ["RANK"])
told: list[int] = []


def note(number: int, _frame: object) -> None:
    with (folder / "signals").open("a") as file:
        file.write(f"{rank} {signal.Signals(number).name}\n")
    told.append(number)


for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)

attempt = os.environ["DEEPLINK_ATTEMPT"]
leaf = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[-2:-1]
(folder / f"{attempt}.rank{rank}").write_text(f"{os.environ['DEEPLINK_NODE']} {leaf[0] if leaf else '-'} {rank}\n")
if rank == 0:
    (folder / f"{attempt}.members").write_text(format_members(read_members(os.environ["DEEPLINK_MEMBERS"])))
state = folder / "state"
step = int(state.read_text()) if state.exists() else 0
failing = [int(word) for word in (folder / "fail").read_text().split()] if (folder / "fail").exists() else []
sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']} begins at step {step}\n")
sys.stdout.flush()
while step < steps and signal.SIGTERM not in told and not (folder / "end").exists():
    time.sleep(pause)
    step += 1
    deeplink.report(step=step, loss=1 / step)
    if rank == 0 and step % 5 == 0:
        draft = folder / "state.draft"
        draft.write_text(str(step))
        draft.replace(state)
    if failing[:2] == [rank, step]:
        sys.exit(failing[2])
sys.stdout.write(f"rank {rank} ends at step {step}\n")
sys.exit(9 if signal.SIGTERM in told else 0)
