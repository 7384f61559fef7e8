"""States of jobs and nodes, and generic resources, as Slurm writes them; pure.

A state that is not here is OTHER, of which nothing is known. Generic resources have one grammar everywhere:
`gpu:4`, `gpu:a100:4(S:0-1)`, `gpu:(null):3(IDX:0-2)`, `gpu:1g.5gb:7`, `gpu`, `bandwidth:lustre:no_consume:4G`,
`gres:gpu:2`, `gres/gpu:a100=4`, `(null)`.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from deeplink.core.errors import DeepLinkError

GPU = "gpu"
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
_WORD = re.compile(r"[A-Z][A-Z_]*", re.ASCII)
HELD = ("JobHeldUser", "JobHeldAdmin", "job requeued in held state")
"""How the reasons begin of jobs that wait until somebody releases them (measured with 22.05)."""
LAUNCH_FAILED = "launch failed requeued held"
"""The reason of jobs that a node did not start: Slurm holds them, and their owner may release them (22.05)."""


class SlurmTextError(DeepLinkError):
    """Slurm wrote something that this version cannot read."""

    def __init__(self, command: str, text: str, problem: str = "") -> None:
        super().__init__(
            problem or f"cannot read what `{command}` wrote: {text[:200]!r}",
            remedy="Please report it together with `sinfo --version`.",
        )
        self.text = text


class SlurmValueError(DeepLinkError):
    """A text is no value of the kind that it should be, in Slurm's words."""

    def __init__(self, text: str, problem: str, remedy: str, *, exit_code: int = 2) -> None:
        super().__init__(f"{text[:200]!r} {problem}", remedy=remedy, exit_code=exit_code)
        self.text = text


class JobState(Enum):
    """Job states: squeue(1), JOB STATE CODES, and those of later versions (LAUNCH_FAILED, EXPEDITING ...).

    OTHER is one that a newer Slurm has: one job in it hides no other. It is taken for neither running, waiting nor
    ended.
    """

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    DEADLINE = "DEADLINE"
    EXPEDITING = "EXPEDITING"
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OTHER = "OTHER"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PENDING = "PENDING"
    POWER_UP_NODE = "POWER_UP_NODE"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    RUNNING = "RUNNING"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    TIMEOUT = "TIMEOUT"

    @property
    def final(self) -> bool:
        """Whether a job in this state never runs again by itself."""
        return self in _FINAL_JOB_STATES

    @classmethod
    def parse(cls, word: str) -> JobState:
        """Read a state as squeue, scontrol or sacct print it.

        >>> JobState.parse("CANCELLED by 1000"), JobState.parse("CANCELLED+")
        (<JobState.CANCELLED: 'CANCELLED'>, <JobState.CANCELLED: 'CANCELLED'>)
        """
        state = word.split(" ", 1)[0].removesuffix("+")
        if _WORD.fullmatch(state) is None:
            raise _strange_state("job", word)
        return cls(state) if state in cls.__members__ else cls.OTHER


_FINAL_JOB_STATES = frozenset(
    {
        JobState.BOOT_FAIL,
        JobState.CANCELLED,
        JobState.COMPLETED,
        JobState.DEADLINE,
        JobState.FAILED,
        JobState.LAUNCH_FAILED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.RECONFIG_FAIL,
        JobState.REVOKED,
        JobState.TIMEOUT,
    }
)


class NodeState(Enum):
    """The base of a node's state; what comes on top is a `NodeFlag`."""

    ALLOCATED = "ALLOCATED"
    DOWN = "DOWN"
    ERROR = "ERROR"
    FUTURE = "FUTURE"
    IDLE = "IDLE"
    INVALID = "INVALID"
    MIXED = "MIXED"
    UNKNOWN = "UNKNOWN"


