"""Numbers on a command line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

if TYPE_CHECKING:
    from click.core import Context, Parameter


class FiniteRange(click.FloatRange):
    """A range that `nan` and `inf` are outside of: click's own lets both in where they are below no bound."""

    @override
    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number", param, ctx)
        return found
