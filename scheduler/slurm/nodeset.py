"""Folding and unfolding sets of node names (`n[0-2,5]`) without asking Slurm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from deeplink.errors import DeepLinkError
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Iterable

# ClusterShell gives @ ! & ^ and blanks a meaning of its own; Slurm has none of them in a node list.
_SLURM_CHARACTERS = re.compile(r"[\w.,\[\]-]*", re.ASCII)


class NodeSetError(DeepLinkError):
    """A text is no set of node names."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"{text!r} is no set of nodes: {problem}")
        self.text, self.problem = text, problem


def unfold(text: str) -> tuple[NodeName, ...]:
    """Return the names in a folded set, in natural order and each once.

    >>> unfold("n[8-10],login1")
    ('login1', 'n8', 'n9', 'n10')
    >>> unfold("")
    ()

    Raises:
        NodeSetError: the text does not parse.
    """
    if not _SLURM_CHARACTERS.fullmatch(text):
        raise NodeSetError(text, "it holds characters that no node list holds")
    try:
        return tuple(NodeName(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as problem:
        raise NodeSetError(text, str(problem)) from problem


def fold(names: Iterable[str]) -> str:
    """Return the shortest text for a set of names.

    >>> fold(["n2", "n0", "n1"])
    'n[0-2]'

    Raises:
        NodeSetError: a name is none.
    """
    listed = list(names)
    for name in listed:
        if not name or not _SLURM_CHARACTERS.fullmatch(name):
            raise NodeSetError(name, "it is no node name")
    try:
        return str(NodeSet.fromlist(listed, resolver=RESOLVER_NOGROUP))
    except NodeSetException as problem:
        raise NodeSetError(",".join(listed), str(problem)) from problem
