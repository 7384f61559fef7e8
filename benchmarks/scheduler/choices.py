"""Slurm's recorded choices of nodes, as values and as a file."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.scheduler.manyslurmd import Names, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Answer(NamedTuple):
    """Where Slurm would run a job, or did.

    Attributes:
        nodes: how many nodes were asked for.
        gpus: GPUs on each; 0 for whole nodes.
        switches: what `--switches` said; 0 where it was not given.
        how: `test-only` was asked about, `salloc` ran.
        later: whether it would have had to wait, or never run.
        chosen: the nodes, folded.
    """

    nodes: int
    gpus: int
    switches: int
    how: str
    later: bool
    chosen: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A state, GPUs in use on each node, a digit each, and what Slurm answered in it."""

    used: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """All answers of one cluster."""

    slurm: str
    shape: Shape
    states: tuple[Asked, ...]

    def each(self) -> Iterator[tuple[str, Answer]]:
        """Yield every answer with the state it was given in."""
        return ((state.used, answer) for state in self.states for answer in state.answers)


def write_record(record: Record, path: Path) -> None:
    """Write all answers, packed; the same ones are the same bytes."""
    states = [{"used": state.used, "answers": state.answers} for state in record.states]
    text = json.dumps({"slurm": record.slurm, "shape": asdict(record.shape), "states": states})
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_record(path: Path) -> Record:
    """Read what `write_record` wrote."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    states = (Asked(state["used"], tuple(Answer(*one) for one in state["answers"])) for state in found["states"])
    shape = Shape(**found["shape"] | {"names": Names(found["shape"]["names"])})
    return Record(found["slurm"], shape, tuple(states))
