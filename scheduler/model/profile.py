"""A job's profile, what the model must know of it, as a JSON text, and back; pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from deeplink.errors import DeepLinkError
from deeplink.scheduler.model.errors import above_zero
from deeplink.scheduler.model.job import Algorithm, Job, Scaling, Schedule

_FORMAT = 1
_ENUMS = {"scaling": Scaling, "algorithm": Algorithm, "schedule": Schedule}
_WHOLE = ("batch", "ranks_per_node")
_NEEDED = ("batch", "sample_s", "gradient_bytes")
_MEASURED = "step_s"


class ProfileError(DeepLinkError):
    """What should be a job's profile is none."""

    exit_code = 2

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where}: no profile of a job: {problem}",
            remedy='It holds {"format": 1, "batch": 32, "sample_s": 0.0044, "gradient_bytes": 102e6}, or more: '
            "docs/cost-model.md.",
        )
        self.where, self.problem = where, problem


@dataclass(frozen=True, slots=True)
class Profile:
    """What the model must know of a job.

    Attributes:
        job: its computing, its gradients, its reading.
        ranks_per_node: ranks on each node; None for one on each GPU, and one where it asks for none.
    """

    job: Job
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None:
            above_zero("the number of a node's ranks", self.ranks_per_node)

    def ranks(self, gpus: int) -> int:
        """Return the ranks on each node, where the job asks for so many GPUs on each."""
        return self.ranks_per_node or gpus or 1


def profile_text(profile: Profile) -> str:
    """Return a profile as JSON, on one line."""
    values: dict[str, Any] = asdict(profile.job)
    values |= {name: values[name].value for name in _ENUMS}
    if profile.ranks_per_node is not None:
        values["ranks_per_node"] = profile.ranks_per_node
    return json.dumps({"format": _FORMAT, **values})


def profile_from(text: str, where: str) -> Profile:
    """Read a profile: what `profile_text` wrote, or somebody by hand; all but three values have defaults.

    Instead of `sample_s` there may be `step_s`, a measured step of one rank alone, where nothing is summed; of it
    `fixed_s` does not depend on the batch.

    Args:
        text: the JSON.
        where: what to call it in an error: the file's name.

    Raises:
        ProfileError: it is something else, lacks a value, or has one that we do not know.
        ModelInputError: a value cannot be.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ProfileError(where, f"not JSON ({problem})") from problem
    if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
        raise ProfileError(where, f"not an object of format {_FORMAT}")
    if _MEASURED in found and "sample_s" not in found:
        found["sample_s"] = _of_one_sample(found, where)
    strange = found.keys() - {field.name for field in fields(Job)} - {"ranks_per_node"}
    lacking = [name for name in _NEEDED if name not in found]
    if strange or lacking:
        raise ProfileError(where, f"lacks or has too much: {', '.join(sorted([*strange, *lacking]))}")
    values = {name: _value(name, value, where) for name, value in found.items()}
    ranks = values.pop("ranks_per_node", None)
    return Profile(Job(**values), ranks)


def _of_one_sample(found: dict[str, Any], where: str) -> float:
    """Return the seconds of a sample, from a measured step; takes that out of what was found."""
    step_s = _value(_MEASURED, found.pop(_MEASURED), where)
    fixed_s = _value("fixed_s", found.get("fixed_s", 0.0), where)
    batch = _value("batch", found.get("batch", 1), where)
    above_zero("the measured step", step_s - fixed_s)
    above_zero("the batch", batch)
    return float((step_s - fixed_s) / batch)


def _value(name: str, value: object, where: str) -> Any:
    if name in _ENUMS:
        words = [one.value for one in _ENUMS[name]]
        if value not in words:
            raise ProfileError(where, f"{name} is {value!r}, but must be {' or '.join(words)}")
        return _ENUMS[name](value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(where, f"{name} is {value!r}, no number")
    if name in _WHOLE and not isinstance(value, int):
        raise ProfileError(where, f"{name} is {value!r}, no whole number")
    return value
