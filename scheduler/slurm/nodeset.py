"""Folding and unfolding sets of node names (`n[0-2,5]`) without asking Slurm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Iterable

# ClusterShell gives @ ! & ^ and blanks a meaning of its own; Slurm has none of them in a node list.
_SLURM_CHARACTERS = re.compile(r"[\w.,\[\]-]*", re.ASCII)
MOST_NODES = 1 << 17
"""Twice as many as Slurm can hold: of a set that is unfolded every name takes memory."""
_NUMBERED = re.compile(r"(.+?)([0-9]{1,18})")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)(?:/([0-9]+))?")
_ENDLESS = 10**18
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", re.ASCII)
_PARTS = re.compile(r",(?![^\[]*\])")


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
    """
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - takes 11 ms

    if not _SLURM_CHARACTERS.fullmatch(text):
        raise NodeSetError(text, "it holds characters that no node list holds")
    if at_most(text) > MOST_NODES:
        raise NodeSetError(text[:200], "no cluster has so many nodes")
    try:
        return tuple(NodeName(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as problem:
        raise NodeSetError(text, str(problem)) from problem


def fold(names: Iterable[str]) -> str:
    """Return the shortest text for a set of names.

    >>> fold(["n2", "n0", "n1"])
    'n[0-2]'
    """
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - takes 11 ms

    listed = list(names)
    for name in listed:
        if not name or not _SLURM_CHARACTERS.fullmatch(name):
            raise NodeSetError(name, "it is no node name")
    try:
        return str(NodeSet.fromlist(listed, resolver=RESOLVER_NOGROUP))
    except NodeSetException as problem:
        raise NodeSetError(",".join(listed), str(problem)) from problem


def fold_for_files(names: Iterable[str]) -> str:
    """Return a short text for a set of names that Slurm's configuration files take.

    There a folded part must end the name (slurm.conf(5): "one of them must be at the end of the name"), so that
    `n1-ib,n2-ib` cannot be folded, and of `rack1-n1,rack2-n1` the first number is left alone.

    >>> fold_for_files(["n09", "n08", "n10", "n1-ib", "n2-ib", "r1-n1", "r2-n1"])
    'n1-ib,n2-ib,n[08-10],r1-n1,r2-n1'
    >>> fold_for_files(["n8", "n9", "n10", "n08", "1101", "1102"])
    '1101,1102,n[08,10,8-9]'
    """
    alone: list[str] = []
    numbered: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        found = _NUMBERED.fullmatch(name)
        if found and not name.isdigit():
            numbered.setdefault(found[1], []).append(found[2])
        else:
            alone.append(name)
    folded = [_folded(prefix, numbers) for prefix, numbers in numbered.items()]
    return ",".join(sorted([*alone, *folded]))


def _folded(prefix: str, digits: list[str]) -> str:
    """Fold names that differ in the number at their end; of numbers with leading zeros the width counts."""
    if len(digits) == 1:
        return f"{prefix}{digits[0]}"
    padded = {len(one) for one in digits if one[0] == "0" and len(one) > 1}
    widths: dict[int, list[int]] = {}
    for one in digits:
        widths.setdefault(len(one) if len(one) in padded else 0, []).append(int(one))
    parts: list[str] = []
    for width, numbers in sorted(widths.items(), reverse=True):
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        for first, last in runs:
            parts.append(f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}")
    return f"{prefix}[{','.join(parts)}]"


def at_most(text: str) -> int:
    """Return a bound on how many names a folded set stands for, without unfolding it; for text no one vouches for.

    >>> at_most("n[0-7,9],login1"), at_most("n[0-9][0-99]"), at_most("n[0-999999999]")
    (10, 1000, 1000000000)
    """
    total, product = 0, 1
    for part in re.findall(r"\[[^\]]*\]?|,", text):
        if part == ",":
            total, product = total + product, 1
            continue
        spans = sum(_span(item) for item in part.strip("[]").split(","))
        product = min(product * spans, _ENDLESS)  # a number of any length would cost its length at each part
    return total + product


def _span(item: str) -> int:
    found = _RANGE.fullmatch(item.strip())
    # Numbers too long to be counted with are as good as endless.
    if not found or len(item) > 40:  # noqa: PLR2004
        return 1 if not found else _ENDLESS
    return max(1, (int(found[2]) - int(found[1])) // max(1, int(found[3] or 1)) + 1)


def unfold_counts(text: str) -> list[int]:
    """Read a number for each node as Slurm writes them (SLURM_TASKS_PER_NODE); empty where it is something else.

    >>> unfold_counts("4,2,1(x2)"), unfold_counts("x")
    ([4, 2, 1, 1], [])
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part)
        if not found or int(found[1]) < 1 or len(counts) > MOST_NODES:
            return []
        counts += [int(found[1])] * min(int(found[2] or 1), MOST_NODES)
    return counts


def in_order(text: str) -> tuple[NodeName, ...]:
    """Return the names in a folded set in the order in which they are listed: counts for each node follow it."""
    return tuple(dict.fromkeys(name for part in _PARTS.split(text) for name in unfold(part)))
