"""Generic resources as Slurm writes them, in each place where it does: one grammar; pure.

`gpu:4`, `gpu:a100:4(S:0-1)`, `gpu:(null):3(IDX:0-2)`, `gpu:1g.5gb:7`, `gpu`, `bandwidth:lustre:no_consume:4G`,
`gres:gpu:2`, `gres/gpu:a100=4`, `(null)`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from deeplink.errors import DeepLinkError

GPU = "gpu"


class GresTextError(DeepLinkError):
    """A text is no list of generic resources."""

    exit_code = 2

    def __init__(self, text: str, what: str = "list of generic resources") -> None:
        super().__init__(f"{text[:200]!r} is no {what}", remedy="See GRES in gres.conf(5) and sbatch(1).")
        self.text, self.what = text, what


class Gres(NamedTuple):
    """One generic resource: its name, its type (empty for none), and how much of it."""

    name: str
    kind: str
    amount: int


_NONE = frozenset({"", "(null)", "n/a", "none", "gres:none"})
_UNTYPED = frozenset({"(null)", "no_consume"})
# What is in parentheses behind a resource (sockets, indices, shares) may hold commas.
_ENTRY = re.compile(r"(?:\(null\)|[^,()])+(?:\([^()]*\))?")
_BRACKETS = re.compile(r"\((?!null\))[^()]*\)\Z", re.IGNORECASE)
_COUNT = re.compile(r"([0-9]{1,15})([kmgtp]?)", re.ASCII | re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NAME = re.compile(r"[a-z_][\w-]*", re.ASCII | re.IGNORECASE)
_KIND = re.compile(r"[a-z0-9_][\w.+-]*", re.ASCII | re.IGNORECASE)
_OTHER = re.compile(r"(?=.*[a-z])\S+")
_LETTER = re.compile(r"[a-z]", re.IGNORECASE)


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Read a list of generic resources, each of which must be well formed.

    >>> parse_gres("gpu:(null):3(IDX:0-2),shard:a100:16")
    (Gres(name='gpu', kind='', amount=3), Gres(name='shard', kind='a100', amount=16))

    Raises:
        GresTextError: it is none.
    """
    return tuple(_gres(words, text) for words in _entries(text))


def _entries(text: str) -> list[list[str]]:
    """Split a list into its resources, and each into its name and what stands behind it."""
    said = text.strip()
    if said.casefold() in _NONE:
        return []
    entries = _ENTRY.findall(said)
    if ",".join(entries) != said:
        raise GresTextError(text)
    bare = (_BRACKETS.sub("", entry.strip()) for entry in entries)
    # In a TRES list a count stands behind "=".
    return [re.sub(r"\Agres[:/]", "", ":".join(entry.rsplit("=", 1))).split(":") for entry in bare]


def _gpus(text: str) -> list[Gres]:
    """Read the GPUs of what Slurm wrote: sites name their other resources, and licenses, as they like."""
    found = []
    for words in _entries(text):
        name = words[0].casefold()
        if name == GPU:
            found.append(_gres(words, text))
        elif not _OTHER.fullmatch(name):
            raise GresTextError(text)
    return found


def _gres(words: list[str], text: str) -> Gres:
    name, *parts = words
    if not _NAME.fullmatch(name) or len(parts) > 3 or "" in parts:  # noqa: PLR2004 - type, no_consume, count
        raise GresTextError(text)
    count = _count(parts[-1]) if parts else None
    if count is not None:
        parts.pop()
    kinds = [part for part in parts if part.casefold() not in _UNTYPED]
    # A type of digits alone (3090) is one where a count stands behind it; else it would be a broken count.
    strange = any(not _KIND.fullmatch(kind) or (count is None and not _LETTER.search(kind)) for kind in kinds)
    if len(kinds) > 1 or strange or (count is None and "(null)" in parts):
        raise GresTextError(text)
    return Gres(name.casefold(), kinds[0] if kinds else "", 1 if count is None else count)


def _count(text: str) -> int | None:
    found = _COUNT.fullmatch(text)
    return int(found[1]) << 10 * _POWER[found[2].casefold()] if found else None


def gpus_in(text: str, kind: str = "") -> int:
    """Count the GPUs of a list, of all types or of one.

    A TRES list tells them in all and by type again; those in all count then.

    >>> gpus_in("gpu:a100:4(S:0-1),gpu:1,shard:8"), gpus_in("gpu:a100:4,gpu:1", "a100"), gpus_in("cpu=4")
    (5, 4, 0)
    >>> gpus_in("cpu=4,gres/gpu=4,gres/gpu:a100=4")
    4

    Raises:
        GresTextError: it is no such list.
    """
    gpus = _gpus(text)
    if kind:
        return sum(one.amount for one in gpus if one.kind.casefold() == kind.casefold())
    total = [one.amount for one in gpus if not one.kind]
    return sum(total) if total and "gres/" in text else sum(one.amount for one in gpus)


def gpus_used(text: str, kind: str = "") -> int:
    """Count the GPUs of a list of what is used; those without a type may be of any.

    >>> gpus_used("gpu:a100:1(IDX:0),gpu:(null):2(IDX:1-2)", "a100")
    3

    Raises:
        GresTextError: it is no such list.
    """
    if not kind:
        return gpus_in(text)
    kinds = {"", kind.casefold()}
    return sum(one.amount for one in _gpus(text) if one.kind.casefold() in kinds)


def gpus_asked(text: str) -> tuple[str, int]:
    """Read how many GPUs of which type `--gres` asks for; ("", 0) for none.

    >>> gpus_asked("gpu:8"), gpus_asked("gpu:a100:4"), gpus_asked("gpu"), gpus_asked("none")
    (('', 8), ('a100', 4), ('', 1), ('', 0))

    Raises:
        GresTextError: it is no list of generic resources, or asks for others, or for several types.
    """
    asked = parse_gres(text)
    if not asked:
        return "", 0
    if len(asked) > 1 or asked[0].name != GPU:
        raise GresTextError(text, "number of GPUs of one type")
    return asked[0].kind, asked[0].amount
