"""What a job asks and what was decided for it, as values with a JSON form; pure.

The JSON form is what `decisions.jsonl` in a job's folder holds, a line for each decision, whoever made it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.types import NodeName


class DecisionFormatError(DeepLinkError):
    """What should be a decision is none that this version can read."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"no decision that can be read: {problem}", remedy="It was damaged, or written by another version."
        )
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a job asks of Slurm, as far as it bears on which nodes it gets.

    Attributes:
        nodes: how many; 0 where that is not known.
        gpus: GPUs on each.
        gpu_type: of which kind; empty for any.
        cpus: CPUs on each, at least.
        memory_mib: memory on each, at least; 0 where nothing was said.
        exclusive: whether it wants whole nodes.
        partition: empty for the cluster's default.
        features: what each node must have.
        excluded: nodes it must not have.
        array: whether it is many jobs, of as many nodes each.
        later: why it does not start as soon as it can; empty where it does.
        limit_s: its time limit; 0 where none was said.
        data: names of packed datasets that it will read.
        patience_s: how long it may be made to wait for better nodes; None where nobody said: not at all.
        no_wish: why no wish may be made for it, whatever the cluster is like; empty where one may.
        profile: what is known of its steps, as `model.profile` writes it; empty where nothing was said.
        comment: what its user wrote about it.
    """

    nodes: int = 0
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 1
    memory_mib: int = 0
    exclusive: bool = False
    partition: str = ""
    features: tuple[str, ...] = ()
    excluded: tuple[NodeName, ...] = ()
    array: bool = False
    later: str = ""
    limit_s: int = 0
    data: tuple[str, ...] = ()
    patience_s: int | None = None
    no_wish: str = ""
    profile: str = ""
    comment: str = ""


class HintKind(StrEnum):
    """What is wished of Slurm."""

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
    LATER_WITH_IT = "later with it"  # Slurm would start the job later with the wish than without
    NOT_ASKED = "not asked"  # the user said so, or chose himself
    NOT_UNDERSTOOD = "not understood"
    IMPOSSIBLE = "impossible"  # no placement can meet it
    UNKNOWN = "unknown"  # the cluster's state could not be had
    WITHDRAWN = "withdrawn"  # a wish made before was taken back


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChoice:
    """One choice of nodes that was weighed.

    Attributes:
        nodes: along the tree.
        cost: less is better (`placement.cost`).
        crossings: leaf-to-leaf hops of the ring over them.
        leaves: how many they lie on.
        percent_local: of the job's data, held by them; 100 for a job without.
        given_up: what could have been had better, in words.
        step_s: the predicted step, in seconds; None where none was predicted.
    """

    nodes: tuple[NodeName, ...]
    cost: float
    crossings: int
    leaves: int
    percent_local: float
    given_up: tuple[str, ...] = ()
    step_s: float | None = None

    @property
    def price(self) -> str:
        """What it costs, in words."""
        return f"cost {self.cost:.2f}" if self.step_s is None else f"predicted step {1e3 * self.step_s:.1f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided.

    Attributes:
        kind: what is wished.
        why: what that rests on.
        words: the same as a sentence.
        nodes: those wished by name, along the tree.
        switches: at most so many leaves; 0 where that is not wished.
        patience_s: how long Slurm may wait for them.
        candidates: the choices that were weighed, the best first.
        expected: where the job will probably run; empty where nobody can tell.
        notes: what was not known, or passed over.
        cost: what the candidates' costs are, `weights` (crossings) or `predicted step` (seconds); empty where
            nothing was weighed.
        own: Slurm's own choice of nodes, weighed as the candidates are; None where it was not asked.
        predicted: the predicted step of the first candidate, part by part, a line each.
    """

    kind: HintKind
    why: Why
    words: str
    nodes: tuple[NodeName, ...] = ()
    switches: int = 0
    patience_s: int = 0
    candidates: tuple[NodeChoice, ...] = ()
    expected: tuple[NodeName, ...] = ()
    notes: tuple[str, ...] = ()
    cost: str = ""
    own: NodeChoice | None = None
    predicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A line of `decisions.jsonl`.

    Attributes:
        unix: when, seconds since 1970.
        by: who decided: `sbatch`, `plan` for what was changed while the job waited, `watch` for its next start.
        ask: what the job asks; also in later lines, so that each can be read alone.
        decision: what was decided.
        done: the command by which it was carried out; empty where nothing was.
    """

    unix: float
    by: str
    ask: Ask
    decision: Decision
    done: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return what `parse` reads, for `json.dumps`."""
        return {"event": "decision", **asdict(self)}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` gave.

        Raises:
            DecisionFormatError: it is no such thing.
        """
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
            raise DecisionFormatError(f"{type(problem).__name__}: {problem}") from problem


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
