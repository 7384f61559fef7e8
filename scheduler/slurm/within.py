"""Tells a process its place in a Slurm job, by its environment; pure. Imports nothing: stand-ins wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_SPECIAL = 0xFFFF_FFF0
"""Step numbers from here on are those of the batch script, of salloc's shell and the like (slurm.h)."""


def is_in_step(env: Mapping[str, str]) -> bool:
    """Whether the process belongs to a step that srun made.

    From 26.05 on batch scripts have a step's number, too: -5.

    >>> [is_in_step({"SLURM_STEP_ID": number}) for number in ("0", "7", "-5", "4294967290")], is_in_step({})
    ([True, True, False, False], False)
    """
    number = env.get("SLURM_STEP_ID", "")
    return number.isascii() and number.isdigit() and int(number[:20]) < _FIRST_SPECIAL
