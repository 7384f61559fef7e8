"""Which faults are in effect, kept in the sandbox's folder: whoever comes later can undo them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from deeplink.publish import write_text
from deeplink.scheduler.sandbox.lab.errors import WoundRecordError
from deeplink.scheduler.sandbox.lab.steps import FaultStep, Verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """One fault in effect.

    Attributes:
        unix: when it was done.
        undo: what takes it away.
        done: whether it was done to its end; else whoever was at it has ended, or is at it still.
    """

    name: str
    target: str
    unix: float
    undo: tuple[FaultStep, ...] = ()
    done: bool = True

    @property
    def frozen(self) -> bool:
        """Whether the shared folder stalls meanwhile."""
        return any(step.verb is Verb.THAW for step in self.undo)

    def is_of(self, name: str, target: str) -> bool:
        """Whether it is of this fault and this target; an empty word stands for any."""
        return name in {"", self.name} and target in {"", self.target}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read what was written as JSON.

        Raises:
            KeyError, ValueError, TypeError: it is something else.
        """
        undo = tuple(map(FaultStep.of, raw["undo"]))
        return cls(
            name=str(raw["name"]),
            target=str(raw["target"]),
            unix=float(raw["unix"]),
            undo=undo,
            done=bool(raw.get("done", True)),
        )


def read(path: Path) -> tuple[Wound, ...]:
    """Return the faults in effect, the oldest first.

    Raises:
        WoundRecordError: the file is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    try:
        return tuple(map(Wound.of, json.loads(text)))
    except (KeyError, ValueError, TypeError, AttributeError) as problem:
        raise WoundRecordError(str(path), f"{type(problem).__name__}: {problem}") from problem


def write(path: Path, wounds: Iterable[Wound]) -> None:
    """Keep the faults in effect."""
    write_text(path, json.dumps([asdict(wound) for wound in wounds], indent=1) + "\n")
