"""The columns of sinfo that a survey of the cluster asks for; pure."""

from __future__ import annotations

FIELDS = (
    "NodeList",
    "Partition",
    "Available",
    "Time",
    "OverSubscribe",
    "StateComplete",
    "Features_act",
    "Gres",
    "GresUsed",
    "CPUsState",
    "Memory",
    "AllocMem",
)
SEPARATOR = "|"
ARGUMENTS = ("sinfo", "-h", "-a", "-N", "-O", ",".join(f"{name}:{SEPARATOR}" for name in FIELDS))
"""What `state.parse` reads: a line for each node in each partition."""
