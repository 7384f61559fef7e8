"""What the demonstration found out: from events, results and the index to one value and its JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.demo.follow import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFigures:
    """The figures of one demonstration, as `build/demo.json` holds them.

    Attributes:
        files: files packed.
        files_per_s: packed per second, agents' start not counted.
        ring_crossings: leaf-to-leaf hops of the first attempt's rank ring.
        ring_crossings_stock: the same in Slurm's own order.
        detect_s: from the node's death to the verdict; None where none died.
        resume_s: from the node's death to the first training step of the next attempt.
        attempts: incarnations of the ranks.
        steps_repeated: steps done again because they came after the last checkpoint.
        accuracy: share of the test images the trained network gets right.
        digest_equal: every sample of every epoch was counted exactly once.
        wall_s: the whole demonstration, without its set-up by make.
        backend: slurm, slurm-loopback or local.
    """

    files: int
    files_per_s: float
    ring_crossings: int
    ring_crossings_stock: int
    detect_s: float | None
    resume_s: float | None
    attempts: int
    steps_repeated: int
    accuracy: float
    digest_equal: bool
    wall_s: float
    backend: str

    def as_dict(self) -> dict[str, int | float | bool | str | None]:
        """Return the facts for JSON, times to the millisecond."""
        return {
            name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class RecoveryFigures:
    """How a death went: seconds from it to the verdict and to the next attempt's first step; and what was done."""

    detect_s: float | None
    resume_s: float | None
    rung: str


def recovery(events: Sequence[Event], died_unix: float, node: str) -> RecoveryFigures:
    """Return what the launcher's events say about the death of `node` at `died_unix`."""
    after = [event for event in events if event["unix"] >= died_unix]
    detected = next((e["unix"] for e in after if e["event"] == "node-silent" and node in e["nodes"]), None)
    resumed = next(
        (e["unix"] for e in after if e["event"] == "first-step" and detected is not None and e["unix"] > detected),
        None,
    )
    climbed = next((e["event"] for e in after if e["event"] in {"relaunch", "requeue"}), "")
    rung = {
        "relaunch": "rung 1: ranks relaunched inside the allocation, on the spare",
        "requeue": "rung 3: the node was taken from Slurm, which started the job again",
        "": "none",
    }[climbed]
    return RecoveryFigures(
        None if detected is None else detected - died_unix,
        None if resumed is None else resumed - died_unix,
        rung,
    )
