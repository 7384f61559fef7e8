"""Every state a job or a node of Slurm can be in. A word that is not here is OTHER, of which nothing is known."""

from __future__ import annotations

import re
from enum import Enum

from deeplink.errors import DeepLinkError

_WORD = re.compile(r"[A-Z][A-Z_]*", re.ASCII)


class UnknownStateError(DeepLinkError):
    """Where Slurm writes a state there is no word."""

    def __init__(self, kind: str, word: str) -> None:
        super().__init__(
            f"Slurm reported {word!r} as a {kind}'s state",
            remedy="Please report it together with `sinfo --version`.",
        )
        self.kind, self.word = kind, word


HELD = ("JobHeldUser", "JobHeldAdmin", "job requeued in held state")
"""How the reasons begin of jobs that wait until somebody releases them (measured with 22.05)."""


LAUNCH_FAILED = "launch failed requeued held"
"""The reason of jobs that a node did not start: Slurm holds them, and their owner may release them (22.05)."""


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

        Raises:
            UnknownStateError: it is no word at all.
        """
        state = word.split(" ", 1)[0].removesuffix("+")
        if _WORD.fullmatch(state) is None:
            raise UnknownStateError("job", word)
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

    Raises:
        UnknownStateError: the base or a flag is no word at all.
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
        raise UnknownStateError("node", text)
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
