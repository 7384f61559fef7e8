"""Constants as a JSON text, and back; pure."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from math import inf, isinf
from typing import Any

from deeplink.errors import DeepLinkError
from deeplink.scheduler.model.constants import Constants, LinkSpeed, ReadSpeeds

_FORMAT = 2
_WITHOUT_READS = 1
_LINKS = ("gpu", "nic", "leaf", "spine")


class ConstantsFormatError(DeepLinkError):
    """A text that should hold constants does not."""

    exit_code = 2

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where}: no constants of the cost model: {problem}",
            remedy="Make it again with `deeplink run -- deeplink calibrate --out FILE`.",
        )
        self.where, self.problem = where, problem


def constants_text(constants: Constants) -> str:
    """Return constants as JSON: bytes a second, seconds, shares; a bandwidth without limit is null.

    `reads` holds those places that were timed.
    """
    values = asdict(constants)
    values["reads"] = {name: value for name, value in values["reads"].items() if value is not None}
    return json.dumps({"format": _FORMAT, **_finite(values)}, indent=2) + "\n"


def constants_from(text: str, where: str) -> Constants:
    """Read what `constants_text` wrote, also earlier, when nothing was known of reading (format 1).

    Args:
        text: the JSON.
        where: what to call it in an error: the file's name.

    Raises:
        ConstantsFormatError: it is something else, lacks a value, or has one that we do not know.
        ModelInputError: a value cannot be.
    """
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise ConstantsFormatError(where, f"not JSON ({problem})") from problem
    stamp = found.pop("format", None) if isinstance(found, dict) else None
    if stamp not in (_FORMAT, _WITHOUT_READS):
        raise ConstantsFormatError(where, f"not an object of format {_WITHOUT_READS} or {_FORMAT}")
    if stamp == _WITHOUT_READS:
        found.setdefault("reads", {})
    _check_names(found, Constants, where)
    values: dict[str, Any] = {
        name: _link(value, where, name) if name in _LINKS else _number(value, where)
        for name, value in found.items()
        if name != "reads"
    }
    if not isinstance(found["nics"], int):
        raise ConstantsFormatError(where, f"{found['nics']!r} is no number of ports")
    return Constants(**values | {"nics": found["nics"], "reads": _reads(found["reads"], where)})


def _reads(found: object, where: str) -> ReadSpeeds:
    names = {field.name for field in fields(ReadSpeeds)}
    if not isinstance(found, dict) or not found.keys() <= names:
        raise ConstantsFormatError(where, f"reads is no object of {', '.join(sorted(names))}")
    values = {name: _number(value, where) for name, value in found.items()}
    return ReadSpeeds(**values)


def _link(found: object, where: str, name: str) -> LinkSpeed:
    if not isinstance(found, dict):
        raise ConstantsFormatError(where, f"{name} is no object")
    _check_names(found, LinkSpeed, where)
    return LinkSpeed(_number(found["bandwidth"], where), _number(found["latency_s"], where))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _finite(value) if isinstance(value, dict) else None if isinf(value) else value
        for name, value in values.items()
    }


def _check_names(found: dict[str, Any], kind: type[Constants | LinkSpeed], where: str) -> None:
    wanted = {field.name for field in fields(kind)}
    if wanted != set(found):
        raise ConstantsFormatError(where, f"lacks or has too much: {', '.join(sorted(wanted ^ set(found)))}")


def _number(value: object, where: str) -> float:
    if value is None:
        return inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConstantsFormatError(where, f"{value!r} is no number")
    return float(value)
