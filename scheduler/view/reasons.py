"""Why a job waits or ended, in words: Slurm's reasons (squeue(1), JOB REASON CODES); pure."""

from __future__ import annotations

_WORDS = {
    "Priority": "jobs of higher priority are before it",
    "Resources": "no suitable nodes are free",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "what it waits for can never come true: cancel it, or update --dependency",
    "BeginTime": "its start was put off (--begin, or a requeue, after which Slurm holds a job for a while)",
    "JobHeldUser": "its user holds it; `scontrol release` lets it go",
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
    "launch failed requeued held": "a launch failed; it is held: `scontrol release` lets it go",
}
_LIMITS = (("QOS", "a limit of its QOS"), ("Assoc", "a limit of its account"))


def in_words(reason: str) -> str:
    """Return what a reason means, the reason itself first; as it is where there are no words for it.

    >>> in_words("Resources"), in_words("ReqNodeNotAvail, UnavailableNodes:n1")[:50]
    ('Resources: no suitable nodes are free', 'ReqNodeNotAvail, UnavailableNodes:n1: nodes it ask')
    >>> in_words("QOSMaxGRESPerUser"), in_words("SomethingNew"), in_words("")
    ('QOSMaxGRESPerUser: a limit of its QOS is reached', 'SomethingNew', '')
    """
    key = reason.partition(",")[0].partition("(")[0].strip()
    words = _WORDS.get(key, "")
    if not words:
        words = next((f"{limit} is reached" for start, limit in _LIMITS if key.startswith(start)), "")
    return f"{reason}: {words}" if words else reason
