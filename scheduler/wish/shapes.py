"""What the same GPUs would do on other numbers of nodes: advice, since that number is the user's to say; pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.scheduler.wish.decide import LEAST_SHARE, decide
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.wish.decide import Surroundings, Weighed
    from deeplink.scheduler.wish.decision import Ask, NodeChoice

SHOWN = 3


def other_shapes(ask: Ask, weighed: Weighed, around: Surroundings) -> tuple[str, ...]:
    """Return, as sentences, on how many other nodes the job's GPUs would make a shorter step, the shortest first.

    None where no step is predicted, where no nodes were weighed, and where no other number is worth a change.

    Args:
        ask: what the job asks.
        weighed: what was decided for it.
        around: in what.
    """
    own = weighed.decision.candidates[0].step_s if weighed.decision.candidates else None
    if own is None or not ask.gpus:
        return ()
    better = [(option, gpus) for gpus, option in _others(ask, around) if _step(option) <= own * (1 - LEAST_SHARE)]
    better.sort(key=lambda one: _step(one[0]))
    return tuple(
        f"the same GPUs as {counted(len(option.nodes), 'node')} with {gpus} each: {option.price}, "
        f"not {1e3 * own:.1f} ms"
        for option, gpus in better[:SHOWN]
    )


def _others(ask: Ask, around: Surroundings) -> Iterator[tuple[int, NodeChoice]]:
    """Yield GPUs of each node, and the best choice of nodes with as many."""
    all_gpus = ask.nodes * ask.gpus
    most = max((node.gpus(ask.gpu_type) or 0 for node in around.now.nodes.values()), default=0)
    for gpus in range(1, min(most, all_gpus) + 1):
        if all_gpus % gpus == 0 and gpus != ask.gpus:
            other = replace(ask, nodes=all_gpus // gpus, gpus=gpus, patience_s=0)
            candidates = decide(other, around).decision.candidates
            if candidates and candidates[0].step_s is not None:
                yield gpus, candidates[0]


def _step(option: NodeChoice) -> float:
    return option.step_s or 0.0
