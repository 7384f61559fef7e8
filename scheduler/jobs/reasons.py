"""Why a job waits or ended, in words: Slurm's reasons (squeue(1), JOB REASON CODES); pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.recovery.evidence import TAG
from deeplink.scheduler.slurm.states import LAUNCH_FAILED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.core.finding import Finding
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow

_WORDS = {
    "Priority": "jobs of higher priority are before it",
    "Resources": "no suitable nodes are free",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "what it waits for can never come true: cancel it, or update --dependency",
    "BeginTime": "its start was put off (--begin, or a requeue, after which Slurm holds a job for a while)",
    "JobHeldUser": "its user holds it",
    "job requeued in held state": "it was put back into the queue and is held",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "so many tasks of its array run already as may at once",
    "ReqNodeNotAvail": "nodes it asks for are not available",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "PartitionConfig": "its partition does not allow what it asks for",
    "NodeDown": "a node it needs is down",
    "BadConstraints": "no node has what it asks for (--constraint)",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a licence",
    "NonZeroExitCode": "it ended with an exit code other than 0",
    "RaisedSignal": "a signal ended it",
    "JobLaunchFailure": "it could not be launched; its nodes' prolog may have failed",
    "TimeLimit": "its time was up",
    "InactiveLimit": "it did nothing for too long",
    "SystemFailure": "Slurm, a file system or the network failed",
    "Cleaning": "it is being cleaned up after",
    "Prolog": "its prolog runs",
    "FailedNode": "a node failed",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "BurstBufferResources": "no burst buffer is free",
    "FrontEndDown": "no front end is available",
    "launch failed requeued held": "a launch failed, and it is held",
}
_LIMITS = (("QOS", "a limit of its QOS"), ("Assoc", "a limit of its account"))


def in_words(reason: str) -> str:
    """Return what a reason means, the reason itself first; as it is where there are no words for it."""
    key = reason.partition(",")[0].partition("(")[0].strip()
    words = _WORDS.get(key, "")
    if not words:
        words = next((f"{limit} is reached" for start, limit in _LIMITS if key.startswith(start)), "")
    return f"{reason}: {words}" if words else reason


def release_of(job: JobRow, *, whole: bool = False) -> str:
    """Return the command that lets a held job, or its whole array, start; empty where no one holds it."""
    if not job.held and job.reason != LAUNCH_FAILED:
        return ""
    command = f"`scontrol release {job.address.whole if whole or job.address.is_component else job.address}`"
    if job.reason.startswith("JobHeldAdmin"):
        return f"held by an administrator: an operator's {command} lets it start"
    return f"held: {command} lets it start"


def in_short(finding: Finding) -> str:
    """Return what a check of a node finds wrong, in one line."""
    return f"{finding.check} ({finding.severity.action}): {finding.text}"


def help_for(name: str, row: NodeRow | None, findings: Sequence[Finding]) -> str:
    """Return the command that helps a node of which checks found something, or that we drained; else nothing."""
    if row is not None and row.reason.startswith(TAG) and (row.drained or row.down):
        return f"once it is mended: `scontrol update nodename={name} state=resume`"
    return f"`deeplink health` on {name} looks again" if findings else ""
