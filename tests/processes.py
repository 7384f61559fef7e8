"""Processes that a test starts: commands, what is below them, and ports for them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from pathlib import Path

from tests.waiting import LIMIT_S

_PATIENT = f"""
import sys
from deeplink.cli import main
from deeplink.ops import submit
from deeplink.scheduler.liveness import watchdog_client
from deeplink.scheduler.placement.hint import making
submit.TRIAL_S = making.ANSWER_S = watchdog_client.asked_watchdog.__kwdefaults__["timeout_s"] = {LIMIT_S}
sys.argv = ["deeplink", "sbatch", *sys.argv[1:]]
main()
"""
PATIENT_SBATCH = (sys.executable, "-c", _PATIENT)
"""`deeplink sbatch` that waits for Slurm and the watchdog as long as a test may, not as long as a user: on a busy
machine they take longer than the 1 and 3 s after which a submission does without a hint."""


def free_ports(count: int) -> list[int]:
    """Return so many ports that are free now, and that the kernel gives nobody who does not ask for them."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = 12_000 + secrets.randbelow(20_000)  # tests' own random numbers repeat
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process: of an agent, whose process keeps its sockets, the one that serves."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
