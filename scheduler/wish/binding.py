"""Nodes wished by name as Slurm's own record of a job tells them: `deeplink-wish=NODES` in its comment; pure.

Nodes that are named bind a job, also when it is queued again, and Slurm lets nobody change them while it runs. The
mark says that they are a wish: so they can be taken off a job that waits, whatever became of who named them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.nodeset import fold, unfold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from deeplink.types import NodeName

WAIT_S = 5.0
"""How long a job may wait with nodes named. Slurm's main scheduler comes by within 2.6 s (measured)."""
_MARK = "deeplink-wish="
_JOINT = " | "
_OURS = re.compile(rf"^{_MARK}(\S+)(?: \| |\Z)")
# Slurm has not come to such jobs since they were last changed. Measured with 22.05; docs/decisions/0016.
_UNSEEN = frozenset({"", "None", "Priority", "BeginTime"})


def marked(comment: str, nodes: Iterable[NodeName]) -> str:
    """Return a job's comment with the mark of these nodes.

    >>> marked("mine", ("n0", "n1")), unmarked("deeplink-wish=n[0-1] | mine")
    ('deeplink-wish=n[0-1] | mine', 'mine')
    """
    return _JOINT.join(filter(None, (f"{_MARK}{fold(nodes)}", unmarked(comment))))


def unmarked(comment: str) -> str:
    """Return a job's comment without a mark."""
    return _OURS.sub("", comment)


def is_wish(comment: str, required: Collection[NodeName]) -> bool:
    """Whether the nodes that a job requires are those of its mark: nobody else has named any since."""
    found = _OURS.search(comment)
    try:
        return found is not None and bool(required) and {*unfold(found[1])} == {*required}
    except DeepLinkError:
        return False


def is_due(reason: str, waited_s: float) -> bool:
    """Whether the nodes are to be taken off a waiting job: Slurm looked and did not start it, or it waits long.

    >>> is_due("Resources", 0.0), is_due("", 0.0), is_due("", 5.0)
    (True, False, True)
    """
    return reason not in _UNSEEN or waited_s >= WAIT_S


def taking_back(comment: str) -> dict[str, str]:
    """Return what to change about a job so that it may start anywhere, in scontrol's words."""
    return {"ReqNodeList": "", "Comment": unmarked(comment)}


def naming(comment: str, nodes: Iterable[NodeName]) -> dict[str, str]:
    """Return what to change about a job so that it is wished to start on these nodes, in scontrol's words."""
    listed = tuple(nodes)
    return {"ReqNodeList": fold(listed), "Comment": marked(comment, listed)}
