"""What parts the fields of Slurm's answers: job names are free text, so nobody may guess it."""

from __future__ import annotations

import re
import secrets

PATTERN = re.compile("~[0-9a-f]{16}~")
"""Every text that `fresh_separator` may return."""


def fresh_separator() -> str:
    """Return a separator for one question: all that keeps a job's name from posing as another job's state."""
    return f"~{secrets.token_hex(8)}~"
