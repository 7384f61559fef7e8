"""What a job asks and what was decided for it, as values with a JSON form; pure.

The JSON form is what `decisions.jsonl` in a job's folder holds, a line for each decision, whoever made it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from deeplink.core.private import private_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.core.types import NodeName

NAME = "decisions.jsonl"
_MOST_READ = 4 << 20  # bytes: the newest lines of a record that somebody let grow


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a job asks of Slurm, as far as it bears on which nodes it gets."""

    nodes: int = 0  # how many; 0 where that is not known
    gpus: int = 0  # GPUs on each
    gpu_type: str = ""  # of which kind; empty for any
    cpus: int = 1  # CPUs on each, at least
    memory_mib: int = 0  # memory on each, at least; 0 where nothing was said
    exclusive: bool = False  # whether it wants whole nodes
    partition: str = ""  # empty for the cluster's default
    features: tuple[str, ...] = ()  # what each node must have
    excluded: tuple[NodeName, ...] = ()  # nodes it must not have
    array: bool = False  # whether it is many jobs, of as many nodes each
    later: str = ""  # why it does not start as soon as it can; empty where it does
    limit_s: int = 0  # its time limit; 0 where none was said
    data: tuple[str, ...] = ()  # names of packed datasets that it will read
    # how long it may be made to wait for better nodes; None where no one said: not at all
    patience_s: int | None = None
    no_wish: str = ""  # why no hint may be made for it, whatever the cluster is like; empty where one may
    profile: str = ""  # what is known of its steps, as `model.profile` writes it; empty where nothing was said
    comment: str = ""  # what its user wrote about it


class HintKind(StrEnum):
    """What is asked of Slurm."""

    NODES = "nodes"  # by name
    SWITCHES = "switches"  # few leaves, waited for some time
    NOTHING = "nothing"


class Why(StrEnum):
    """What a decision rests on; `Decision.words` says it for people."""

    FREE_NOW = "free now"  # the best nodes are, and Slurm's own choice is worse
    AS_GOOD = "as good"  # Slurm's own choice is as good
    BUSY = "busy"  # too few are free now
    SCATTERED = "scattered"  # those that are free lie on more leaves than need be
    STARTS_LATER = "starts later"  # who knows what is free then
    NOTHING_TO_GAIN = "nothing to gain"
    NOT_LOOKED_AFTER = "not looked after"  # no service would take the nodes off the job again
    LATER_WITH_IT = "later with it"  # Slurm would start the job later with the hint than without
    NOT_ASKED = "not asked"  # the user said so, or chose himself
    NOT_UNDERSTOOD = "not understood"
    IMPOSSIBLE = "impossible"  # no placement can meet it
    UNKNOWN = "unknown"  # the cluster's state could not be had
    WITHDRAWN = "withdrawn"  # a hint made before was taken back


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChoice:
    """One choice of nodes that was weighed."""

    nodes: tuple[NodeName, ...]  # along the tree
    cost: float  # less is better (`request.Weights`, or seconds)
    crossings: int  # leaf-to-leaf hops of the ring over them
    leaves: int  # how many they lie on
    percent_local: float  # of the job's data, held by them; 100 for a job without
    given_up: tuple[str, ...] = ()  # what could have been had better, in words
    step_s: float | None = None  # the predicted step, in seconds; None where none was predicted

    @property
    def price(self) -> str:
        """What it costs, in words."""
        return f"cost {self.cost:.2f}" if self.step_s is None else f"predicted step {1e3 * self.step_s:.1f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided."""

    kind: HintKind  # what is asked of Slurm
    why: Why  # what that rests on
    words: str  # the same as a sentence
    nodes: tuple[NodeName, ...] = ()  # those named, along the tree
    switches: int = 0  # at most so many leaves; 0 where that is not asked
    patience_s: int = 0  # how long Slurm may wait for them
    candidates: tuple[NodeChoice, ...] = ()  # the choices that were weighed, the best first
    expected: tuple[NodeName, ...] = ()  # where the job will probably run; empty where no one can tell
    notes: tuple[str, ...] = ()  # what was not known, or passed over
    # what the candidates' costs are, `weights` (crossings) or `predicted step` (seconds); empty where nothing was
    # weighed
    cost: str = ""
    # Slurm's own choice of nodes, weighed as the candidates are; None where it was not asked
    own: NodeChoice | None = None
    predicted: tuple[str, ...] = ()  # the predicted step of the first candidate, part by part, a line each

    @property
    def names_nodes(self) -> bool:
        """Whether it is for nodes by name."""
        return self.kind is HintKind.NODES and bool(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A line of `decisions.jsonl`."""

    unix: float  # when, seconds since 1970
    by: str  # who decided: `sbatch`, `plan` for what was changed while the job waited, `watch` for its next start
    ask: Ask  # what the job asks; also in later lines, so that each can be read alone
    decision: Decision  # what was decided
    done: tuple[str, ...] = ()  # the command by which it was carried out; empty where nothing was

    def document(self) -> dict[str, Any]:
        """Return what `parse` reads, for `json.dumps`."""
        return {"event": "decision", **asdict(self)}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` gave."""
        try:
            ask = dict(document["ask"])
            said = dict(document["decision"])
            said["candidates"] = tuple(NodeChoice(**_tuples(option)) for option in said["candidates"])
            if said.get("own"):
                said["own"] = NodeChoice(**_tuples(said["own"]))
            said |= {"kind": HintKind(said["kind"]), "why": Why(said["why"])}
            return cls(
                unix=float(document["unix"]),
                by=str(document["by"]),
                ask=Ask(**_tuples(ask)),
                decision=Decision(**_tuples(said)),
                done=tuple(map(str, document["done"])),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"no decision that can be read: {type(problem).__name__}: {problem}") from problem


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def job_folder(state: Path, job: int | str) -> Path:
    """Return where a job's records are; of an array that of the array's own id."""
    return state / "jobs" / str(job)


def append(folder: Path, recorded: Recorded) -> None:
    """Add a decision to a job's record, whole or not at all; makes the folder."""
    private_folder(folder)
    line = f"{json.dumps(recorded.document())}\n".encode()
    opened = _opened(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        before = os.fstat(opened).st_size
        if os.write(opened, line) != len(line):  # the disk is full
            os.ftruncate(opened, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / NAME))
    finally:
        os.close(opened)


def _opened(path: Path, flags: int) -> int:
    """Open a file, and nothing else: a pipe that somebody put there would be waited for."""
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "not a file", str(path))


def read(folder: Path) -> list[Recorded]:
    """Return a job's decisions that can be read, oldest first."""
    try:
        with os.fdopen(_opened(folder / NAME, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MOST_READ))
            lines = file.read(_MOST_READ).splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Recorded.parse(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    return found
