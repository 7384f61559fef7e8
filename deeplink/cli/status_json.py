"""Jobs as plain values, for programs."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from typing import TYPE_CHECKING, Any

from deeplink.types import Attempt

if TYPE_CHECKING:
    from deeplink.scheduler.view.look import JobOnFabric, JobTable
    from deeplink.scheduler.view.picture import Picture


def document_of_table(table: JobTable) -> dict[str, Any]:
    """Return a table of jobs; what is not known is null."""
    return {
        "jobs": [document_of(picture) for picture in table.pictures],
        "hidden": table.hidden,
        "slurm": {"answered_unix": table.told_unix or None, "problem": table.problem or None},
    }


def document_of_one(one: JobOnFabric) -> dict[str, Any]:
    """Return one job, and the switches above each of its nodes."""
    made = document_of(one.picture)
    for seat in made["seats"]:
        seat["switches"] = list(one.fabric.path(seat["node"]))
    return {**made, "slurm": {"answered_unix": one.told_unix or None, "problem": one.problem or None}}


def document_of(picture: Picture) -> dict[str, Any]:
    """Return one job; what is not known is null."""
    made: dict[str, Any] = _plain(picture)
    said = made.pop("pace")
    made |= {
        name: said[name] for name in ("step", "steps_per_s", "samples_per_s", "reads", "total_steps", "left_s")
    }
    made |= {"step_unix": said["unix"], "metric": {"name": said["metric"], "value": said["value"]}}
    made["checkpoint"] = said["saved"]
    return {name: None if value == "" else value for name, value in made.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Attempt):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "unlimited" if value > 0 else "-inf"
    return value
