"""What squeue says about why a job waits: whether other nodes could help it; pure."""

from __future__ import annotations

# Slurm looks at these jobs whenever nodes become free. Measured with 22.05; docs/decisions/0016.
_WAITS = frozenset({"", "None", "Resources", "Priority"})
_NODES_BEGIN = ("ReqNodeNotAvail", "Nodes required for job are DOWN", "Nodes_required_for_job_are_DOWN")


def stopped(reason: str) -> str:
    """Return why no node that became free would start a job; empty where one could.

    Words that are not known here stop it too: dependencies, limits of accounts, licences, holds all do.

    >>> stopped("Resources"), stopped("ReqNodeNotAvail, UnavailableNodes:n1"), stopped("Dependency")
    ('', '', 'Dependency')
    """
    return "" if reason in _WAITS or reason.startswith(_NODES_BEGIN) else reason
