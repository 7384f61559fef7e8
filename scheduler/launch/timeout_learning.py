"""Learns from the job itself, per section, how long a rank may be silent before it is late; pure.

What is learned is the silence between two pieces of news of one rank: a newer step, or another section. A rank
says nothing amid a step, and its reports travel three times a second: steps of a millisecond are silences of half
a second, and steps of a minute silences of a minute. Late is who is silent for three times the longest silence in
a hundred, and for ten seconds at least.
"""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

SETUP, STEPS, EVALUATION, CHECKPOINT = "setup", "", "evaluation", "checkpoint"
LEAST_S = 10.0
FACTOR = 3.0
QUANTILE = 0.99
KEPT = 512
"""Silences of each section that are remembered, the newest."""
MOST_SECTIONS = 64
ENOUGH_STEPS = 40
"""Silences between steps that must be seen, over all ranks: four ranks have had ten each after some seconds."""
ENOUGH = 8
"""Silences of any other section that must be seen."""
DEFAULTS = {
    # A file system that is cold for ten thousand ranks at once, compilation, a data set opened, NCCL's rings.
    SETUP: 600.0,
    # The first steps compile and tune kernels; NVIDIA's resiliency extension waits as long.
    STEPS: 180.0,
    # Shared storage that all ranks write to at once; theirs, too.
    CHECKPOINT: 420.0,
    # A whole pass over other data.
    EVALUATION: 600.0,
}
OTHER_S = 600.0
"""A section of the user's own word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimit:
    """How long a section may be silent.

    Attributes:
        seconds: by then a rank is late.
        longest_s: the longest silence that ended well, ever; 0 before the first.
        is_learned: whether it comes from this job's own history.
    """

    seconds: float
    longest_s: float = 0.0
    is_learned: bool = False


@dataclass(slots=True)
class _Seen:
    silences: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    longest_s: float = 0.0
    count: int = 0


class Silences:
    """What was learned of one job, over all its attempts."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def learn(self, section: str, silence_s: float) -> None:
        """Take note of a silence that ended well."""
        if not math.isfinite(silence_s) or silence_s < 0:
            return
        if section not in self._seen and len(self._seen) >= MOST_SECTIONS:
            return
        seen = self._seen.setdefault(section, _Seen())
        seen.silences.append(silence_s)
        seen.longest_s = max(seen.longest_s, silence_s)
        seen.count += 1

    def knows(self, section: str) -> bool:
        """Whether such a section has ever ended."""
        return section in self._seen

    def limit(self, section: str) -> SilenceLimit:
        """Return how long the section may be silent, by what is known now."""
        seen = self._seen.get(section)
        default = DEFAULTS.get(section, OTHER_S)
        if seen is None:
            return SilenceLimit(seconds=default)
        enough = ENOUGH_STEPS if section == STEPS else ENOUGH
        usual = FACTOR * _quantile(seen.silences, QUANTILE)
        if seen.count < enough:
            return SilenceLimit(seconds=max(default, usual), longest_s=seen.longest_s)
        return SilenceLimit(seconds=max(LEAST_S, usual), longest_s=seen.longest_s, is_learned=True)

    def as_text(self) -> str:
        """Return all of it as JSON, for `Silences.read`."""
        sections = {
            name: {
                "silences": [round(one, 3) for one in seen.silences],
                "longest": seen.longest_s,
                "count": seen.count,
            }
            for name, seen in self._seen.items()
        }
        return json.dumps({"version": 1, "sections": sections})

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what `as_text` wrote; what cannot be read counts as nothing learned."""
        silences = cls()
        try:
            found: dict[str, Any] = json.loads(text)
            for name, one in dict(found["sections"]).items():
                seen = _Seen()
                seen.silences.extend(_sound(one["silences"]))
                seen.longest_s = max(seen.silences, default=0.0)
                (longest_s,) = _sound([one["longest"]])
                seen.longest_s = max(seen.longest_s, longest_s)
                seen.count = max(int(one["count"]), len(seen.silences))
                if seen.silences and len(silences._seen) < MOST_SECTIONS:
                    silences._seen[str(name)] = seen
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls()
        return silences


def _sound(numbers: Iterable[Any]) -> list[float]:
    """Return the numbers.

    Raises:
        ValueError: one is none, negative or not finite.
    """
    sound = [float(number) for number in numbers]
    if not all(math.isfinite(number) and number >= 0 for number in sound):
        raise ValueError("a silence that is none")
    return sound


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)))]