class NodeFlag(Enum):
    """What scontrol adds to a node's base state with `+`.

    OTHER is one that a newer Slurm has: one node with it hides no other, and nothing is put on it.
    """

    BLOCKED = "BLOCKED"
    CLOUD = "CLOUD"
    COMPLETING = "COMPLETING"
    DRAIN = "DRAIN"
    DYNAMIC_FUTURE = "DYNAMIC_FUTURE"
    DYNAMIC_NORM = "DYNAMIC_NORM"
    EXTERNAL = "EXTERNAL"
    FAIL = "FAIL"
    INVALID_REG = "INVALID_REG"
    MAINTENANCE = "MAINTENANCE"
    NOT_RESPONDING = "NOT_RESPONDING"
    OTHER = "OTHER"
    PERFCTRS = "PERFCTRS"
    PLANNED = "PLANNED"
    POWERED_DOWN = "POWERED_DOWN"
    POWERING_DOWN = "POWERING_DOWN"
    POWERING_UP = "POWERING_UP"
    POWER_DOWN = "POWER_DOWN"
    POWER_DRAIN = "POWER_DRAIN"
    POWER_UP = "POWER_UP"
    REBOOT_CANCEL = "REBOOT_CANCEL"
    REBOOT_ISSUED = "REBOOT_ISSUED"
    REBOOT_REQUESTED = "REBOOT_REQUESTED"
    RESERVED = "RESERVED"
    RESUME = "RESUME"
    UNDRAIN = "UNDRAIN"


LASTING_FLAGS = frozenset({NodeFlag.CLOUD, NodeFlag.DYNAMIC_NORM, NodeFlag.EXTERNAL})
"""What a node is all its life, and what keeps no job off it."""
UNSETTLED_FLAGS = frozenset(
    {
        *(NodeFlag.COMPLETING, NodeFlag.NOT_RESPONDING, NodeFlag.POWERING_UP, NodeFlag.POWERED_DOWN),
        NodeFlag.OTHER,
    }
)
"""With these a node that is idle may have something in use all the same."""

# The marks sinfo and older scontrols put behind the word instead of a flag (sinfo(1), NODE STATE CODES).
_MARKS = {
    "*": NodeFlag.NOT_RESPONDING,
    "~": NodeFlag.POWERED_DOWN,
    "#": NodeFlag.POWERING_UP,
    "!": NodeFlag.POWER_DOWN,
    "%": NodeFlag.POWERING_DOWN,
    "$": NodeFlag.MAINTENANCE,
    "@": NodeFlag.REBOOT_REQUESTED,
    "^": NodeFlag.REBOOT_ISSUED,
    "-": NodeFlag.PLANNED,
    "+": NodeFlag.COMPLETING,
}

# sinfo folds base and flags into one word.
_FOLDED = {
    "BLOCKED": (NodeState.IDLE, NodeFlag.BLOCKED),
    "COMPLETING": (NodeState.IDLE, NodeFlag.COMPLETING),
    "DRAINED": (NodeState.IDLE, NodeFlag.DRAIN),
    "DRAINING": (NodeState.ALLOCATED, NodeFlag.DRAIN),
    "EXTERNAL": (NodeState.IDLE, NodeFlag.EXTERNAL),
    "FAIL": (NodeState.IDLE, NodeFlag.FAIL),
    "FAILING": (NodeState.ALLOCATED, NodeFlag.FAIL),
    "INVAL": (NodeState.IDLE, NodeFlag.INVALID_REG),
    "MAINT": (NodeState.IDLE, NodeFlag.MAINTENANCE),
    "PERFCTRS": (NodeState.IDLE, NodeFlag.PERFCTRS),
    "PLANNED": (NodeState.IDLE, NodeFlag.PLANNED),
    "POWERED_DOWN": (NodeState.IDLE, NodeFlag.POWERED_DOWN),
    "POWERING_DOWN": (NodeState.IDLE, NodeFlag.POWERING_DOWN),
    "POWERING_UP": (NodeState.IDLE, NodeFlag.POWERING_UP),
    "POWER_DOWN": (NodeState.IDLE, NodeFlag.POWER_DOWN),
    "REBOOT_ISSUED": (NodeState.IDLE, NodeFlag.REBOOT_ISSUED),
    "REBOOT_REQUESTED": (NodeState.IDLE, NodeFlag.REBOOT_REQUESTED),
    "RESERVED": (NodeState.IDLE, NodeFlag.RESERVED),
}


