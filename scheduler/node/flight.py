"""The dump of torch's NCCL flight recorder: a pickle, of which nothing but plain values is accepted."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink import plainpickle

if TYPE_CHECKING:
    from collections.abc import Mapping

NEWEST = 16
"""Collectives that are passed on."""
LARGEST = 64 << 20
"""A dump of more bytes is left alone."""
_FILE, _PIPE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's own choice
_KEPT = (
    "pg_name",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "state",
    "input_sizes",
    "retired",
)


def flight_file(environment: Mapping[str, str], rank: int) -> Path:
    """Return where a rank of this environment dumps."""
    return Path(f"{environment.get(_FILE) or _DEFAULT}{rank}")


def ask_for_dump(environment: Mapping[str, str], rank: int) -> bool:
    """Ask a rank for a dump, where it listens for that (TORCH_NCCL_DEBUG_INFO_PIPE_FILE); never waits."""
    prefix = environment.get(_PIPE)
    if not prefix:
        return False
    with contextlib.suppress(OSError):
        pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1\n")
        finally:
            os.close(pipe)
        return True
    return False


def newest_collectives(path: Path, *, since_unix: float) -> str:
    """Return the newest collectives of a dump, as JSON; empty where there is none since then, or it is damaged."""
    try:
        seen = path.stat()
        if seen.st_mtime < since_unix or seen.st_size > LARGEST or seen.st_uid != os.getuid():
            return ""
        dump = plainpickle.loaded(path.read_bytes(), {})
        entries = dump["entries"][-NEWEST:]
        return json.dumps([_kept(entry) for entry in entries], default=str)
    except Exception:  # noqa: BLE001 - a pickle of somebody else's may raise anything
        return ""


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in _KEPT if name in entry}
