"""What agents are asked of late ranks, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from deeplink.types import NodeName
    from deeplink.v1 import node_pb2


@dataclass(slots=True)
class Question:
    """One that all agents were asked at once.

    Attributes:
        asked: when, by our clock.
        calls: futures of StacksReply, by node.
    """

    asked: float
    calls: Mapping[NodeName, Any]

    @property
    def is_answered(self) -> bool:
        """Whether nobody's answer is waited for any more."""
        return all(call.done() for call in self.calls.values())

    def answers(self) -> dict[NodeName, tuple[node_pb2.RankStack, ...]]:
        """Return what came back; nodes that did not answer, or whose agent is too old to, are missing."""
        return {
            node: tuple(call.result().ranks)
            for node, call in self.calls.items()
            if call.done() and not call.cancelled() and call.exception() is None
        }


def by_rank(answer: tuple[node_pb2.RankStack, NodeName]) -> tuple[int, str]:
    """The order of answers."""
    return answer[0].rank, answer[1]


def stack_text(answers: Iterable[tuple[node_pb2.RankStack, NodeName]], steps: Mapping[int, int]) -> str:
    """Return the file of an attempt's stacks.

    Args:
        answers: each rank's, with its node.
        steps: the newest step of each rank that reported one.
    """
    parts = []
    for one, node in answers:
        source = f", by {one.source}" if one.source else ""
        step = f", step {steps[one.rank]}" if one.rank in steps else ""
        parts.append(f"=== rank {one.rank} on {node}, pid {one.pid}, state {one.state or 'gone'}{step}{source}")
        parts.append(one.text.rstrip())
        if one.flight:
            parts.append(f"--- newest collectives: {one.flight}")
    return "\n".join(parts) + "\n"