def parse_node_state(text: str) -> tuple[NodeState, frozenset[NodeFlag]]:
    """Read a node's state as scontrol (`DOWN+NOT_RESPONDING`) or sinfo (`drained*`) print it.

    >>> parse_node_state("allocated*") == parse_node_state("ALLOCATED+NOT_RESPONDING")
    True
    """
    flags = set()
    words = []
    for part in text.upper().strip().split("+"):
        word = part
        while word and word[-1] in _MARKS:
            flags.add(_MARKS[word[-1]])
            word = word[:-1]
        words.append(word)
    if len(words) > 1 and not words[-1]:  # sinfo's `allocated+`
        flags.add(NodeFlag.COMPLETING)
        words.pop()
    if not all(map(_WORD.fullmatch, words)):
        raise _strange_state("node", text)
    if words[0] in _FOLDED:
        base, flag = _FOLDED[words[0]]
        flags.add(flag)
    elif words[0] in NodeState.__members__:
        base = NodeState(words[0])
    else:
        base = NodeState.UNKNOWN
        flags.add(NodeFlag.OTHER)
    flags.update(NodeFlag(word) if word in NodeFlag.__members__ else NodeFlag.OTHER for word in words[1:])
    return base, frozenset(flags)


class Gres(NamedTuple):
    """One generic resource: its name, its type (empty for none), and how much of it."""

    name: str
    kind: str
    amount: int


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Read a list of generic resources, each of which must be well formed.

    >>> parse_gres("gpu:(null):3(IDX:0-2),shard:a100:16")
    (Gres(name='gpu', kind='', amount=3), Gres(name='shard', kind='a100', amount=16))
    """
    return tuple(_gres(words, text) for words in _entries(text))


def _entries(text: str) -> list[list[str]]:
    """Split a list into its resources, and each into its name and what stands behind it."""
    said = text.strip()
    if said.casefold() in _NONE:
        return []
    entries = _ENTRY.findall(said)
    if ",".join(entries) != said:
        raise _no_gres(text)
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
            raise _no_gres(text)
    return found


def _gres(words: list[str], text: str) -> Gres:
    name, *parts = words
    if not _NAME.fullmatch(name) or len(parts) > 3 or "" in parts:  # noqa: PLR2004 - type, no_consume, count
        raise _no_gres(text)
    count = _count(parts[-1]) if parts else None
    if count is not None:
        parts.pop()
    kinds = [part for part in parts if part.casefold() not in _UNTYPED]
    # A type of digits alone (3090) is one where a count stands behind it; else it would be a broken count.
    strange = any(not _KIND.fullmatch(kind) or (count is None and not _LETTER.search(kind)) for kind in kinds)
    if len(kinds) > 1 or strange or (count is None and "(null)" in parts):
        raise _no_gres(text)
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
    """
    gpus = _gpus(text)
    if kind:
        return sum(one.amount for one in gpus if one.kind.casefold() == kind.casefold())
    total = [one.amount for one in gpus if not one.kind]
    return sum(total) if total and "gres/" in text else sum(one.amount for one in gpus)


def gpus_used(text: str, kind: str = "") -> int:
    """Count the GPUs of a list of what is used; those without a type may be of any."""
    if not kind:
        return gpus_in(text)
    kinds = {"", kind.casefold()}
    return sum(one.amount for one in _gpus(text) if one.kind.casefold() in kinds)


def gpus_asked(text: str) -> tuple[str, int]:
    """Read how many GPUs of which type `--gres` asks for; ("", 0) for none."""
    asked = parse_gres(text)
    if not asked:
        return "", 0
    if len(asked) > 1 or asked[0].name != GPU:
        raise _no_gres(text, "number of GPUs of one type")
    return asked[0].kind, asked[0].amount


def _strange_state(kind: str, word: str) -> SlurmTextError:
    return SlurmTextError("", word, f"Slurm reported {word!r} as a {kind}'s state")


def _no_gres(text: str, what: str = "list of generic resources") -> SlurmValueError:
    return SlurmValueError(text, f"is no {what}", "See GRES in gres.conf(5) and sbatch(1).")
